"""Tree models: predictions equal those of the libraries that made them; parameters are those of Triton's FIL
backend."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.repo.config.complete import TREE_FILES
from shmserve.repo.config.schema import ModelConfig
from tests.support.cases import cases
from tests.support.workers.in_process import completed, inline, load_failure, loaded, run, value
from tests.support.workers.models.worker_models import on_gpu, version_folder
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, work

for library in ("treelite", "xgboost", "lightgbm", "sklearn"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make test-engines", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of these libraries

Array = np.ndarray[Any, np.dtype[Any]]
FEATURES, ROWS, TREES = 6, 120, 12
CLOSE = 2e-6
"""XGBoost and Treelite add the outputs of trees in FP32, in different orders."""


def data(missing: bool = True) -> tuple[Array, Array]:
    """Rows, and the sum of their features, which the models learn."""
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    total = x.sum(axis=1)
    if missing:
        x[random.random(x.shape) < 0.1] = np.nan
    return x, total


def classes(total: Array, count: int) -> Array:
    return np.digitize(total, [0] if count == 2 else [-1, 1])


def training(count: int, **settings: Any) -> tuple[Array, Array, dict[str, Any]]:
    """Rows, what is to be learned, and the settings. `count`: of classes; 0: a regression."""
    x, total = data()
    return x, classes(total, count) if count else total, settings | ({"num_class": count} if count > 2 else {})


def xgboost(folder: Path, file: str, objective: str, count: int = 0) -> Any:
    import xgboost

    x, wanted, settings = training(count, objective=objective, max_depth=4, nthread=1)
    booster = xgboost.train(settings, xgboost.DMatrix(x, wanted), TREES)
    booster.save_model(version_folder(folder) / file)
    return lambda given: booster.predict(xgboost.DMatrix(given))


def lightgbm(folder: Path, objective: str, count: int = 0) -> Any:
    import lightgbm

    x, wanted, settings = training(count, objective=objective, num_threads=1, verbose=-1, min_data_in_leaf=3)
    booster = lightgbm.train(settings, lightgbm.Dataset(x, wanted), TREES)
    booster.save_model(version_folder(folder) / "model.txt")
    return lambda given: booster.predict(given)


def fil(kind: str, columns: int, /, features: Any = FEATURES, output: str = "FP32", **parameters: str) -> ModelConfig:
    found = config(
        "fil",
        {"input__0": ("FP32", (features,))},
        {"output__0": (output, (columns,))},
        max_batch=ROWS,
        parameters={"model_type": kind, **parameters},
    )
    return replace(found, default_model_filename=TREE_FILES.get(kind, ""))


def predictions(given: ModelConfig, folder: Path, x: Array, settings: dict[str, str] | None = None) -> Array:
    """Sends the rows in two requests of one batch."""
    with loaded(given, folder, settings) as model:
        work_items = [work(number, inline("input__0", part)) for number, part in enumerate((x[:7], x[7:]), 1)]
        return np.concatenate([value(row) for row in run(model, *work_items)])


def test_the_binary_format_of_xgboost(tmp_path: Path) -> None:
    """The file was written by XGBoost 2.1, whose JSON of the same model is the oracle; newer versions cannot read the
    format."""
    import xgboost

    stored = Path(__file__).with_name("legacy_xgboost.txt").read_text().split()
    binary, text = (base64.b64decode(part) for part in stored)
    (version_folder(tmp_path) / "xgboost.model").write_bytes(binary)
    booster = xgboost.Booster()
    booster.load_model(bytearray(text))
    x, _ = data()
    found = predictions(fil("xgboost", 1), tmp_path, x)
    assert np.abs(found[:, 0] - booster.predict(xgboost.DMatrix(x))).max() < CLOSE
    assert len(np.unique(found)) > 3


def test_binary_classification(tmp_path: Path) -> None:
    oracle = xgboost(tmp_path, "xgboost.json", "binary:logistic", 2)
    x, _ = data()
    expected = oracle(x)

    def found(columns: int, **parameters: str) -> Array:
        return predictions(fil("xgboost_json", columns, **parameters), tmp_path, x)

    proba = found(1, is_classifier="true", predict_proba="true")
    assert np.abs(proba[:, 0] - expected).max() < CLOSE
    both = found(2, output_class="true", predict_proba="true")
    assert np.array_equal(both, np.concatenate([1 - proba, proba], axis=1))
    assert np.array_equal(found(1, is_classifier="false"), proba)
    assert np.array_equal(found(1, output_class="true"), proba > 0.5)
    assert np.array_equal(found(1), proba > 0.5), "the model itself says that it is a classifier"
    limit = float(np.sort(proba[:, 0])[ROWS // 4])
    assert np.array_equal(found(1, is_classifier="true", threshold=repr(limit)), proba > np.float32(limit))


@pytest.mark.parametrize(
    ("objective", "count"), [("regression", 0), ("binary", 2), ("multiclass", 3), ("multiclassova", 3)]
)
def test_lightgbm(objective: str, count: int, tmp_path: Path) -> None:
    oracle = lightgbm(tmp_path, objective, count)
    x, _ = data()
    width = count if count > 2 else 1
    expected = oracle(x).reshape(ROWS, width)
    found = predictions(fil("lightgbm", width, output="FP64", predict_proba="true"), tmp_path, x)
    assert np.abs(found - expected).max() < 1e-7
    rounded = predictions(fil("lightgbm", width, predict_proba="true"), tmp_path, x)
    assert np.array_equal(rounded, found.astype(np.float32))


@cases(
    ("xgboost_json", "reg:squarederror", 0),
    ("xgboost_ubj", "binary:logistic", 2),
    ("xgboost", "multi:softprob", 3),
    ("xgboost_json", "multi:softmax", 3),
    ("lightgbm", "multiclass", 3),
)
def test_predictions_equal_those_of_the_library(kind: str, objective: str, count: int, tmp_path: Path) -> None:
    """The predictions are equal to the last bit."""
    if kind == "lightgbm":
        oracle = lightgbm(tmp_path, objective, count)
    else:
        oracle = xgboost(tmp_path, TREE_FILES[kind], objective, count)
    x, _ = data()
    width = count if count > 2 else 1
    found = predictions(fil(kind, width, predictor="library", predict_proba="true"), tmp_path, x)
    chosen = predictions(fil(kind, 1, predictor="library"), tmp_path, x)
    expected = oracle(x).astype(np.float32)
    if objective == "multi:softmax":
        assert np.array_equal(found.argmax(axis=1), expected)
        assert np.array_equal(chosen[:, 0], expected)
    else:
        assert np.array_equal(found, expected.reshape(ROWS, width))
    treelite = predictions(fil(kind, width, predict_proba="true"), tmp_path, x)
    assert np.abs(found - treelite).max() < CLOSE
    if count:
        assert np.array_equal(chosen[:, 0], found.argmax(axis=1) if count > 2 else found[:, 0] > 0.5)
        assert set(np.unique(chosen)) == set(range(count))
        chosen = predictions(fil(kind, 1, is_classifier="true"), tmp_path, x)
        assert np.array_equal(chosen[:, 0], treelite.argmax(axis=1) if count > 2 else treelite[:, 0] > 0.5)


@pytest.mark.parametrize("name", ["RandomForestClassifier", "GradientBoostingRegressor", "ExtraTreesRegressor"])
def test_scikit_learn(name: str, tmp_path: Path) -> None:
    """Tested as a Treelite checkpoint, and as scikit-learn's own file, which only an operator can allow."""
    import joblib
    import treelite
    from sklearn import ensemble

    x, total = data(missing=False)
    model = getattr(ensemble, name)(n_estimators=TREES, max_depth=5, random_state=1)
    if name == "RandomForestClassifier":
        expected = model.fit(x, classes(total, 3)).predict_proba(x)
    elif name == "ExtraTreesRegressor":
        expected = model.fit(x, np.stack([total, 2 * total], axis=1)).predict(x)
    else:
        expected = model.fit(x, total).predict(x).reshape(ROWS, 1)
    treelite.sklearn.import_model(model).serialize(version_folder(tmp_path) / "checkpoint.tl")
    joblib.dump(model, tmp_path / "1" / "model.joblib")
    columns = expected.shape[1]
    found = predictions(fil("treelite_checkpoint", columns, predict_proba="true"), tmp_path, x)
    assert np.abs(found - expected).max() < CLOSE
    given = fil("sklearn", columns, predict_proba="true")
    allowed = predictions(given, tmp_path, x, {"fil,allow-pickle": "true"})
    assert np.array_equal(allowed, found)
    failure = load_failure(given, tmp_path)
    assert failure.code == "UNSUPPORTED"
    assert "start the server with --backend-config fil,allow-pickle=true" in failure.text


@pytest.mark.process
def test_a_model_without_inputs_and_outputs_in_its_configuration(tmp_path: Path) -> None:
    """In a real worker, with rows in shared memory."""
    oracle = xgboost(tmp_path, "xgboost.json", "reg:squarederror")
    x, _ = data()
    given = replace(config("fil", {}, {}), default_model_filename="xgboost.json")
    with WorkerProcess(given, tmp_path) as worker:
        found = worker.loaded()
        (source,), (target,) = found.input, found.output
        assert (source.name, source.data_type, tuple(source.dims)) == ("input__0", "TYPE_FP32", (FEATURES,))
        assert (target.name, target.data_type, tuple(target.dims)) == ("output__0", "TYPE_FP32", (1,))
        assert found.max_batch_size == 8192
        assert found.dynamic_batching is not None
        rows = worker.run(
            *[work(number, worker.tensor("input__0", x[number : number + 2], shared=True)) for number in (0, 50)]
        )
        for row, number in zip(rows, (0, 50), strict=True):
            values = worker.value(row)
            assert np.abs(values[:, 0] - oracle(x[number : number + 2])).max() < CLOSE


def test_the_completed_output_follows_the_parameters(tmp_path: Path) -> None:
    xgboost(tmp_path, "xgboost.json", "multi:softprob", 3)
    bare = replace(config("fil", {}, {}), default_model_filename="xgboost.json")
    proba = replace(bare, parameters=fil("xgboost_json", 3, predict_proba="true").parameters)
    assert [tuple(completed(given, tmp_path).output[0].dims) for given in (bare, proba)] == [(1,), (3,)]


def test_a_single_row_without_a_batch_dimension(tmp_path: Path) -> None:
    oracle = xgboost(tmp_path, "xgboost.json", "reg:squarederror")
    x, _ = data()
    plain = replace(fil("xgboost_json", 1), max_batch_size=0)
    with loaded(plain, tmp_path) as model:
        (row,) = run(model, work(1, inline("input__0", x[3]), rows=0))
    assert value(row).shape == (1,)
    assert np.abs(value(row) - oracle(x[3:4])).max() < CLOSE


def test_a_wrong_number_of_features_is_refused(tmp_path: Path) -> None:
    """It is detected at load if the configuration has the number, else in the request."""
    xgboost(tmp_path, "xgboost.json", "reg:squarederror")
    failure = load_failure(fil("xgboost_json", 1, features=5), tmp_path)
    assert f"has 5 features in the configuration and {FEATURES} in the model" in failure.text
    with loaded(fil("xgboost_json", 1, features=-1), tmp_path) as model:
        (row,) = run(model, work(1, inline("input__0", np.zeros((1, 5), np.float32))))
        assert_failed(row, "INVALID_ARG", f"the model has {FEATURES} features; the input's shape is [1, 5]")


@cases(
    ({"model_type": "forest"}, "parameter model_type of model 'm' must be one of xgboost, xgboost_json"),
    ({"predictor": "magic"}, "parameter predictor of model 'm' must be treelite or library, not 'magic'"),
    ({"threshold": "much"}, "parameter threshold of model 'm' must be a number, not 'much'"),
    ({"is_classifier": "perhaps"}, "parameter is_classifier of model 'm' must be true or false"),
    ({"predict_proba": "true"}, "has 1 values in the configuration and 3 in the model"),
    ({"model_type": "xgboost_ubj"}, "has no file 'xgboost.ubj'"),
    ({"model_type": "lightgbm"}, "'model.txt' is not a model of type lightgbm that Treelite can read"),
    ids=str,
)
def test_mismatched_parameters_are_refused(change: dict[str, str], text: str, tmp_path: Path) -> None:
    xgboost(tmp_path, "xgboost.json", "multi:softprob", 3)
    (tmp_path / "1" / "model.txt").write_text("nothing of the kind")
    given = fil("xgboost_json", 1)
    more = fil("xgboost_json", 1, **change).parameters
    kind = change.get("model_type", "xgboost_json")
    failure = load_failure(
        replace(given, parameters={**given.parameters, **more}, default_model_filename=TREE_FILES.get(kind, "x")),
        tmp_path,
    )
    assert text in failure.text


def test_unsupported_features_are_refused(tmp_path: Path) -> None:
    xgboost(tmp_path, "xgboost.json", "reg:squarederror")
    given = fil("xgboost_json", 1)
    shap = replace(given.output[0], name="treeshap_output", dims=(FEATURES + 1,))
    assert "explanations" in load_failure(replace(given, output=(given.output[0], shap)), tmp_path).text
    assert "set kind: KIND_CPU" in load_failure(on_gpu(given), tmp_path).text
    optional = replace(given.input[0], optional=True)
    assert "a tree model needs all inputs" in load_failure(replace(given, input=(optional,)), tmp_path).text


def test_triton_parameters_without_effect_are_accepted(tmp_path: Path) -> None:
    """Too many threads are not an error."""
    oracle = xgboost(tmp_path, "xgboost.json", "reg:squarederror")
    x, _ = data()
    ignored = {"storage_type": "AUTO", "algo": "ALGO_AUTO", "blocks_per_sm": "0", "transfer_threshold": "2"}
    ignored |= {"threads_per_tree": "1", "chunk_size": "4", "layout": "layered", "use_experimental_optimizations": "1"}
    found = predictions(fil("xgboost_json", 1, output_class="false", cpu_nthread="999", **ignored), tmp_path, x)
    assert np.abs(found[:, 0] - oracle(x)).max() < CLOSE
