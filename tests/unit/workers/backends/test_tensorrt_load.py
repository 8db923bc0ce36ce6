"""Loading and failures of TensorRT models: settings, files, mismatches, errors."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, NotFound, ServeError, Unavailable, Unsupported
from shmserve.extras import install_command
from shmserve.repo.config import schema
from shmserve.repo.config.schema import ModelParameter
from tests.support.workers.gpu.harness import adder, plan, tensor
from tests.support.workers.gpu.tensorrt_harness import NO_OVERLAP, Cuda, Gpu, check, config, tuned

# ---------------------------------------------------------------------------------------------- settings


def test_streams_priorities_and_events(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    given = tuned(Cuda(output_copy_stream=True, busy_wait_events=True), parameters=NO_OVERLAP, priority="PRIORITY_MAX")
    with gpu.load(tmp_path, given) as instance:
        assert [call[1:] for call in gpu.state.named("streamCreateWithPriority")] == [(1, -100), (1, -100)]
        assert [call[1] for call in gpu.state.named("eventCreateWithFlags")] == [3, 3, 2]  # the last one is spun on
        check(instance, 2)
        gpu.clear()
        check(instance, 2)
        names = "memcpyAsync eventRecord streamWaitEvent memcpyAsync eventRecord eventSynchronize"
        assert [call[0] for call in gpu.state.calls] == names.split()
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


def test_the_pinned_pool_has_a_limit(gpu: Gpu, tmp_path: Path) -> None:
    """Pinned segments are evicted least recently used first, after waiting for the device; unmapped segments are
    unpinned."""
    width = 100_000
    adder(tmp_path, width)
    for limit, least, most in ((1 << 19, 0, 0), (3 << 20, 1, 3 << 20), (1 << 30, 2, 1 << 30)):
        with gpu.load(tmp_path, settings={"pinned-memory-pool-byte-size": str(limit)}) as instance:
            gpu.clear()
            for _ in range(3):
                check(instance, 1, 2, width=width)
                assert sum(gpu.state.registered.values()) <= most
            assert len(gpu.state.registered) >= least
            if gpu.state.named("hostUnregister"):
                assert gpu.state.named("deviceSynchronize")
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
    path.write_bytes(b"not a plan")
    with pytest.raises(InvalidRequest, match=r"magic tag is wrong; a plan works .* capability 9\.0, TensorRT 11"):
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


def test_a_missing_plugin_is_an_error(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path)
    with pytest.raises(Unavailable, match=r"a library of plug-ins \(--backend-config tensorrt,plugins\) cannot"):
        gpu.load(tmp_path, settings={"tensorrt,plugins": "/nowhere/a.so"})


@pytest.mark.parametrize("strategy", ["STATIC", "ON_PROFILE_CHANGE"])
def test_the_memory_of_contexts(gpu: Gpu, tmp_path: Path, strategy: str) -> None:
    adder(tmp_path)
    parameter = {"execution_context_allocation_strategy": ModelParameter(string_value=strategy)}
    gpu.load(tmp_path, config(parameters=parameter)).close()
    assert ("create_execution_context", strategy) in gpu.trt.calls


# ---------------------------------------------------------------------------------------------- what does not fit

X = {"name": "x", "data_type": "TYPE_FP32", "dims": (4,)}
Y = {"name": "y", "data_type": "TYPE_FP32", "dims": (4,)}


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"x": {"name": "q"}}, InvalidRequest, "unexpected inference input 'q', allowed inputs are: x"),
        ({"y": {"name": "q"}}, InvalidRequest, "unexpected inference output 'q', allowed outputs are: y"),
        ({"x": {"data_type": "TYPE_FP16"}}, InvalidRequest, "'x' is FP16 in the configuration and FP32 in the engine"),
        ({"y": {"dims": (5,)}}, InvalidRequest, r"has shape \[-1, 5\] in the configuration .* and \[-1, 4\] in the"),
        ({"x": {"is_shape_tensor": True}}, InvalidRequest, "'x' is no shape tensor in the engine"),
        ({"x": {"is_non_linear_format_io": True}}, Unsupported, "is_non_linear_format_io is not supported"),
        ({"x": {"optional": True}}, Unsupported, "an engine has no optional inputs, but x is optional"),
        ({"strategy": "SOME"}, InvalidRequest, "is 'SOME', expected one of STATIC, ON_PROFILE_CHANGE"),
    ],
    ids=str,
)
def test_invalid_configurations_are_refused(
    gpu: Gpu, tmp_path: Path, changed: dict[str, Any], error: type[ServeError], text: str
) -> None:
    adder(tmp_path)
    given = config(
        max_batch_size=4,
        input=(schema.ModelInput(**(X | changed.get("x", {}))),),
        output=(schema.ModelOutput(**(Y | changed.get("y", {}))),),
        parameters={"execution_context_allocation_strategy": ModelParameter(string_value=changed.get("strategy", ""))},
    )
    with pytest.raises(error, match=text):
        gpu.load(tmp_path, given)


@pytest.mark.parametrize(
    ("more", "text"),
    [({"dtype": "FP8"}, "tensor 'x' of the engine is FP8, not supported"), ({"format": "CHW4"}, "has the layout CHW4")],
)
def test_unsupported_engines_are_refused(gpu: Gpu, tmp_path: Path, more: dict[str, str], text: str) -> None:
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


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_insufficient_gpu_memory_is_an_error(gpu: Gpu, tmp_path: Path) -> None:
    adder(tmp_path, width=100_000, high=4096)
    with pytest.raises(Unavailable, match=r"no room for 1638400000 bytes on the GPU: \d+ of 1073741824 bytes are free"):
        gpu.load(tmp_path)
