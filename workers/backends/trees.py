"""Tree models: XGBoost, LightGBM, Treelite checkpoints and scikit-learn, configured as for Triton's FIL backend.

Treelite reads the files, and its general inference library (GTIL) computes predictions. The libraries that created the
models are not needed, but can be used instead. A model has one input, of features, and one output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import treelite
from treelite import gtil

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.config.complete import TREE_FILES, TREE_ROWS, TensorFacts
from shmserve.workers.backends.base import Context, StackedBackend
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


class Trees(StackedBackend):
    fresh = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._model: Any = None
        self._library: Callable[[Array], Array] | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        parameters = Parameters(config)
        self._read(config, parameters)
        width = self._output_format.width if self._output_format.raw else self._targets
        inputs = [TensorFacts(_INPUT, "FP32", (-1, self._features))]
        outputs = [TensorFacts(_OUTPUT, "FP32", (-1, width))]
        return completed(config, inputs, outputs, self.context.default_max_batch("fil", TREE_ROWS))

    def load(self, config: ModelConfig) -> None:
        parameters = Parameters(config)
        require_cpu(config, self.context.instance, "tree models")
        self._read(config, parameters)
        source, target = self._one("input", model_inputs_of(config)), self._one("output", model_outputs_of(config))
        none_optional(config.name, [source], "a tree model")
        if source.shape[-1:] not in ((self._features,), (-1,)):
            raise InvalidRequest(
                f"unable to load model '{config.name}': input '{source.name}' has {_last(source)} features in the "
                f"configuration and {self._features} in the model"
            )
        self._batched, self._output = source.batched, target
        width = self._output_format.width if self._output_format.raw else self._targets
        self._both = self._output_format.raw and self._output_format.binary and _last(target) == 2
        if _last(target) not in (-1, width) and not self._both and not (width == 1 and not target.shape):
            raise InvalidRequest(
                f"unable to load model '{config.name}': output '{target.name}' has {_last(target)} values in the "
                f"configuration and {width} in the model; see the parameters is_classifier and predict_proba"
            )
        predictor = parameters.text("predictor", "treelite")
        if predictor not in ("treelite", "library"):
            raise parameters.wrong("predictor", "treelite or library")
        wanted = 0 if parameters.text("cpu_nthread") == "-1" else parameters.whole("cpu_nthread", 0)
        self._threads = wanted or self.context.engine_threads
        if predictor == "library":
            self._library = _library(config, self._kind, self._path, self._threads)
            self._model = None
        else:
            self._threads = self._usable_threads(self._threads)

    def close(self) -> None:
        self._model = self._library = None

    # ------------------------------------------------------------------------------------ batches

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        array = inputs.array(0)
        assert array is not None
        if array.shape[-1:] != (self._features,):
            raise InvalidRequest(f"the model has {self._features} features; the input's shape is {list(array.shape)}")
        inputs.computing()
        if not outputs.needed(0):
            return
        rows = array.reshape(-1, self._features)
        predicted = self._output_format.of(self._predict(rows))
        if self._both:
            predicted = np.concatenate([1 - predicted, predicted], axis=1)
        if not self._output.shape:
            shape: tuple[int, ...] = (len(rows),) if self._batched else ()
        else:
            shape = (*array.shape[:-1], predicted.shape[1])
        outputs.place(0, shape)[...] = predicted.reshape(shape)

    def _usable_threads(self, threads: int) -> int:
        """The number of threads to request. The engine refuses more than OpenMP would start (as limited by
        OMP_NUM_THREADS): then OpenMP decides."""
        row = np.zeros((1, self._features), np.float32)
        try:
            gtil.predict(self._model, row, nthread=threads)
        except treelite.TreeliteError:
            threads = -1
            gtil.predict(self._model, row, nthread=threads)
        return threads

    def _predict(self, rows: Array) -> Array:
        """Returns predictions of shape (rows, targets, classes)."""
        if not len(rows):
            return np.empty((0, self._targets, self._classes), np.float32)
        if self._library is not None:
            return self._library(rows).reshape(len(rows), self._targets, self._classes)
        predicted: Array = gtil.predict(self._model, rows, nthread=self._threads)
        return predicted

    # ------------------------------------------------------------------------------------ loading

    def _read(self, config: ModelConfig, parameters: Parameters) -> None:
        if self._model is not None:
            return
        kind, path = self._kind, self._path = self._file(config, parameters)
        try:
            self._model = self._loaded(kind, path, parameters)
        except (treelite.TreeliteError, ValueError) as error:
            raise InvalidRequest(
                f"unable to load model '{config.name}': '{path.name}' is not a model of type {kind} that Treelite can "
                f"read; see parameter model_type: {_reason(error)}"
            ) from error
        header = self._model.get_header_accessor()
        self._features = int(self._model.num_feature)
        self._targets = int(header.get_field("num_target")[0])
        self._classes = int(max(header.get_field("num_class")))
        self._output_format = OutputFormat(
            self._targets, self._classes, int(header.get_field("task_type")[0]) in _CLASSIFIERS, parameters
        )

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

    def _one(self, kind: str, specs: tuple[Spec, ...]) -> Spec:
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
        self.binary = targets == classes == 1
        classes_only = parameters.flag("output_class", parameters.flag("is_classifier", classifier))
        self.raw = not classes_only or parameters.flag("predict_proba", False)
        self.binary = self.binary and classes_only
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


def _library(config: ModelConfig, kind: str, path: Path, threads: int) -> Callable[[Array], Array]:
    """Returns a function that predicts with the library that created the model."""
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
