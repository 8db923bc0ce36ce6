"""Tree models: XGBoost, LightGBM, Treelite checkpoints and scikit-learn, configured as for Triton's FIL backend.

Treelite reads the files, and its general inference library (GTIL) computes predictions. The libraries that created the
models are not needed, but can be used instead. A model has one input, of features, and one output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import treelite
from treelite import gtil

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.config.complete import TREE_FILES, TREE_ROWS, TensorFacts
from shmserve.workers.backends.base import Backend, Context, StackedModel
from shmserve.workers.backends.model_facts import completed, none_optional
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of
from shmserve.workers.process.device import require_cpu

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
_INPUT, _OUTPUT = "input__0", "output__0"
_CLASSIFIERS = (0, 2)
"""Treelite's numbers for binary and multi-class classification, in the field `task_type`."""
_FLOATS = ("FP32", "FP64")
_PICKLES = "allow-pickle"
"""The --backend-config key that permits loading files that can contain code."""


class TreeFile(NamedTuple):
    """A model as read from its file."""

    kind: str
    path: Path
    model: Any
    features: int
    targets: int
    classes: int
    output_format: OutputFormat

    @property
    def width(self) -> int:
        return self.output_format.width if self.output_format.raw else self.targets


class Trees(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._read_file: TreeFile | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        file = self._read(config, Parameters(config))
        inputs = [TensorFacts(_INPUT, "FP32", (-1, file.features))]
        outputs = [TensorFacts(_OUTPUT, "FP32", (-1, file.width))]
        return completed(config, inputs, outputs, self.context.default_max_batch("fil", TREE_ROWS))

    def load(self, config: ModelConfig) -> TreeModel:
        parameters = Parameters(config)
        require_cpu(config, self.context.instance, "tree models")
        file = self._read(config, parameters)
        source, target = _one("input", model_inputs_of(config)), _one("output", model_outputs_of(config))
        none_optional(config.name, [source], "a tree model")
        if source.shape[-1:] not in ((file.features,), (-1,)):
            raise InvalidRequest(
                f"unable to load model '{config.name}': input '{source.name}' has {_last(source)} features in the "
                f"configuration and {file.features} in the model"
            )
        both = file.output_format.raw and file.output_format.binary and _last(target) == 2
        if _last(target) not in (-1, file.width) and not both and not (file.width == 1 and not target.shape):
            raise InvalidRequest(
                f"unable to load model '{config.name}': output '{target.name}' has {_last(target)} values in the "
                f"configuration and {file.width} in the model; see the parameters is_classifier and predict_proba"
            )
        predictor = parameters.text("predictor", "treelite")
        if predictor not in ("treelite", "library"):
            raise parameters.wrong("predictor", "treelite or library")
        wanted = 0 if parameters.text("cpu_nthread") == "-1" else parameters.whole("cpu_nthread", 0)
        threads = wanted or self.context.engine_threads
        predict = _library(config, file, threads) if predictor == "library" else _treelite(file, threads)
        self._read_file = None
        return TreeModel(file, predict, source.batched, bool(target.shape), both)

    def _read(self, config: ModelConfig, parameters: Parameters) -> TreeFile:
        if self._read_file is None:
            kind, path = self._file(config, parameters)
            try:
                model = self._loaded(kind, path, parameters)
            except (treelite.TreeliteError, ValueError) as error:
                raise InvalidRequest(
                    f"unable to load model '{config.name}': '{path.name}' is not a model of type {kind} that Treelite "
                    f"can read; see parameter model_type: {_reason(error)}"
                ) from error
            header = model.get_header_accessor()
            targets, classes = int(header.get_field("num_target")[0]), int(max(header.get_field("num_class")))
            classifier = int(header.get_field("task_type")[0]) in _CLASSIFIERS
            output_format = OutputFormat(targets, classes, classifier, parameters)
            self._read_file = TreeFile(kind, path, model, int(model.num_feature), targets, classes, output_format)
        return self._read_file

    def _file(self, config: ModelConfig, parameters: Parameters) -> tuple[str, Path]:
        """Returns the type of the model and its file. Without a type in the configuration, the name decides."""
        name = config.default_model_filename
        kind = parameters.text("model_type")
        if kind and kind not in TREE_FILES:
            raise parameters.wrong("model_type", f"one of {', '.join(TREE_FILES)}")
        if not kind:
            suffixes = {Path(file).suffix: known for known, file in TREE_FILES.items()}
            kind = suffixes.get(Path(name).suffix, "xgboost")
        return kind, self.context.model_file(config, TREE_FILES[kind])

    def _loaded(self, kind: str, path: Path, parameters: Parameters) -> Any:
        frontend = treelite.frontend
        unknown = parameters.flag("xgboost_allow_unknown_field", False)
        if kind == "treelite_checkpoint":
            return treelite.Model.deserialize(path)
        if kind == "lightgbm":
            return frontend.load_lightgbm_model(path)
        if kind == "sklearn":
            return self._from_sklearn(path)
        if kind == "xgboost":
            with path.open("rb") as file:
                legacy = file.read(1) != b"{"
            if legacy:
                return frontend.load_xgboost_model_legacy_binary(path)
            return frontend.load_xgboost_model(path, format_choice="inspect", allow_unknown_field=unknown)
        form = "json" if kind == "xgboost_json" else "ubjson"
        return frontend.load_xgboost_model(path, format_choice=form, allow_unknown_field=unknown)

    def _from_sklearn(self, path: Path) -> Any:
        if not self.context.allows("fil", _PICKLES, False):
            raise Unsupported(
                f"'{path.name}' can contain code that runs when it is loaded; if you trust all models of the "
                f"repositories, start the server with --backend-config fil,{_PICKLES}=true, else save a Treelite "
                "checkpoint"
            )
        try:
            import joblib
        except ImportError as error:
            raise Unsupported(
                f"models of type sklearn need the version of scikit-learn that saved them ({error}): pip install "
                "scikit-learn"
            ) from error
        return treelite.sklearn.import_model(joblib.load(path))


class TreeModel(StackedModel):
    """`predict` returns the predictions for rows. `both`: the output has the probabilities of both classes."""

    fresh = True

    def __init__(
        self, file: TreeFile, predict: Callable[[Array], Array], batched: bool, has_dims: bool, both: bool
    ) -> None:
        self._features = file.features
        self._counts = file.targets, file.classes
        self._output_format = file.output_format
        self._predict = predict
        self._batched = batched
        self._has_dims = has_dims
        self._both = both

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        array = inputs.array(0)
        assert array is not None
        if array.shape[-1:] != (self._features,):
            raise InvalidRequest(f"the model has {self._features} features; the input's shape is {list(array.shape)}")
        inputs.computing()
        if not outputs.needed(0):
            return
        rows = array.reshape(-1, self._features)
        values = self._predict(rows) if len(rows) else np.empty(0, np.float32)
        predicted = self._output_format.of(values.reshape(len(rows), *self._counts))
        if self._both:
            predicted = np.concatenate([1 - predicted, predicted], axis=1)
        if self._has_dims:
            shape = (*array.shape[:-1], predicted.shape[1])
        else:
            shape = (len(rows),) if self._batched else ()
        outputs.place(0, shape)[...] = predicted.reshape(shape)


def _one(kind: str, specs: tuple[Spec, ...]) -> Spec:
    if any(spec.name == "treeshap_output" for spec in specs):
        raise Unsupported("output 'treeshap_output': explanations of predictions are not supported")
    if len(specs) != 1:
        names = ", ".join(f"'{spec.name}'" for spec in specs)
        raise InvalidRequest(f"a tree model has one {kind}; the configuration has {len(specs)}: {names}")
    (spec,) = specs
    if spec.dtype not in _FLOATS:
        raise InvalidRequest(f"{kind} '{spec.name}' is {spec.dtype}; a tree model has {' or '.join(_FLOATS)}")
    return spec


class OutputFormat:
    """Converts predictions to the output for callers: classes or numbers. `raw`: numbers, `width` per row."""

    def __init__(self, targets: int, classes: int, classifier: bool, parameters: Parameters) -> None:
        self.width = targets * classes
        classes_only = parameters.flag("output_class", parameters.flag("is_classifier", classifier))
        self.raw = not classes_only or parameters.flag("predict_proba", False)
        self.binary = classes_only and targets == classes == 1
        self._threshold = parameters.number("threshold", 0.5)
        self._two_classes = classes == 2 and bool(parameters.text("threshold"))

    def of(self, predicted: Array) -> Array:
        """Returns an array of shape (rows, columns) for predictions of shape (rows, targets, classes)."""
        if self.raw:
            return predicted.reshape(len(predicted), self.width)
        if predicted.shape[2] == 1:
            return predicted[:, :, 0] > self._threshold
        if self._two_classes:
            return predicted[:, :, 1] > self._threshold
        chosen: Array = predicted.argmax(axis=2)
        return chosen


def _treelite(file: TreeFile, threads: int) -> Callable[[Array], Array]:
    """Returns a function that predicts with Treelite. It refuses more threads than OpenMP would start (as limited by
    OMP_NUM_THREADS): then OpenMP decides."""
    row = np.zeros((1, file.features), np.float32)
    try:
        gtil.predict(file.model, row, nthread=threads)
    except treelite.TreeliteError:
        threads = -1
        gtil.predict(file.model, row, nthread=threads)
    return lambda rows: np.asarray(gtil.predict(file.model, rows, nthread=threads))


def _library(config: ModelConfig, file: TreeFile, threads: int) -> Callable[[Array], Array]:
    """Returns a function that predicts with the library that created the model."""
    kind, path = file.kind, file.path
    try:
        if kind.startswith("xgboost"):
            return _xgboost(path, threads)
        if kind == "lightgbm":
            import lightgbm

            model = lightgbm.Booster(model_file=os.fspath(path))
            return lambda rows: np.asarray(model.predict(rows, num_threads=threads))
    except ImportError as error:
        raise Unsupported(
            f"parameter predictor of model '{config.name}' is library, which needs a package that is not installed "
            f"({error}): pip install {kind.partition('_')[0]}"
        ) from error
    except ValueError as error:  # base class of XGBoost's errors
        raise InvalidRequest(f"unable to load model '{config.name}': {_reason(error)}") from error
    raise Unsupported(
        f"parameter predictor of model '{config.name}' is library, which only models of XGBoost and LightGBM can have"
    )


def _xgboost(path: Path, threads: int) -> Callable[[Array], Array]:
    import xgboost

    booster = xgboost.Booster({"nthread": threads}, model_file=os.fspath(path))
    if json.loads(booster.save_config())["learner"]["objective"]["name"] == "multi:softmax":
        booster.set_param({"objective": "multi:softprob"})  # otherwise it predicts classes, which come later here
    return lambda rows: np.asarray(booster.inplace_predict(np.ascontiguousarray(rows), validate_features=False))


def _last(spec: Spec) -> int:
    return spec.shape[-1] if spec.shape else 1


def _reason(error: Exception) -> str:
    """The engine's message without the time and source location."""
    line = (str(error).splitlines() or [""])[0]
    return line.split(": ", 1)[-1] if line.startswith("[") else line
