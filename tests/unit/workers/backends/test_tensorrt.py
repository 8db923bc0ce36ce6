"""The TensorRT backend with fakes of its libraries, which record calls. Values are compared with numpy."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest, NotFound, ServeError, Unavailable, Unsupported
from shmserve.extras import install_command
from shmserve.protocol.messages import Wanted
from shmserve.protocol.worker_messages import StepOptions
from shmserve.repo.config import schema
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup, ModelParameter
from shmserve.workers.backends.device_buffers import Pinned
from shmserve.workers.runner import StackedRunner
from tests.support.cases import cases
from tests.support.workers.gpu.harness import adder, plan, tensor
from tests.support.workers.gpu.tensorrt_harness import NO_OVERLAP, Cuda, Gpu, Spec, check, config, rows, tuned
from tests.support.workers.worker_harness import assert_failed
from tests.support.workers.worker_harness import config as model

X, Y = {"x": ("FP32", (4,))}, {"y": ("FP32", (4,))}


def test_the_engine_completes_the_configuration(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    with gpu.load(tmp_path) as instance:
        found = instance.config
        assert found.max_batch_size == 8
        assert [(entry.name, entry.data_type, entry.dims) for entry in found.input] == [("x", "TYPE_FP32", (4,))]
        assert [(entry.name, entry.data_type, entry.dims) for entry in found.output] == [("y", "TYPE_FP32", (4,))]
        assert found.dynamic_batching is not None
        assert gpu.trt.calls[0] == ("init_libnvinfer_plugins", "")


def test_large_rows_are_not_copied_on_the_host(gpu: Gpu, tmp_path: Path) -> None:
    """They are copied from the callers' memory to the device, and from there to memory that the callers read."""
    width = 40_000
    adder(tmp_path, width)
    with gpu.load(tmp_path) as instance:
        gpu.clear()
        check(instance, 1, 2, 1, width=width)
        size = width * 4
        assert gpu.copies() == [(size, 1), (2 * size, 1), (size, 1), (4 * size, 2)]
        assert gpu.state.named("malloc") == gpu.state.named("hostAlloc") == []
        assert len(gpu.state.registered) == 2  # the caller's segment, and the one for outputs
        gpu.clear()
        check(instance, 1, 2, 1, width=width)
        assert gpu.state.named("hostRegister") == []
        assert [call for call in gpu.trt.calls if call[0] != "execute_async_v3"] == []  # the same shapes as before


@cases(
    (4, {}, (1, 1, 1), [3]),
    (10_000, {}, (1, 1, 2, 1, 2, 1), [2, 2, 1, 2, 1]),  # 40 kB a row: one is small, two are not
    (40_000, {"gather_kernel_buffer_threshold": 3}, (1, 1), [1, 1]),
    (40_000, {"gather_kernel_buffer_threshold": 3}, (1, 1, 1), [3]),
    ids=["small rows go in one copy", "runs of small rows are gathered", "below the threshold", "at the threshold"],
)
def test_rows_of_a_batch_are_copied_together(
    width: int, tuning: dict[str, int], shares: tuple[int, ...], to_device: list[int], gpu: Gpu, tmp_path: Path
) -> None:
    adder(tmp_path, width)
    with gpu.load(tmp_path, tuned(**tuning)) as instance:
        gpu.clear()
        check(instance, *shares, width=width, shared=True)
        row = 4 * width
        assert gpu.copies() == [*((count * row, 1) for count in to_device), (sum(shares) * row, 2)]


def test_only_requested_outputs_are_copied_to_the_host(gpu: Gpu, tmp_path: Path) -> None:
    tensors = [tensor("input", "x", [-1, 4]), tensor("output", "y", [-1, 4]), tensor("output", "z", [-1, 4])]
    plan(tmp_path, tensors, {"y": ["add", "x", 1], "z": ["copy", "x"]}, {"x": [[1, 4], [1, 4], [8, 4]]})
    with gpu.load(tmp_path) as instance:
        gpu.clear()
        (x,) = rows(2)
        (row,) = instance.run(instance.work(x=x, outputs=(Wanted("z"),)))
        np.testing.assert_array_equal(instance.array(row), x)
        assert gpu.copies() == [(32, 1), (32, 2)]
        gpu.clear()
        assert instance.run(instance.work(x=x, outputs=()))[0].outputs == ()
        assert gpu.state.calls == []
    only = model("tensorrt", X, Y, max_batch=8)
    for optimization in (None, schema.ModelOptimizationPolicy(cuda=Cuda(graphs=True))):
        with gpu.load(tmp_path, replace(only, optimization=optimization)) as instance:  # the engine still writes z
            check(instance, 1)


def test_without_a_batch_dimension(gpu: Gpu, tmp_path: Path) -> None:
    tensors = [tensor("input", "x", [2, 3], "HALF"), tensor("output", "y", [2, 3], "HALF")]
    plan(tmp_path, tensors, {"y": ["add", "x", 1]})
    with gpu.load(tmp_path) as instance:
        assert instance.config.max_batch_size == 0
        x = np.arange(6, dtype=np.float16).reshape(2, 3)
        found = instance.run(instance.work(x=x), instance.work(x=x + 1))
        np.testing.assert_array_equal([instance.array(row) for row in found], [x + 1, x + 2])


def test_data_dependent_output_shapes(gpu: Gpu, tmp_path: Path) -> None:
    tensors = [tensor("input", "x", [-1], "INT32"), tensor("output", "where", [-1], "INT64")]
    plan(tmp_path, tensors, {"where": ["nonzero", "x"]}, {"x": [[1], [8], [100_000]]})
    given = model("tensorrt", {"x": ("INT32", (-1,))}, {"where": ("INT64", (-1,))})
    with gpu.load(tmp_path, given) as instance:
        assert type(instance.runner) is StackedRunner, "batches cannot overlap"
        for size in (3, 50_000, 10):
            x = np.arange(size, dtype=np.int32) % 3
            work_items = [instance.work(x=x), replace(instance.work(x=x), step=StepOptions(("where",)))]
            for row in instance.run(*work_items):  # also a step whose output could stay on the GPU
                np.testing.assert_array_equal(instance.array(row), np.nonzero(x)[0])
        (row,) = instance.run(instance.work(x=np.zeros(5, np.int32)))
        assert row.outputs[0].shape == (0,)


def test_shape_tensors(gpu: Gpu, tmp_path: Path) -> None:
    tensors = [
        tensor("input", "x", [6]),
        tensor("input", "shape", [2], "INT64", location="HOST"),
        tensor("output", "y", [-1, -1]),
    ]
    plan(tmp_path, tensors, {"y": ["shaped", "x", "shape"]})
    given = config(
        input=(
            schema.ModelInput(name="x", data_type="TYPE_FP32", dims=(6,)),
            schema.ModelInput(name="shape", data_type="TYPE_INT64", dims=(2,), is_shape_tensor=True),
        ),
        output=(schema.ModelOutput(name="y", data_type="TYPE_FP32", dims=(-1, -1)),),
    )
    x = np.arange(6, dtype=np.float32)
    with gpu.load(tmp_path, given) as instance:
        for shape in ([2, 3], [3, 2], [3, 2], [1, 6]):
            (row,) = instance.run(instance.work(x=x, shape=np.array(shape)))
            np.testing.assert_array_equal(instance.array(row), x.reshape(shape))
    with pytest.raises(InvalidRequest, match="tensor 'shape' is a shape tensor in the engine, is_shape_tensor: false"):
        gpu.load(tmp_path, config())


def test_shapes_outside_every_profile_are_refused(gpu: Gpu, tmp_path: Path) -> None:
    """Requests whose shapes no profile allows fail alone, and say what is allowed."""
    tensors = [tensor("input", "x", [-1, -1]), tensor("output", "y", [-1, -1])]
    plan(tmp_path, tensors, {"y": ["add", "x", 1]}, {"x": [[1, 2], [4, 8], [8, 16]]})
    with gpu.load(tmp_path) as instance:
        good, wide = np.ones((1, 3), np.float32), np.ones((1, 17), np.float32)
        found = instance.run(instance.work(x=good), instance.work(x=wide), instance.work(x=good))
        why = "are outside of what its engine was built for: 'x' [1, 17]; profile 0: 'x' [1, 2] to [8, 16]"
        assert_failed(found[1], "INVALID_ARG", f"inputs of model 'm' {why}")
        for row in (found[0], found[2]):
            np.testing.assert_array_equal(instance.array(row), good + 1)


def profiled(folder: Path) -> None:
    tensors = [tensor("input", "x", [-1, 4]), tensor("output", "y", [-1, 4])]
    shapes = [[[1, 4], [1, 4], [2, 4]], [[1, 4], [8, 4], [16, 4]], [[1, 4], [2, 4], [4, 4]]]
    plan(folder, tensors, {"y": ["add", "x", 1]}, *[{"x": shape} for shape in shapes])


def grouped(*groups: tuple[str, ...]) -> ModelConfig:
    return config(
        instance_group=tuple(
            ModelInstanceGroup(name=f"m_{number}", kind="KIND_GPU", count=2, gpus=(0,), profile=profile)
            for number, profile in enumerate(groups)
        )
    )


def test_the_closest_profile_is_chosen(gpu: Gpu, tmp_path: Path) -> None:
    profiled(tmp_path)
    with gpu.load(tmp_path, grouped(("0", "1", "2"))) as instance:
        assert instance.config.max_batch_size == 16
        chosen = [call[1] for call in gpu.trt.calls if call[0] == "set_optimization_profile_async"]
        assert chosen == [0, 1, 2]
        for count, wanted in ((1, 0), (2, 2), (3, 2), (4, 2), (6, 1), (16, 1)):
            gpu.clear()
            check(instance, count)
            assert [call[2] for call in gpu.trt.calls if call[0] == "execute_async_v3"] == [wanted]


@pytest.mark.parametrize(("name", "wanted"), [("m_0_1", [2]), ("m_1_0", [0, 1]), ("m_1_1", [0, 1]), ("odd", [0])])
def test_each_instance_has_its_profiles(gpu: Gpu, tmp_path: Path, name: str, wanted: list[int]) -> None:
    profiled(tmp_path)
    given = grouped(("2",), ("0", "1"))
    if name == "odd":
        given = grouped(("0",))
    with gpu.load(tmp_path, given, name=name) as instance:
        # One completed value applies to all groups: the fewest rows of any group.
        assert instance.config.max_batch_size == (2 if name == "odd" else 4)
        assert [call[1] for call in gpu.trt.calls if call[0] == "set_optimization_profile_async"] == wanted


def test_profiles_that_do_not_exist_or_are_too_small(gpu: Gpu, tmp_path: Path) -> None:
    profiled(tmp_path)
    with pytest.raises(InvalidRequest, match="names profile 3; the engine has 3, numbered from 0"):
        gpu.load(tmp_path, grouped(("3",)))
    with pytest.raises(InvalidRequest, match=r"max_batch_size is 3, and profile\(s\) 0 of the engine .* up to 2"):
        gpu.load(tmp_path, model("tensorrt", X, Y, max_batch=3))


def test_graphs_of_the_preferred_batches(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    with gpu.load(tmp_path, tuned(Cuda(graphs=True))) as instance:
        # Of 1 and of 8 rows, for each of two sets of buffers.
        calls = [call[0] for call in gpu.state.calls if "apture" in call[0] or "raph" in call[0]]
        assert calls == ["streamBeginCapture", "streamEndCapture", "graphInstantiate", "graphDestroy"] * 4
        for shares, launches in (((1,), 1), ((3,), 0), ((4, 4), 1), ((1, 1), 0), ((1,), 1)):
            gpu.clear()
            check(instance, *shares)
            assert len(gpu.state.named("graphLaunch")) == launches
            assert len([call for call in gpu.trt.calls if call[0] == "execute_async_v3"]) == 1 - launches


def test_a_graph_that_serves_smaller_batches(gpu: Gpu, tmp_path: Path) -> None:
    bound = schema.ModelOptimizationPolicyCudaGraphSpecLowerBound
    specs = (
        Spec(batch_size=8, graph_lower_bound=bound(batch_size=5)),
        Spec(batch_size=4, graph_lower_bound=bound(batch_size=2)),
    )
    adder(tmp_path)
    with gpu.load(tmp_path, tuned(Cuda(graphs=True, graph_spec=specs))) as instance:
        gpu.clear()
        for count in range(1, 9):
            check(instance, count)
        assert len(gpu.state.named("graphLaunch")) == 7
        assert [size for size, kind in gpu.copies() if kind == 2] == [count * 16 for count in range(1, 9)]


@cases(
    (Spec(batch_size=9), "batch_size is 9, expected 1 to 8"),
    (Spec(batch_size=0), "batch_size is 0, expected 1 to 8"),
    (Spec(batch_size=1, input={"q": schema.ModelOptimizationPolicyCudaGraphSpecShape(dim=(4,))}), "no input q"),
    (
        Spec(batch_size=1, input={"x": schema.ModelOptimizationPolicyCudaGraphSpecShape(dim=(5,))}),
        r"shape \[1, 5\] of input 'x' is outside of profile 0, which allows \[1, 4\] to \[8, 4\]",
    ),
    (
        Spec(batch_size=2, graph_lower_bound=schema.ModelOptimizationPolicyCudaGraphSpecLowerBound(batch_size=3)),
        "batch_size of graph_lower_bound is 3, expected 1 to 2",
    ),
)
def test_invalid_cuda_graph_specs_are_refused(spec: Any, text: str, gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    with pytest.raises(InvalidRequest, match=text):
        gpu.load(tmp_path, tuned(Cuda(graphs=True, graph_spec=(spec,))))


def test_streams_priorities_and_events(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    given = tuned(Cuda(output_copy_stream=True, busy_wait_events=True), parameters=NO_OVERLAP, priority="PRIORITY_MAX")
    with gpu.load(tmp_path, given) as instance:
        assert [call[1:] for call in gpu.state.named("streamCreateWithPriority")] == [(1, -100), (1, -100)]
        assert [call[1] for call in gpu.state.named("eventCreateWithFlags")] == [3, 3, 2]  # the last one is spun on
        check(instance, 2)
        gpu.clear()
        check(instance, 2)
        copy_in, copy_out = (call[-1] for call in gpu.state.named("memcpyAsync"))
        assert [call[-1] for call in gpu.state.named("eventRecord")] == [copy_in, copy_out]
        assert copy_in != copy_out
    with gpu.load(tmp_path) as instance:
        assert gpu.state.named("streamCreateWithPriority")[-1][1:] == (1, 0)
        assert gpu.state.named("eventCreateWithFlags")[-1][1] == 3


def test_staging_buffers_are_pinned_unless_the_configuration_disables_it(gpu: Gpu, tmp_path: Path) -> None:
    off = schema.ModelOptimizationPolicyPinnedMemoryBuffer(enable=False)
    adder(tmp_path)
    for enable, count in ((None, 2), (off, 0)):
        gpu.clear()
        with gpu.load(tmp_path, tuned(input_pinned_memory=enable, output_pinned_memory=enable)) as instance:
            check(instance, 2)
            assert len(gpu.state.named("hostAlloc")) == count


def test_the_pinned_pool_has_a_limit(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned segments are evicted least recently used first, after waiting for the device, unless they were used
    recently; unmapped segments are unpinned."""
    width = 100_000
    adder(tmp_path, width)
    evicts = ["deviceSynchronize", "hostUnregister"]
    limits = ((1 << 19, 0, 0, 0), (3 << 20, 0, 1, 6), (3 << 20, 64, 1, 0), (1 << 30, 0, 2, 0))
    for limit, recent, least, evictions in limits:
        monkeypatch.setattr(f"{Pinned.__module__}.RECENT_USES", recent)
        with gpu.load(tmp_path, settings={"pinned-memory-pool-byte-size": str(limit)}) as instance:
            gpu.clear()
            for _ in range(3):
                check(instance, 1, 2, width=width)
                assert sum(gpu.state.registered.values()) <= limit
            assert len(gpu.state.registered) >= least
            assert [call[0] for call in gpu.state.calls if call[0] in evicts] == evicts * evictions
            for segment in list(instance.client.segments):
                instance.mapped.remove(segment.id)
            assert len(gpu.state.registered) <= 1
    gpu.state.read_only_registration = 0
    with gpu.load(tmp_path) as instance:
        check(instance, 1, width=width)
        assert len(gpu.state.registered) == 1  # only what this process may write


def test_the_plan_is_chosen_by_compute_capability(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path, width=4)
    adder(tmp_path, width=6, name="hopper.plan")
    names = {"9.0": "hopper.plan", "8.0": "missing.plan"}
    with gpu.load(tmp_path, config(cc_model_filenames=names)) as instance:
        assert instance.config.input[0].dims == (6,)
    gpu.state.capability = (7, 5)
    with gpu.load(tmp_path, config(cc_model_filenames=names)) as instance:
        assert instance.config.input[0].dims == (4,)
    gpu.state.capability = (8, 0)
    with pytest.raises(NotFound, match=r"has no file 'missing\.plan'"):
        gpu.load(tmp_path, config(cc_model_filenames=names))


def test_code_in_a_plan_must_be_allowed(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path, host_code=True)
    with pytest.raises(InvalidRequest, match="unable to load plan of model 'm': the engine contains host code"):
        gpu.load(tmp_path)
    with gpu.load(tmp_path, settings={"tensorrt,version-compatible": "true"}) as instance:
        check(instance, 1)


def test_files_that_are_not_plans_are_refused(gpu: Gpu, tmp_path: Path) -> None:
    path = adder(tmp_path)
    header = b"ftrt" + bytes(20)
    for content, version in (
        (b"not a plan", ""),
        (header, ""),
        (header + bytes([8, 6, 1, 6]), r", built by TensorRT 8\.6\.1\.6"),
        (b"ftrt\1" + header[5:] + bytes([8, 6, 1, 6]), ""),
    ):
        path.write_bytes(content)
        text = rf"plan of model 'm'{version}: the .* tag is wrong; a plan works .* capability 9\.0, TensorRT 11"
        with pytest.raises(InvalidRequest, match=text):
            gpu.load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"file 'model\.plan' of model 'm' is empty"):
        gpu.load(tmp_path)
    path.unlink()
    with pytest.raises(NotFound, match=r"version 1 of model 'm' has no file 'model\.plan'"):
        gpu.load(tmp_path)


def test_plugins_are_loaded_once(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shmserve.workers.backends.tensorrt import engine

    loaded: list[tuple[str, int]] = []
    real = ctypes.CDLL

    def load(path: str, mode: int = 0) -> Any:
        return loaded.append((path, mode)) if path.startswith("/plugins/") else real(path, mode)

    monkeypatch.setattr(engine, "_LOADED", set())
    monkeypatch.setattr("ctypes.CDLL", load)
    adder(tmp_path)
    settings = {"tensorrt,plugins": "/plugins/a.so; /plugins/b.so;"}
    for _ in range(2):
        gpu.load(tmp_path, settings=settings).close()
    assert loaded == [("/plugins/a.so", 256), ("/plugins/b.so", 256)]
    with pytest.raises(Unavailable, match=r"a library of plug-ins \(--backend-config tensorrt,plugins\) cannot"):
        gpu.load(tmp_path, settings={"tensorrt,plugins": "/nowhere/a.so"})


@pytest.mark.parametrize("strategy", ["STATIC", "ON_PROFILE_CHANGE"])
def test_the_memory_of_contexts(gpu: Gpu, tmp_path: Path, strategy: str) -> None:
    adder(tmp_path)
    parameter = {"execution_context_allocation_strategy": ModelParameter(string_value=strategy)}
    gpu.load(tmp_path, config(parameters=parameter)).close()
    assert ("create_execution_context", strategy) in gpu.trt.calls


INPUT = {"name": "x", "data_type": "TYPE_FP32", "dims": (4,)}
OUTPUT = {"name": "y", "data_type": "TYPE_FP32", "dims": (4,)}


@cases(
    ({"x": {"name": "q"}}, InvalidRequest, "unexpected inference input 'q', allowed inputs are: x"),
    ({"y": {"name": "q"}}, InvalidRequest, "unexpected inference output 'q', allowed outputs are: y"),
    ({"x": {"data_type": "TYPE_FP16"}}, InvalidRequest, "'x' is FP16 in the configuration and FP32 in the engine"),
    ({"y": {"dims": (5,)}}, InvalidRequest, r"has shape \[-1, 5\] in the configuration .* and \[-1, 4\] in the"),
    ({"x": {"is_shape_tensor": True}}, InvalidRequest, "'x' is no shape tensor in the engine"),
    ({"x": {"is_non_linear_format_io": True}}, Unsupported, "is_non_linear_format_io is not supported"),
    ({"x": {"optional": True}}, Unsupported, "an engine has no optional inputs, but x is optional"),
    ({"strategy": "SOME"}, InvalidRequest, "must be one of STATIC, ON_PROFILE_CHANGE, not 'SOME'"),
    ids=str,
)
def test_invalid_configurations_are_refused(
    changed: dict[str, Any], error: type[ServeError], text: str, gpu: Gpu, tmp_path: Path
) -> None:
    adder(tmp_path)
    given = config(
        max_batch_size=4,
        input=(schema.ModelInput(**(INPUT | changed.get("x", {}))),),
        output=(schema.ModelOutput(**(OUTPUT | changed.get("y", {}))),),
        parameters={"execution_context_allocation_strategy": ModelParameter(string_value=changed.get("strategy", ""))},
    )
    with pytest.raises(error, match=text):
        gpu.load(tmp_path, given)


@cases(
    ({"dtype": "FP8"}, "tensor 'x' of the engine is FP8, which is not supported"),
    ({"format": "CHW4"}, "has the layout CHW4"),
)
def test_unsupported_engines_are_refused(more: dict[str, str], text: str, gpu: Gpu, tmp_path: Path) -> None:
    x = tensor("input", "x", [2]) | more
    plan(tmp_path, [x, tensor("output", "y", [2])], {"y": ["copy", "x"]})
    with pytest.raises(Unsupported, match=text):
        gpu.load(tmp_path)


def test_other_versions_of_the_library(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.trt, "__version__", "9.3.0")
    with pytest.raises(Unsupported, match=r"TensorRT 9\.3\.0 is installed; versions 10 and 11 are supported"):
        gpu.load(tmp_path)


@pytest.mark.parametrize("name", ["cupy.cuda.runtime", "tensorrt"])
def test_without_the_libraries(gpu: Gpu, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(Unsupported, match=rf"{name.partition('.')[0]} \(.*\): {re.escape(install_command('gpu'))}"):
        gpu.load(tmp_path)


def test_insufficient_gpu_memory_is_an_error(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path, width=100_000, high=4096)
    with pytest.raises(Unavailable, match=r"no room for 1638400000 bytes on the GPU: \d+ of 1073741824 bytes are free"):
        gpu.load(tmp_path)
