"""What a model file declares: a SavedModel with its graphs and signatures, or a frozen graph.

Invariants: reading a file runs no part of it, and errors name what the file contains instead. Functions that a node
calls count as part of it, so what is in them is never overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from shmserve.dtypes import BY_NAME
from shmserve.errors import InvalidRequest, NotFound, Unsupported
from shmserve.repo.config.complete import TensorFacts
from shmserve.workers.backends.tensorflow.engine import engine_text, graph_pb2, saved_model_pb2, tf

if TYPE_CHECKING:
    from shmserve.workers.backends.parameters import Parameters
    from shmserve.workers.batch.specs import Spec

DTYPES = BY_NAME | {"string": "BYTES"}
TAG, SIGNATURE = "TF_GRAPH_TAG", "TF_SIGNATURE_DEF"
_INTERNAL_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
_DEFAULT_OP = "PlaceholderWithDefault"


class GraphPort(NamedTuple):
    """A tensor that the configuration can name. `place` is its name in the graph, `dims` is None for an unknown number
    of dims. `optional`: an input for which the graph contains a value."""

    place: str
    kind: str
    dims: tuple[int, ...] | None
    optional: bool

    @property
    def usable(self) -> bool:
        """Whether a configuration without this tensor can be completed with it."""
        return self.kind in DTYPES and self.dims is not None

    def facts(self, name: str, spec: Spec | None = None) -> TensorFacts:
        """`spec`: gives the dims if the graph does not."""
        dtype = DTYPES.get(self.kind)
        if dtype is None:
            raise Unsupported(f"tensor '{name}' of the model is of type {self.kind}, which is not supported")
        dims = self.dims
        if dims is None:
            if spec is None:
                raise Unsupported(
                    f"tensor '{name}' of the model has no fixed number of dims: add input and output to config.pbtxt"
                )
            dims = (-1,) if spec.flat else ((-1,) if spec.batched else ()) + spec.shape
        return TensorFacts(name, dtype, dims)


Find = Callable[[str], GraphPort | None]


class SavedModel:
    """A directory. Invariant: `inputs` and `outputs` are those of one signature of one graph, `tags` are all tags of
    that graph."""

    def __init__(self, folder: Path, parameters: Parameters) -> None:
        self.path = folder
        self.graph, self.tags, signature = _chosen(_saved_model(folder), parameters)
        nodes = {node.name: node.op for node in self.graph.node}
        self.inputs = _ports(signature.inputs, nodes)
        self.outputs = _ports(signature.outputs, nodes)
        self.find_input: Find = self.inputs.get
        self.find_output: Find = self.outputs.get

    def needed(self, outputs: Iterable[str], fed: Collection[str]) -> list[str]:
        """Returns the inputs without which these outputs cannot be computed."""
        return [name for name, port in self.inputs.items() if not port.optional]


class FrozenGraph:
    """A GraphDef with its weights as constants. Any tensor in it can be an input or output. `imported`: the graph,
    ready for a session."""

    tags: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.graph = graph_pb2.GraphDef()
        try:
            self.graph.ParseFromString(path.read_bytes())
        except DecodeError as error:
            raise InvalidRequest(f"{path.name} is not a GraphDef of TensorFlow: {error}") from error
        self.imported = tf.Graph()
        with self.imported.as_default():
            try:
                tf.import_graph_def(self.graph, name="")
            except (ValueError, tf.errors.OpError) as error:
                raise InvalidRequest(
                    f"{path.name} is not a graph that TensorFlow can import: {engine_text(error)}"
                ) from error
        self.find_input = self.find_output = self.find

    @property
    def inputs(self) -> dict[str, GraphPort]:
        """The tensors that must come from outside."""
        return self._ports_of(node.name for node in self.graph.node if node.op == "Placeholder")

    @property
    def outputs(self) -> dict[str, GraphPort]:
        """The tensors that no node reads."""
        read = {node_of(tensor) for node in self.graph.node for tensor in node.input}
        nodes = [node for node in self.graph.node if node.op != "Placeholder"]
        return self._ports_of(node.name for node in nodes if node.name not in read)

    def _ports_of(self, names: Iterable[str]) -> dict[str, GraphPort]:
        return {name: port for name in names if (port := self.find(name)) is not None}

    def find(self, name: str) -> GraphPort | None:
        place = name if ":" in name else f"{name}:0"
        try:
            tensor = self.imported.get_tensor_by_name(place)
        except (KeyError, ValueError):
            return None
        shape = tensor.shape
        dims = None if shape.rank is None else tuple(-1 if dim is None else dim for dim in shape.as_list())
        if dims == () and tensor.op.type == "Placeholder" and self.graph.versions.producer < 24:
            dims = None  # older graphs can express an unknown rank only like this
        return GraphPort(place, tensor.dtype.name, dims, tensor.op.type == _DEFAULT_OP)

    def needed(self, outputs: Iterable[str], fed: Collection[str]) -> list[str]:
        return sorted(node.name for node in nodes_behind(self.graph, outputs, fed) if node.op == "Placeholder")


Program = SavedModel | FrozenGraph


def declared(specs: Iterable[Spec], ports: Mapping[str, GraphPort], find: Find) -> list[TensorFacts]:
    """Returns the tensors of the model, and those of the configuration that it contains. Other tensors are left out if
    their type is not supported in requests."""
    by_name = {spec.name: spec for spec in specs}
    facts = []
    for name in dict.fromkeys([*ports, *by_name]):
        port = find(name)
        if port is not None and name in by_name:
            facts.append(port.facts(name, by_name[name]))
        elif port is not None and port.kind in DTYPES:
            facts.append(TensorFacts(name, DTYPES[port.kind], port.dims or ()))
    return facts


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _saved_model(folder: Path) -> Any:
    proto = saved_model_pb2.SavedModel()
    try:
        if (folder / "saved_model.pb").is_file():
            proto.ParseFromString((folder / "saved_model.pb").read_bytes())
        elif (folder / "saved_model.pbtxt").is_file():
            text_format.Parse((folder / "saved_model.pbtxt").read_text(), proto)
        else:
            raise NotFound(f"{folder.name} is not a SavedModel: it has no file 'saved_model.pb' or 'saved_model.pbtxt'")
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{folder.name} has an invalid file saved_model.pb: {error}") from error
    return proto


def _chosen(proto: Any, parameters: Parameters) -> tuple[Any, Sequence[str], Any]:
    """Returns the graph, its tags, and the signature that the parameters choose."""
    graphs = [(list(graph.meta_info_def.tags), graph) for graph in proto.meta_graphs]
    wanted = parameters.text(TAG, tf.saved_model.SERVING)
    tagged = [pair for pair in graphs if wanted in pair[0]]
    if not tagged and not parameters.text(TAG):
        tagged = graphs
    if len(tagged) > 1:  # serving on other devices has further tags
        tagged = [pair for pair in tagged if pair[0] == [wanted]] or tagged[:1]
    if not tagged:
        known = "; ".join(", ".join(tags) for tags, _ in graphs)
        raise parameters.wrong(TAG, f"a tag of one of the graphs of the SavedModel ({known})")
    tags, meta = tagged[0]
    return meta.graph_def, tags, _signature(meta.signature_def, parameters)


def _signature(signatures: Mapping[str, Any], parameters: Parameters) -> Any:
    names = sorted(name for name in signatures if name not in _INTERNAL_SIGNATURES)
    wanted = parameters.text(SIGNATURE)
    if wanted and wanted not in names:
        raise parameters.wrong(SIGNATURE, f"a signature of the SavedModel ({', '.join(names)})")
    usual = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
    if not names:
        raise InvalidRequest(
            "the SavedModel has no signature, so its inputs and outputs have no names: save it with signatures=..."
        )
    return signatures[wanted or (usual if usual in names else names[0])]


def _ports(tensors: Mapping[str, Any], nodes: Mapping[str, str]) -> dict[str, GraphPort]:
    ports = {}
    for name in sorted(tensors):
        info = tensors[name]
        if info.WhichOneof("encoding") != "name":
            raise Unsupported(
                f"tensor '{name}' of the model is sparse or ragged, which is not supported; use a dense one"
            )
        shape = info.tensor_shape
        dims = None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)
        kind = tf.dtypes.as_dtype(info.dtype).name
        ports[name] = GraphPort(info.name, kind, dims, nodes.get(node_of(info.name)) == _DEFAULT_OP)
    return ports


# ------------------------------------------------------------------------------------ nodes of a graph

KEEPING = re.compile(
    r"Assign|AssignVariableOp|Stack(Push|PushV2)|Barrier\w*|GetSessionHandle\w*|\w*(Enqueue|Stage|Accumulator|Dataset|"
    r"Iterator)\w*"
)
"""Operators that may store a tensor itself instead of a copy, to be read in a later run."""


def node_of(tensor: str) -> str:
    """Returns the name of the node that produces a tensor: `x`, `x:0` and `^x` are of the node `x`."""
    return tensor.removeprefix("^").partition(":")[0]


def nodes_behind(graph: Any, outputs: Iterable[str], fed: Collection[str] = ()) -> list[Any]:
    """Returns the nodes that these tensors of a GraphDef depend on. Nodes behind `fed` tensors are not needed."""
    nodes = {node.name: node for node in graph.node}
    stop = {node_of(tensor) for tensor in fed}
    todo, seen = [node_of(tensor) for tensor in outputs], set[str]()
    while todo:
        name = todo.pop()
        if name not in seen and name in nodes:
            seen.add(name)
            if name not in stop:
                todo += map(node_of, nodes[name].input)
    return [nodes[name] for name in seen]


def operators(graph: Any, nodes: Iterable[Any]) -> set[str]:
    """Returns the names of all operators of these nodes, and of the functions that they call."""
    functions = {function.signature.name: function for function in graph.library.function}
    names, called, todo = set[str](), set[str](), list(nodes)
    while todo:
        node = todo.pop()
        names.add(node.op)
        for name in (node.op, *_functions(node)):
            if name in functions and name not in called:
                called.add(name)
                todo += functions[name].node_def
    return names


def _functions(node: Any) -> Iterable[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def keeps_tensors(graph: Any, outputs: Iterable[str]) -> bool:
    """Whether a run that computes these tensors may store a tensor for later runs."""
    return any(KEEPING.fullmatch(name) for name in operators(graph, nodes_behind(graph, outputs)))
