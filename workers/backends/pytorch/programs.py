"""Programs in PyTorch files: TorchScript, a torch.export program, or a compiled package.

Invariant: the mapping of configured tensors to arguments and results is fixed at load; a call only applies it.
"""

from __future__ import annotations

import operator
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from shmserve.dtypes import BY_NAME
from shmserve.errors import Internal, InvalidRequest
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.files.torch_file import TorchKind, torch_kind

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec

DTYPES = {getattr(torch, name): dtype for name, dtype in BY_NAME.items()}
_BY_PLACE = re.compile(r".+__(\d+)", re.ASCII)
_STRINGS = "List[str]"
_THROUGH = frozenset({"aten::dropout", "aten::alpha_dropout", "aten::feature_dropout", "aten::feature_alpha_dropout"})
"""Operators that may return their input itself, although their schema does not declare an alias."""
_KEEPING = ("prim::SetAttr", "aten::append", "aten::insert", "aten::_set_item", "aten::extend")


class Argument(NamedTuple):
    """One tensor argument of a program. `names`: all its names. `optional`: it can be left out or be None."""

    names: tuple[str, ...]
    optional: bool = False
    strings: bool = False
    changed: bool = False
    """The program writes to it or keeps it, so it needs a copy."""


class Program(ABC):
    """`arguments` are in the order of the leaves that `call` takes."""

    arguments: Sequence[Argument] = ()
    results: Sequence[tuple[str, ...]] | None = None
    """The names of each result, if the file contains their number."""
    whole_dict: bool = False
    """Whether it takes one dict of tensors with the names of the configuration."""

    @abstractmethod
    def call(self, leaves: Sequence[Any]) -> Any:
        """Runs the program with a value for each argument."""

    def facts(self) -> tuple[list[TensorFacts | None], list[TensorFacts | None]] | None:
        """Returns the file's description of each argument and result, None for those that are not tensors; None if
        there is no description."""
        return None


def open_program(path: Path, device: torch.device) -> Program:
    kinds: dict[TorchKind, Callable[[Path, torch.device], Program]] = {
        TorchKind.SCRIPT: Script,
        TorchKind.EXPORTED: Exported,
        TorchKind.COMPILED: CompiledProgram,
    }
    return kinds[torch_kind(path)](path, device)


# ------------------------------------------------------------------------------------ TorchScript


class Script(Program):
    def __init__(self, path: Path, device: torch.device) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the warning only says that TorchScript is deprecated
            module: Any = torch.jit.load(str(path), map_location=device)
        module.eval()
        self.module = module
        taken = module.forward.schema.arguments[1:]
        graph = module.inlined_graph
        aliases = graph.alias_db()
        changed = [_changed(graph, aliases, value) for value in list(graph.inputs())[1:]]
        self.whole_dict = len(taken) == 1 and str(taken[0].type) == "Dict[str, Tensor]"
        self.arguments = [
            Argument(
                (argument.name,),
                argument.has_default_value() or argument.type.kind() == "OptionalType",
                _STRINGS in str(argument.type),
                change,
            )
            for argument, change in zip(taken, changed, strict=True)
        ]
        self._names = [argument.name for argument in taken]
        self._omits = [argument.has_default_value() for argument in taken]

    def call(self, leaves: Sequence[Any]) -> Any:
        if None not in leaves:
            return self.module(*leaves)
        arguments = zip(self._names, leaves, self._omits, strict=True)
        return self.module(**{name: leaf for name, leaf, omit in arguments if leaf is not None or not omit})


def _changed(graph: Any, aliases: Any, value: Any) -> bool:
    """Whether running the graph may write to this input or keep it beyond the run; True in doubt."""
    if aliases.has_writers(value) or str(value.type()).startswith("Dict"):
        return True
    through = [node for kind in _THROUGH for node in graph.findAllNodes(kind, recurse=True)]
    if any(aliases.has_writers(node.output()) for node in through):
        return True
    keepers = [node for kind in _KEEPING for node in graph.findAllNodes(kind, recurse=True)]
    return any(aliases.may_contain_alias(kept, value) for node in keepers for kept in list(node.inputs())[1:])


# ------------------------------------------------------------------------------------ torch.export


class _Tree(Program):
    """A program whose arguments and results are trees: ARGS[0], KWARGS[scale], ARGS[1][mask]; RESULT, RESULT[0]."""

    def __init__(self, module: Any, arguments: Any, results: Any, named: Sequence[str] = ()) -> None:
        """`arguments`, `results`: the specs of the trees. `named`: the file's name of each argument, if it has one."""
        self._module = module
        self._spec = arguments
        paths = _paths(arguments)
        names = [_argument_names(path, place) for place, path in enumerate(paths)]
        if named:
            names = [tuple(dict.fromkeys((*pair, more))) for pair, more in zip(names, named, strict=True)]
        self.arguments = [Argument(pair) for pair in names]
        self.results = [_result_names(path, place) for place, path in enumerate(_paths(results))]
        positional, keywords = pytree.tree_unflatten(list(range(len(paths))), arguments)
        plain = [*positional, *keywords.values()]
        self._plain = all(isinstance(leaf, int) for leaf in plain) and plain == list(range(len(plain)))
        self._positional, self._keywords = len(positional), tuple(keywords)

    def call(self, leaves: Sequence[Any]) -> Any:
        if self._plain:
            count = self._positional
            return self._module(*leaves[:count], **dict(zip(self._keywords, leaves[count:], strict=True)))
        positional, keywords = pytree.tree_unflatten(list(leaves), self._spec)
        return self._module(*positional, **keywords)


class Exported(_Tree):
    def __init__(self, path: Path, device: torch.device) -> None:
        program = torch.export.load(str(path))
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        self._program = program
        taken = [spec.arg for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
        self._constants = [getattr(argument, "value", None) for argument in taken]
        specs = program.call_spec
        super().__init__(program.module(), specs.in_spec, specs.out_spec, [argument.name for argument in taken])
        written = _written(program)
        self.arguments = [
            argument._replace(changed=written is None or entry.name in written, optional=hasattr(entry, "value"))
            for argument, entry in zip(self.arguments, taken, strict=True)
        ]

    def call(self, leaves: Sequence[Any]) -> Any:
        """Calls the program. An argument that was a constant at export must have the same value now."""
        if None in leaves:
            leaves = [
                constant if leaf is None else leaf for leaf, constant in zip(leaves, self._constants, strict=True)
            ]
        return super().call(leaves)

    def facts(self) -> tuple[list[TensorFacts | None], list[TensorFacts | None]] | None:
        signature = self._program.graph_signature
        values = {node.name: node.meta.get("val") for node in self._program.graph.nodes}
        taken = [spec.arg for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        produced = [spec.arg for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT"]
        assert self.results is not None
        return (
            [_fact(entry.name, values.get(entry.name)) for entry in taken],
            [
                _fact(names[2] if len(names) > 2 else names[0], values.get(entry.name))
                for names, entry in zip(self.results, produced, strict=True)
            ],
        )


def _written(program: Any) -> set[str] | None:
    """Returns the inputs that an exported program may write to, also through views; None if unknown."""
    written = {str(name) for name in program.graph_signature.user_inputs_to_mutate.values()}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            if node.target is not operator.getitem and any(other.op == "get_attr" for other in node.all_input_nodes):
                return None  # control flow: its branches are in separate graphs
            continue
        for argument, taken in zip(node.args, schema.arguments, strict=False):
            if taken.alias_info is not None and taken.alias_info.is_write:
                written |= _roots(argument)
    return written


def _roots(value: Any) -> set[str]:
    """Returns the inputs whose memory a value of the graph may share."""
    roots: set[str] = set()
    seen: set[Any] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (list, tuple)):
            waiting += node
        if not hasattr(node, "all_input_nodes") or node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            roots.add(node.name)
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.name in _THROUGH or any(value.alias_info is not None for value in schema.returns):
            waiting += node.all_input_nodes
    return roots


class CompiledProgram(_Tree):
    """A package that torch.compile built ahead of time for this kind of machine."""

    def __init__(self, path: Path, device: torch.device) -> None:
        from torch._inductor import aoti_load_package

        module = aoti_load_package(str(path), run_single_threaded=True, device_index=device.index or -1)
        arguments, results = module.loader.get_call_spec()
        super().__init__(module, pytree.treespec_loads(arguments), pytree.treespec_loads(results))
        # A compiled program may write to any of its inputs.
        self.arguments = [argument._replace(changed=True) for argument in self.arguments]


def _paths(spec: Any) -> list[tuple[Any, ...]]:
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    pairs = pytree.tree_flatten_with_path(tree)[0]
    return [tuple(_step(key) for key in path) for path, _ in pairs]


def _step(key: Any) -> Any:
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def _bracketed(steps: Sequence[Any]) -> str:
    return "".join(f"[{step}]" for step in steps)


def _argument_names(path: tuple[Any, ...], place: int) -> tuple[str, ...]:
    kind, *steps = path
    pair = (f"INPUT__{place}", ("KWARGS" if kind == 1 else "ARGS") + _bracketed(steps))
    return (*pair, str(steps[0])) if kind == 1 and len(steps) == 1 else pair


def _result_names(path: tuple[Any, ...], place: int) -> tuple[str, ...]:
    pair = (f"OUTPUT__{place}", "RESULT" + _bracketed(path))
    return (*pair, path[0]) if len(path) == 1 and isinstance(path[0], str) else pair


def _fact(name: str, value: Any) -> TensorFacts | None:
    if not isinstance(value, torch.Tensor):
        return None
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return TensorFacts(name, DTYPES.get(value.dtype, str(value.dtype)), dims)


# ------------------------------------------------------------------------------------ which tensor is which


def arrange(model: str, program: Program, specs: Sequence[Spec]) -> list[int | None]:
    """Returns for each argument the index of its input: by name, by position (`NAME__0`), else in order.

    None for an argument without input. The arguments of a program that takes one dict are the inputs themselves.
    """
    if program.whole_dict:
        return list(range(len(specs)))
    arguments = program.arguments
    indices: list[int | None] = [None] * len(arguments)
    for index, place in enumerate(_places(specs, [argument.names for argument in arguments])):
        if place is None or place >= len(arguments) or indices[place] is not None:
            listed = ", ".join(argument.names[-1] for argument in arguments)
            raise InvalidRequest(
                f"unable to load model '{model}': input '{specs[index].name}' is not an argument of its own; the model "
                f"takes {len(arguments)}: {listed}"
            )
        indices[place] = index
    for argument, index_of_input in zip(arguments, indices, strict=True):
        if index_of_input is None:
            if not argument.optional:
                raise InvalidRequest(
                    f"unable to load model '{model}': the configuration has no input for argument "
                    f"'{argument.names[-1]}'"
                )
            continue
        _check(model, specs[index_of_input], argument)
    return indices


def _check(model: str, spec: Spec, argument: Argument) -> None:
    name = argument.names[-1]
    if argument.strings != (spec.dtype == "BYTES"):
        is_what = f"a {_STRINGS}" if argument.strings else "no list of strings"
        raise InvalidRequest(
            f"unable to load model '{model}': input '{spec.name}' is {spec.dtype} in the configuration, and argument "
            f"'{name}' of the model is {is_what}; BYTES are given as {_STRINGS}"
        )
    if spec.optional and not argument.optional:
        raise InvalidRequest(
            f"unable to load model '{model}': input '{spec.name}' is optional in the configuration, but the model "
            f"cannot do without argument '{name}': give it a default, or the type Optional[Tensor]"
        )


def _places(specs: Sequence[Spec], names: Sequence[Sequence[str]]) -> list[int | None]:
    by_name = {name: place for place, own in enumerate(names) for name in own}
    known = [by_name.get(spec.name) for spec in specs]
    if None not in known:
        return known
    numbered = [_BY_PLACE.fullmatch(spec.name) for spec in specs]
    if all(numbered):
        return [int(match[1]) for match in numbered if match is not None]
    if any(place is not None and place != index for index, place in enumerate(known)):
        return known  # some names match at other positions, so the order does not apply
    return list(range(len(specs)))


def picker(model: str, program: Program, specs: Sequence[Spec]) -> Callable[[Any], list[Any]]:
    """Returns a function from the result of a call to the outputs, in the order of the configuration."""
    names = [spec.name for spec in specs]
    strings = any(spec.dtype == "BYTES" for spec in specs)

    def pick(value: Any, places: list[int]) -> list[Any]:
        values = [value] if isinstance(value, torch.Tensor) else value
        if values and strings and all(isinstance(item, str) for item in values):
            values = [values]
        for name, place in zip(names, places, strict=True):
            if place >= len(values):
                raise Internal(
                    f"The output {name} in the model configuration refers to an output index which doesn't exist. "
                    f"This model has {len(values)} outputs"
                )
        return [values[place] for place in places]

    if program.results is not None:
        count = len(program.results)
        positions = _places(specs, program.results)
        missing = [name for name, place in zip(names, positions, strict=True) if place is None or place >= count]
        if missing:
            raise InvalidRequest(
                f"unable to load model '{model}': output '{missing[0]}' is not a result of the model, which has "
                f"{count}: {', '.join(own[-1] for own in program.results)}"
            )
        chosen = [place for place in positions if place is not None]
        return lambda value: pick(pytree.tree_leaves(value), chosen)
    numbered = [_BY_PLACE.fullmatch(name) for name in names]
    order = [int(match[1]) for match in numbered if match is not None]
    places = order if len(order) == len(names) else list(range(len(names)))

    def from_script(value: Any) -> list[Any]:
        if isinstance(value, dict):
            if all(name in value for name in names):
                return [value[name] for name in names]
            value = tuple(value.values())
        fields = getattr(value, "_fields", ())
        if fields and all(name in fields for name in names):
            return [getattr(value, name) for name in names]
        return pick(value, places)

    return from_script
