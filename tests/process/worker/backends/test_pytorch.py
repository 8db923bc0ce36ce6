"""PyTorch models: mapping of tensors to arguments, writes to inputs, and parameters.

The oracle is numpy, since bare PyTorch is too similar to the code under test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.dtypes import to_numpy
from shmserve.errors import Internal, InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.protocol.messages import Tensor, Wanted
from shmserve.repo.config.schema import ModelConfig, ModelOperations
from shmserve.workers.backends.base import Context
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.specs import Spec, inputs_of, outputs_of
from tests.support.cases import cases
from tests.support.optional import OnDemand, optional
from tests.support.workers.batch_parts import Parts
from tests.support.workers.in_process import load_failure, loaded
from tests.support.workers.models.worker_models import on_gpu, torch_class, torch_forward, torch_script, version_folder
from tests.support.workers.native_backends import compiled
from tests.support.workers.worker_harness import config, running, work

torch = optional("torch")
pytorch = OnDemand("shmserve.workers.backends.pytorch.backend")
programs = OnDemand("shmserve.workers.backends.pytorch.programs")
UNNAMED = SimpleNamespace(results=None)
"""A program whose file does not name its results."""


def opened(path: Path) -> Any:
    return programs.open_program(path, torch.device("cpu"))


def specs(*names: str, dtype: str = "FP32") -> Sequence[Spec]:
    return inputs_of(config("pytorch", dict.fromkeys(names, (dtype, (-1,))), {}))


def made(*names: str, dtype: str = "FP32") -> Sequence[Spec]:
    return outputs_of(config("pytorch", {}, dict.fromkeys(names, (dtype, (-1,)))))


def export(folder: Path, source: str, *arguments: Any, dynamic: Any = None, **more: Any) -> Path:
    path = version_folder(folder) / "model.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(torch_class(folder, source)().eval(), arguments, more, dynamic_shapes=dynamic)
        torch.export.save(program, str(path))
    return path


@cases(
    ("x, y", ("x", "y"), [0, 1]),
    ("x, y", ("y", "x"), [1, 0]),
    ("x, y", ("INPUT__1", "INPUT__0"), [1, 0]),
    ("x, y", ("left", "right"), [0, 1]),
    ("x, y", ("x", "other"), [0, 1]),
    ("x, y: Optional[Tensor] = None", ("x",), [0, None]),
    ("x, y: Optional[Tensor] = None", ("INPUT__0",), [0, None]),
)
def test_inputs_match_arguments(arguments: str, names: tuple[str, ...], expected: list[int], tmp_path: Path) -> None:
    program = opened(torch_forward(tmp_path, arguments, "return x"))
    assert programs.arrange("m", program, specs(*names)) == expected


@cases(
    (("other", "x"), "input 'other' is not an argument of its own; the model takes 2: x, y"),
    (("x",), "the configuration has no input for argument 'y'"),
    (("x", "y", "z"), "input 'z' is not an argument"),
    (("a__0", "b__2"), "input 'b__2' is not an argument"),
    (("a__0", "b__0"), "input 'b__0' is not an argument"),
)
def test_inputs_unknown_to_the_script_are_refused(names: tuple[str, ...], text: str, tmp_path: Path) -> None:
    program = opened(torch_forward(tmp_path, "x, y", "return x"))
    with pytest.raises(InvalidRequest, match=text):
        programs.arrange("m", program, specs(*names))


def test_string_and_optional_inputs_must_match_the_script(tmp_path: Path) -> None:
    program = opened(torch_forward(tmp_path, "x: List[str]", "return x"))
    assert programs.arrange("m", program, specs("x", dtype="STRING")) == [0]
    with pytest.raises(InvalidRequest, match=r"'x' is FP32 in the configuration.*is a List\[str\]"):
        programs.arrange("m", program, specs("x"))
    given = config("pytorch", {"x": ("STRING", (-1,))}, {}, optional=["x"])
    with pytest.raises(InvalidRequest, match="input 'x' is optional in the configuration, but the model cannot"):
        programs.arrange("m", program, inputs_of(given))


class Pair(NamedTuple):
    first: Any
    second: Any


@cases(
    (lambda a, b: a, ("any",), "a"),
    (lambda a, b: (a, b), ("one", "two"), "ab"),
    (lambda a, b: [a, b], ("OUTPUT__1", "OUTPUT__0"), "ba"),
    (lambda a, b: (a, b), ("OUTPUT__1",), "b"),
    (lambda a, b: {"p": a, "q": b}, ("q", "p"), "ba"),
    (lambda a, b: {"p": a, "q": b}, ("first", "second"), "ab"),
    (Pair, ("second",), "b"),
    ids=["one", "tuple", "places", "one of them", "dict", "dict in order", "named tuple"],
)
def test_results_match_outputs(value: Callable[[Any, Any], Any], names: tuple[str, ...], expected: str) -> None:
    tensors = {"a": torch.zeros(1), "b": torch.ones(2)}
    found = programs.picker("m", UNNAMED, made(*names))(value(*tensors.values()))
    assert [item.tolist() for item in found] == [tensors[name].tolist() for name in expected]


def test_string_outputs() -> None:
    pick = programs.picker("m", UNNAMED, made("s", dtype="STRING"))
    assert pick(["a", "b"]) == [["a", "b"]]
    assert pick((["a", "b"],)) == [["a", "b"]]


def test_missing_outputs_are_reported() -> None:
    for names, wrong in ((("y", "z"), "z"), (("OUTPUT__1",), "OUTPUT__1")):
        text = f"The output {wrong} in the model configuration refers to an output index which doesn't exist. "
        with pytest.raises(Internal, match=f"^{text}This model has 1 outputs$"):
            programs.picker("m", UNNAMED, made(*names))((torch.zeros(1),))


TREE = """\
class Model(torch.nn.Module):
    def forward(self, x, flag, more, *, k):
        return {"a": x + k, "b": (x * 2, more["q"] * 1)}
"""


def test_inputs_and_outputs_of_an_exported_program_are_matched_by_name(tmp_path: Path) -> None:
    x, q, k = (torch.zeros(2, 3) for _ in range(3))  # sizes that are equal in the export must stay equal
    program = opened(export(tmp_path, TREE, x, True, {"q": q}, k=k))
    names = ("KWARGS[k]", "ARGS[0]", "ARGS[2][q]")
    assert programs.arrange("m", program, specs(*names)) == [1, None, 2, 0]
    assert programs.arrange("m", program, specs("x", "k", "INPUT__2")) == [0, None, 2, 1]
    pick = programs.picker("m", program, made("RESULT[b][1]", "a", "OUTPUT__1"))
    ones = torch.ones(2, 3)
    found = pick(program.call([ones, None, ones * 5, ones * 7]))
    assert [int(item[0, 0]) for item in found] == [5, 8, 2]
    with pytest.raises(InvalidRequest, match=r"output 'c' is not a result of the model, which has 3: a, "):
        programs.picker("m", program, made("a", "c", "OUTPUT__1", "RESULT[b][1]"))


@cases(
    (("return x * 2",), False),
    (("y = torch.relu(x)", "y.add_(1)", "return y"), False),
    (("x.add_(1)", "return x"), True),
    (("v = x[1:]", "v.mul_(2)", "return x"), True),
    (("y = torch.dropout(x, 0.5, False)", "y.add_(1)", "return y"), True),
    ids=["no", "another", "itself", "a view", "dropout"],
)
def test_arguments_that_the_model_modifies_are_detected(lines: tuple[str, ...], changed: bool, tmp_path: Path) -> None:
    assert [argument.changed for argument in opened(torch_forward(tmp_path, "x", *lines)).arguments] == [changed]
    body = "".join(f"        {line}\n" for line in lines)
    source = f"class Model(torch.nn.Module):\n    def forward(self, x):\n{body}"
    path = export(tmp_path, source, torch.ones(3))
    assert [argument.changed for argument in opened(path).arguments] == [changed]


def test_tensors_kept_by_the_model_are_copies(tmp_path: Path) -> None:
    source = """\
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(1)

    def forward(self, x):
        before = self.last
        self.last = x
        return before
"""
    assert opened(torch_script(tmp_path, source)).arguments[0].changed


def backend(folder: Path, given: ModelConfig) -> Any:
    return pytorch.Torch(Context("m", 1, "m_0_0", folder, folder / "1", {}, 1))


def test_inputs_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_forward(tmp_path, "x, y", "return x, y")
    dims: dict[str, tuple[str, Sequence[int]]] = {"x": ("FP32", (-1,)), "y": ("BF16", (-1,))}
    given = config("pytorch", dims, {"a": dims["x"], "b": dims["y"]})
    read: list[int] = []
    from_numpy = torch.from_numpy

    def watched(array: Any) -> Any:
        read.append(array.ctypes.data)
        return from_numpy(array)

    monkeypatch.setattr("torch.from_numpy", watched)
    with Parts(given) as parts, closing(backend(tmp_path, given).load(given)) as model:
        tensors = [parts.tensor(name, np.ones(4000, to_numpy(dtype)), [0]) for name, (dtype, _) in dims.items()]
        ((group,), _) = parts.gather.groups([work(1, *tensors, rows=0)])
        results = Results(parts.scatter, group.work_items, group.rows)
        read.clear()
        model.execute(group, results)
        assert read[:2] == [parts.mapped.address(tensor.data[0]) for tensor in tensors]  # type: ignore[index, arg-type]
        assert torch.get_num_threads() == 1
        for output in results.rows()[0].outputs:
            assert (parts.read(output) == 1).all()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.process
def test_a_model_that_modifies_its_input_does_not_change_client_memory(tmp_path: Path) -> None:
    """The clients' bytes stay unchanged."""
    torch_forward(tmp_path, "x", "x.add_(1)", "return x")
    outputs = {"y": ("FP32", (2000,))}
    parameters = {"INTRA_OP_THREAD_COUNT": "3", "INFERENCE_MODE": "false", "DISABLE_OPTIMIZED_EXECUTION": "true"}
    given = config("pytorch", {"x": ("FP32", (2000,))}, outputs, max_batch=4, parameters=parameters)
    x = np.arange(2000, dtype=np.float32).reshape(1, 2000)
    with running(given, tmp_path) as worker:
        shared = worker.tensor("x", x, shared=True)
        place = worker.place(x.nbytes)
        wanted = [Wanted("y", place)]
        for number in (1, 2):
            (row,) = worker.run(work(number, shared, outputs=wanted))
            assert (worker.value(row) == x + 1).all()
            assert (worker.array(shared, np.float32) == x).all()
        assert "not writable" not in worker.said()


def test_inputs_and_outputs_are_read_from_an_exported_program(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", max=64)
    x, k = torch.zeros(2, 3), torch.zeros(2, 3)
    source = TREE.replace("x, flag, more, *, k", "x, k").replace(' more["q"] * 1', "")
    export(tmp_path, source, x, k, dynamic=({0: batch}, {0: batch}))
    given = replace(config("pytorch", {}, {}), default_model_filename="model.pt2")
    with loaded(given, tmp_path, {"pytorch,default-max-batch-size": "7"}) as model:
        found = model.config
        assert [(entry.name, entry.data_type, tuple(entry.dims)) for entry in found.input] == [
            ("x", "TYPE_FP32", (3,)),
            ("k", "TYPE_FP32", (3,)),
        ]
        assert [(entry.name, tuple(entry.dims)) for entry in found.output] == [("a", (3,)), ("OUTPUT__1", (3,))]
        assert found.max_batch_size == 7
        assert found.dynamic_batching is not None
        values = np.arange(3, dtype=np.float32).reshape(1, 3)
        tensors = [Tensor(name, "FP32", (1, 3), (values * scale).tobytes()) for name, scale in (("x", 1), ("k", 10))]
        for row in model.runner.run([work(1, *tensors), work(2, *tensors)])[0]:
            assert row.error is None, row.error
            assert row.outputs[0].data == (values * 11).tobytes()
            assert row.outputs[1].data == (values * 2).tobytes()


X, Y = {"x": ("FP32", (3,))}, {"y": ("FP32", (3,))}


def scripted(folder: Path, **parameters: str) -> ModelConfig:
    torch_forward(folder, "x", "return x")
    return config("pytorch", X, Y, parameters=parameters)


def exported(folder: Path, dims: tuple[int, ...], max_batch: int) -> ModelConfig:
    source = "class Model(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    export(folder, source, torch.zeros(2, 3))
    given = config("pytorch", {"INPUT__0": ("FP32", dims)}, {"OUTPUT__0": ("FP32", dims)}, max_batch=max_batch)
    return replace(given, default_model_filename="model.pt2")


def on_a_gpu(folder: Path) -> ModelConfig:
    return on_gpu(scripted(folder), 1)


def with_file(folder: Path, content: bytes | None = None) -> ModelConfig:
    """`content`: of the model file; None: there is none."""
    version_folder(folder)
    if content is not None:
        (folder / "1" / "model.pt").write_bytes(content)
    return config("pytorch", X, Y)


def no_program(folder: Path) -> ModelConfig:
    torch.save({"weight": torch.zeros(1)}, str(version_folder(folder) / "model.pt"))
    return config("pytorch", X, Y)


@cases(
    (with_file, NotFound, "version 1 of model 'm' has no file 'model.pt'"),
    (lambda folder: with_file(folder, b"weights"), InvalidRequest, "'model.pt' is not a file of PyTorch"),
    (no_program, InvalidRequest, "'model.pt' holds no program: save it with torch.jit.save"),
    (lambda folder: scripted(folder, INTRA_OP_THREAD_COUNT="many"), InvalidRequest, "at least 0, not 'many'"),
    (lambda folder: scripted(folder, INFERENCE_MODE="maybe"), InvalidRequest, "INFERENCE_MODE.*true or false"),
    (lambda folder: scripted(folder, ENABLE_NVFUSER="2"), InvalidRequest, "ENABLE_NVFUSER of model 'm'"),
    (lambda folder: exported(folder, (3,), 4), InvalidRequest, "'INPUT__0' is 2 in the model; a batch needs"),
    (lambda folder: exported(folder, (2, 4), 0), InvalidRequest, r"shape \[2, 4\] .* \[2, 3\] in the model"),
    (on_a_gpu, Unsupported, "to run on GPU 1, and the PyTorch that is installed sees none"),
)
def test_unsupported_models_are_refused(make: Any, kind: type[ServeError], text: str, tmp_path: Path) -> None:
    if make is on_a_gpu and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    given = make(tmp_path)
    with pytest.raises(kind, match=text):
        backend(tmp_path, given).load(given)


def test_a_torchscript_model_needs_configured_inputs(tmp_path: Path) -> None:
    torch_forward(tmp_path, "x", "return x")
    given = config("pytorch", {}, {})
    with pytest.raises(InvalidRequest, match="a TorchScript file does not describe their shapes"):
        backend(tmp_path, given).complete(given)


def test_libraries_of_operators_are_loaded(tmp_path: Path) -> None:
    torch_forward(tmp_path, "x", "return x")
    given = replace(
        config("pytorch", {"x": ("FP32", (2,))}, {"y": ("FP32", (2,))}),
        model_operations=ModelOperations(op_library_filename=("libours.so",)),
    )
    assert "model 'm' has no file 'libours.so'" in load_failure(given, tmp_path).text
    (tmp_path / "libours.so").write_text("no library")
    assert "unable to load model 'm': libours.so: " in load_failure(given, tmp_path).text
    (tmp_path / "ours.c").write_text("int registered = 1;")
    compiled(tmp_path / "ours.c", tmp_path / "libours.so")
    with running(given, tmp_path) as worker:
        assert "libours.so" in Path(f"/proc/{worker.process.pid}/maps").read_text()
