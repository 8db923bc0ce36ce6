"""Decides what the directory of a new model contains, and writes it.

Invariant: a directory appears as a whole or not at all, and nothing that exists is changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shmserve.dtypes import TO_CONFIG
from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.config.complete import TREE_FILES, TREE_ROWS, TensorFacts
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.load import CONFIG_FILE
from shmserve.repo.onnx.header import Declared, NotOnnx, TooLarge, external_files, is_beside, read_header
from shmserve.repo.rules.fields import PYTHON_NAME
from shmserve.repo.starters.config_text import CommentedParameter, Layout, config_text

KINDS = ("python", "sklearn", "torch")
"""Models without a file: their templates."""
PICKLES = (".joblib", ".pkl", ".pickle")
TORCH_FILES = (".pt", ".pt2")
WRONG_FILE = 3
"""Exit code of the process that reads a PyTorch file, if the file is wrong. An uncaught exception has 1."""
XGBOOST_FILES = {".json": "xgboost_json", ".ubj": "xgboost_ubj"}
"""Suffix of a model of XGBoost -> its model_type."""
SUFFIXES = (".onnx", *TORCH_FILES, *PICKLES, *XGBOOST_FILES, ".gguf")
ROWS = 8
"""max_batch_size of a new model that can batch."""
TEMPLATES = Path(__file__).parent / "templates"
_XGBOOST_KEY = b'"learner"'
_HEAD_BYTES = 4096
"""Where the first key of a file of XGBoost must be."""
_COMPLETED = "The server makes it 4 if the first dimension of every tensor can have any size."
_THREADS = (
    "Threads in each process, by default as many as the cores that it may use. Several processes share the cores."
)


class DescribedTensors(NamedTuple):
    """Tensors as the model has them, with the dimension for rows if `batches`. `note`: what is not certain."""

    inputs: Sequence[TensorFacts]
    outputs: Sequence[TensorFacts]
    batches: bool
    note: str = ""


class Starter(NamedTuple):
    """The directory of a model. `files`: name in the version directory -> the file to copy. `warning`: what its user
    has to do before it answers. `request`: options of `shmserve infer` for a first request; empty: random inputs.
    """

    layout: Layout
    files: Mapping[str, Path]
    warning: str = ""
    request: Sequence[str] = ()


def starter_of(source: str, described: DescribedTensors | None = None) -> Starter:
    """The starter for a model file or one of KINDS. `described`: the tensors of a PyTorch file, if they are known.

    Raises InvalidRequest and NotFound.
    """
    path = Path(source)
    if source in KINDS:
        return _TEMPLATE[source]()
    if path.suffix not in SUFFIXES:
        raise InvalidRequest(_unknown(source))
    if not path.is_file():
        raise NotFound(f"{source}: no such file")
    if path.suffix == ".onnx":
        return _onnx(path)
    if path.suffix in PICKLES:
        return _sklearn(path)
    if path.suffix in XGBOOST_FILES:
        return _xgboost(path)
    if path.suffix == ".gguf":
        return _gguf(path)
    return _torch_file(path, described)


def _unknown(source: str) -> str:
    suffix = Path(source).suffix
    text = f"--from {source}: expected {', '.join(KINDS)}, or a file with the suffix {', '.join(SUFFIXES)}"
    if suffix == ".py":
        return f"{text}; `shmserve serve {shlex.quote(source)}` serves a Python file as it is"
    if suffix == ".pth":
        text = f"{text}; {source} has weights and not the network"
        return f"{text}: use --from torch, and write your network into its model.py"
    return text


# ------------------------------------------------------------------------------------ what it contains


def _onnx(path: Path) -> Starter:
    try:
        with path.open("rb") as file:
            header = read_header(file)
            beside = external_files(file)
    except (NotOnnx, TooLarge) as error:
        raise InvalidRequest(f"{path}: {str(error) or 'too many fields to read'}") from error
    files = {"model.onnx": path}
    for name in beside:
        if not is_beside(name):
            raise InvalidRequest(f"{path}: its weights are in {name}, outside its directory; save it again beside them")
        if not (path.parent / name).is_file():
            raise InvalidRequest(f"{path}: its weights in {name} are missing")
        files[name] = path.parent / name
    inputs = [tensor for tensor in header.inputs if tensor.name not in header.initialized]
    layout = Layout(
        backend="onnxruntime",
        runs="1/model.onnx with ONNX Runtime",
        rows=0,
        parameters=(CommentedParameter(_THREADS, "intra_op_thread_count", "1", off=True),),
    )
    facts = [_fact(path, tensor) for tensor in (*inputs, *header.outputs)]
    if None in facts:
        text = "The file does not have the shape of each: the server completes them when it loads the model."
        return Starter(layout._replace(note=text, no_batches=_COMPLETED), files)
    known = [fact for fact in facts if fact is not None]
    batches = all(fact.dims and fact.dims[0] == -1 for fact in known)
    described = DescribedTensors(known[: len(inputs)], known[len(inputs) :], batches)
    return Starter(_with_tensors(layout, described), files)


def _fact(path: Path, tensor: Declared) -> TensorFacts | None:
    if tensor.dtype not in TO_CONFIG:
        raise InvalidRequest(f"{path}: '{tensor.name}' is not a tensor of a type that can be served")
    return None if tensor.dims is None else TensorFacts(tensor.name, tensor.dtype, tensor.dims)


def _with_tensors(layout: Layout, described: DescribedTensors) -> Layout:
    skip = 1 if described.batches else 0
    inputs, outputs = (
        [TensorFacts(name, dtype, tuple(dims[skip:])) for name, dtype, dims in tensors]
        for tensors in (described.inputs, described.outputs)
    )
    fixed = "" if described.batches else "In this model, the first dimension of a tensor has a fixed size or none."
    rows = ROWS if described.batches else 0
    return layout._replace(inputs=inputs, outputs=outputs, rows=rows, no_batches=fixed, note=described.note)


def _torch_file(path: Path, described: DescribedTensors | None) -> Starter:
    layout = Layout(
        backend="pytorch",
        runs=f"1/model{path.suffix} with PyTorch",
        rows=0,
        parameters=(CommentedParameter(_THREADS, "INTRA_OP_THREAD_COUNT", "1", off=True),),
    )
    files = {f"model{path.suffix}": path}
    if described is not None:
        return Starter(_with_tensors(layout, described), files, described.note)
    if path.suffix == ".pt2":
        text = "The server reads names, types and shapes from the file; those that are written here must agree."
        return Starter(layout._replace(note=text, no_batches=_COMPLETED), files)
    warning = "the file does not describe its tensors: write them into config.pbtxt"
    guess = DescribedTensors(
        (TensorFacts("INPUT__0", "FP32", (-1, -1)),), (TensorFacts("OUTPUT__0", "FP32", (-1, -1)),), True
    )
    text = "These are a guess, because the file does not describe its tensors: correct their number, types and dims."
    return Starter(_with_tensors(layout, guess._replace(note=text)), files, warning)


def _xgboost(path: Path) -> Starter:
    with path.open("rb") as file:
        if path.suffix == ".json" and _XGBOOST_KEY not in file.read(_HEAD_BYTES):
            text = f"{path}: not a model that XGBoost has saved (booster.save_model)"
            raise InvalidRequest(f"{text}; `shmserve serve` takes other files of engines as they are")
    kind = XGBOOST_FILES[path.suffix]
    layout = Layout(
        backend="fil",
        runs=f"1/{TREE_FILES[kind]} with Treelite",
        rows=TREE_ROWS,
        note="The server reads them from the file: input__0 with the features of each row, and output__0.",
        parameters=(
            CommentedParameter("The kind of file, see docs/trees.md.", "model_type", kind),
            CommentedParameter(
                "true: a classifier answers with probabilities, else with the class.", "predict_proba", "true", True
            ),
            CommentedParameter("Threads in each process. Several processes share the cores.", "cpu_nthread", "1", True),
        ),
    )
    return Starter(layout, {TREE_FILES[kind]: path})


def _gguf(path: Path) -> Starter:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InvalidRequest(f"{path}: not a GGUF file, as it does not begin with 'GGUF'")
    layout = Layout(
        backend="llamacpp",
        runs="1/model.gguf with llama.cpp, which forms batches of the requests itself",
        rows=0,
        note="The server adds them: text_input or messages, and text_output, among others.",
        no_batches="A model of this engine has 0.",
        parameters=(
            CommentedParameter("How many texts are generated at the same time.", "slots", "4"),
            CommentedParameter("The length of the context of each, in tokens.", "context_length", "4096", True),
        ),
    )
    return Starter(layout, {"model.gguf": path}, request=("--stream", "--input", "text_input=The sky is blue because"))


def _python() -> Starter:
    layout = Layout(
        backend="python",
        runs="the class TritonPythonModel in 1/model.py",
        rows=ROWS,
        inputs=(TensorFacts("X", "FP32", (-1,)),),
        outputs=(TensorFacts("Y", "FP32", (-1,)),),
        note="model.py uses the same names.",
        parameters=(CommentedParameter("Values for model.py, which reads them in initialize.", "factor", "2.5"),),
    )
    return Starter(layout, {"model.py": TEMPLATES / "python.py"})


def _torch() -> Starter:
    layout = Layout(
        backend="python",
        runs="the network in 1/model.py, with the weights in 1/weights.pth",
        rows=ROWS,
        inputs=(TensorFacts("x", "FP32", (4,)),),
        outputs=(TensorFacts("scores", "FP32", (3,)),),
        note="These are the sizes of the example network in model.py.",
    )
    return Starter(layout, {"model.py": TEMPLATES / "torch.py"})


def _sklearn(path: Path | None = None) -> Starter:
    layout = Layout(
        backend="python",
        runs="1/model.py, which loads 1/model.joblib",
        rows=ROWS,
        note="model.py gets them from the model when the server loads it.",
    )
    files = {"model.py": TEMPLATES / "sklearn.py"} | ({"model.joblib": path} if path is not None else {})
    return Starter(layout, files)


_TEMPLATE = {"python": _python, "sklearn": _sklearn, "torch": _torch}


# ------------------------------------------------------------------------------------ writing it


def write(starter: Starter, name: str, repository: Path) -> list[Path]:
    """Writes the directory of the model, and returns its files. Raises InvalidRequest, and OSError of the file
    system."""
    if not MODEL_NAME.fullmatch(name):
        raise InvalidRequest(f"'{name}' cannot be the name of a model; expected {NAME_RULE}")
    if starter.layout.backend == "python" and not PYTHON_NAME.fullmatch(name):
        bad = min(character for character in name if not PYTHON_NAME.fullmatch(character))
        raise InvalidRequest(f"'{name}' cannot be the name of a Python model: it contains {bad}")
    folder = repository / name
    if os.path.lexists(folder):
        raise InvalidRequest(f"{folder} exists, and is not overwritten; choose another NAME or --repository")
    repository.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".init-", dir=repository) as scratch:
        new = Path(scratch) / "model"
        for target, source in starter.files.items():
            path = new / "1" / target
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        (new / CONFIG_FILE).write_text(config_text(name, starter.layout), encoding="utf-8")
        new.rename(folder)
    return [folder / CONFIG_FILE, *(folder / "1" / target for target in starter.files)]
