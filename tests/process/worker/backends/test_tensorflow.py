"""TensorFlow models: graphs and signatures of a SavedModel, frozen graphs, parameters, and refused models.

TensorFlow itself writes the SavedModel with variables, a table and a file, in a separate process, because TensorFlow
starts threads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import shmserve
from shmserve.errors import InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.protocol.messages import Return, Tensor
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelOperations,
    ModelOptimizationPolicy,
    ModelOptimizationPolicyGraph,
)
from shmserve.workers.backends.base import Context
from tests.support.cases import cases
from tests.support.launch import Launched
from tests.support.workers.in_process import AS_GIVEN, assert_refused, floats, load_failure
from tests.support.workers.models.tensorflow_models import INSTALLED, X, Y, frozen_graph, placeholder, saved_model
from tests.support.workers.models.worker_models import on_gpu
from tests.support.workers.native_backends import compiled
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, running, work

if not INSTALLED:
    pytest.skip("tensorflow is not installed", allow_module_level=True)
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from shmserve.workers.backends.tensorflow import sessions
from shmserve.workers.backends.tensorflow.backend import TensorFlow
from shmserve.workers.backends.tensorflow.files import keeps_tensors

TRAINED = """\
import sys

import tensorflow as tf


class Net(tf.Module):
    def __init__(self, words):
        self.weights = tf.Variable(tf.reshape(tf.range(6.0), [3, 2]))
        rows = tf.lookup.TextFileInitializer(
            words, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        self.table = tf.lookup.StaticHashTable(rows, -1)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3], tf.float32, name="features"),
            tf.TensorSpec([None, None], tf.string, name="words"),
        ]
    )
    def score(self, features, words):
        joined = tf.strings.join([words, tf.fill(tf.shape(words), "!")])
        return {"scores": features @ self.weights, "numbers": self.table.lookup(words), "loud": joined}

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32, name="factor")])
    def scale(self, factor):
        return {"scaled": factor * self.weights, "total": factor * tf.reduce_sum(self.weights)}


folder, words = sys.argv[1:]
net = Net(words)
tf.saved_model.save(net, folder, signatures={"serving_default": net.score, "scale": net.scale})
"""
OPERATOR = r"""
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"

static void compute(void*, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* x;
  TF_GetInput(context, 0, &x, status);
  TF_SetOutput(context, 0, x, status);
  TF_DeleteTensor(x);
  TF_DeleteStatus(status);
}

__attribute__((constructor)) static void add() {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("Ours");
  TF_OpDefinitionBuilderAddInput(op, "x: float");
  TF_OpDefinitionBuilderAddOutput(op, "y: float");
  TF_RegisterOpDefinition(op, status);
  TF_RegisterKernelBuilder("Ours", TF_NewKernelBuilder("Ours", "CPU", nullptr, compute, nullptr), status);
  TF_DeleteStatus(status);
}
"""
"""A library of an operator that passes its input on."""
WORDS = ["zero", "one", "zwei"]
WEIGHTS = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model."""
    root = tmp_path_factory.mktemp("trained")
    words = root / "words.txt"
    words.write_text("\n".join(WORDS) + "\n")
    (root / "models" / "m" / "1").mkdir(parents=True)
    folder = root / "models" / "m" / "1" / "model.savedmodel"
    subprocess.run([sys.executable, "-c", TRAINED, str(folder), str(words)], check=True, capture_output=True)
    words.unlink()  # the SavedModel has its own copy
    return root / "models"


def texts(*values: str) -> Any:
    return np.array([value.encode() for value in values], object).reshape(1, -1)


def values(worker: WorkerProcess, row: Any, dtype: Any = np.float32) -> list[Any]:
    assert row.error is None, row.error
    return [worker.array(output, dtype).tolist() for output in row.outputs]


@pytest.mark.process
def test_a_model_without_a_configuration_in_a_server(trained: Path, tmp_path: Path) -> None:
    with Launched(trained, tmp_path / "run") as server, shmserve.Client(runtime_dir=server.runtime_dir) as client:
        found = client.config("m")
        assert (found["backend"], found["platform"]) == ("tensorflow", "tensorflow_savedmodel")
        assert found["max_batch_size"] == 4
        assert {entry["name"]: entry["dims"] for entry in found["input"]} == {"features": [3], "words": [-1]}
        features = np.array([[1, 2, 3]], np.float32)
        given = {"features": features, "words": texts("zwei", "drei")}
        pending = [client.submit("m", given) for _ in range(4)]
        for future in pending:
            answer = future.result()
            assert answer["scores"].tolist() == (features @ WEIGHTS).tolist()
            assert answer["numbers"].tolist() == [[2, -1]]
            assert answer["loud"].tolist() == [[b"zwei!", b"drei!"]]


@pytest.mark.process
def test_a_selected_signature_with_scalars(trained: Path) -> None:
    """Dims [1] stand for a scalar, as in Triton."""
    parameters = {"TF_SIGNATURE_DEF": "scale", "TF_NUM_INTRA_THREADS": "2", "TF_USE_PER_SESSION_THREADS": "1"}
    given = config("tensorflow", {}, {}, parameters=parameters)
    with WorkerProcess(given, trained / "m") as worker:
        found = worker.loaded()
        assert [(entry.name, tuple(entry.dims)) for entry in found.input] == [("factor", (1,))]
        assert [(entry.name, tuple(entry.dims)) for entry in found.output] == [("scaled", (3, 2)), ("total", (1,))]
        (row,) = worker.run(work(1, floats([2], "factor"), rows=0))
        assert values(worker, row) == [(2 * WEIGHTS).tolist(), [30]]


def choosing(folder: Path, **parameters: str) -> list[str]:
    """The inputs of the signature that the parameters select, for a SavedModel with three graphs."""
    given = config("tensorflow", {}, {}, parameters=parameters)
    return [entry.name for entry in TensorFlow(context(folder)).complete(given).input]


def graph_of(name: str) -> Callable[[], Any]:
    def make() -> Any:
        x = placeholder(name, "FP32", [-1, 2])
        return {name: x}, {"y": x + 1}

    return make


def test_tags_and_signatures(tmp_path: Path) -> None:
    saved_model(tmp_path, graph_of("a"), tags=["serve", "tpu"])
    saved_model(tmp_path, graph_of("b"), tags=["serve"], signature="other")
    saved_model(tmp_path, graph_of("c"), tags=["train"], signature="training")
    assert choosing(tmp_path) == ["b"], "the graph without further tags, and its only signature"
    assert choosing(tmp_path, TF_GRAPH_TAG="tpu") == ["a"]
    assert choosing(tmp_path, TF_GRAPH_TAG="train", TF_SIGNATURE_DEF="training") == ["c"]
    with pytest.raises(InvalidRequest, match=r"TF_GRAPH_TAG .* \(serve, tpu; serve; train\), not 'gpu'"):
        choosing(tmp_path, TF_GRAPH_TAG="gpu")
    with pytest.raises(InvalidRequest, match=r"TF_SIGNATURE_DEF .* \(training\), not 'other'"):
        choosing(tmp_path, TF_GRAPH_TAG="train", TF_SIGNATURE_DEF="other")


@pytest.mark.process
def test_variables_do_not_alias_client_memory(tmp_path: Path) -> None:
    def make() -> Any:
        x = placeholder("x", "FP32", [2000])
        kept = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2000], shared_name="kept")
        known = tf.raw_ops.VarIsInitializedOp(resource=kept)
        before = tf.cond(known, lambda: tf.raw_ops.ReadVariableOp(resource=kept, dtype=tf.float32), lambda: -x)
        with tf.control_dependencies([before]):
            assign = tf.raw_ops.AssignVariableOp(resource=kept, value=x)
        with tf.control_dependencies([assign]):
            return {"x": x}, {"y": tf.identity(before)}

    saved_model(tmp_path, make)
    dims = ("FP32", (2000,))
    with running(config("tensorflow", {"x": dims}, {"y": dims}), tmp_path) as worker:
        place = worker.place(8000)
        found = []
        for number in (1, 2, 3):
            worker.own(place)[:] = np.full(2000, number, np.float32).tobytes()
            (row,) = worker.run(work(number, Tensor("x", "FP32", (2000,), (place,)), rows=0))
            found.append(set(values(worker, row)[0]))
            worker.send(Return(row.outputs[0].data))  # type: ignore[arg-type]
    assert found == [{-1.0}, {1.0}, {2.0}]


def test_operators_that_retain_tensors_are_found_in_functions() -> None:
    def inner(handle: Any, x: Any) -> Any:
        tf.raw_ops.AssignVariableOp(resource=handle, value=x)
        return x + 1

    with tf.Graph().as_default() as graph:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="kept")
        x = placeholder("x", "FP32", [2])
        inside = tf.identity(tf.function(inner, autograph=False)(handle, x), "inside")
        tf.identity(x * 2, "beside")
        tf.identity(inside, "after")
    definition = graph.as_graph_def()
    assert keeps_tensors(definition, ["after:0"])
    assert keeps_tensors(definition, ["beside", "inside:0"])
    assert not keeps_tensors(definition, ["beside:0"])


@pytest.mark.process
def test_tensors_of_unknown_rank_use_the_configured_dims(tmp_path: Path) -> None:
    def make() -> Any:
        x = placeholder("x", "FP32", None)
        return {"x": x}, {"y": x * 2}

    saved_model(tmp_path, make)
    with pytest.raises(Unsupported, match="'x' of the model has no fixed number of dims: add input and output"):
        choosing(tmp_path)
    with running(config("tensorflow", X, Y, max_batch=4), tmp_path) as worker:
        rows = worker.run(work(1, floats([[1, 2]])), work(2, floats([[3, 4], [5, 6]])))
        assert [values(worker, row) for row in rows] == [[[[2, 4]]], [[[6, 8], [10, 12]]]]


@pytest.mark.process
def test_a_frozen_graph_with_initialization_operators(tmp_path: Path) -> None:
    """Any tensor can be an input or output, even one in the middle; nodes behind an input are not needed."""

    def make() -> None:
        keys = tf.constant(["a", "b"])
        table = tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.float32, shared_name="t")
        tf.raw_ops.LookupTableImportV2(table_handle=table, keys=keys, values=tf.constant([5.0, 7.0]), name="fill")
        words = placeholder("words", "BYTES", [-1, 1])
        found = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=words, default_value=0.0, name="found")
        middle = tf.identity(placeholder("unused", "FP32", [-1, 2]), "middle")
        tf.split(middle * found, 2, axis=1, name="parts")

    frozen_graph(tmp_path, make)
    (tmp_path / "start.json").write_text('{"init_ops": ["fill"]}')
    inputs = {"middle": ("FP32", (2,)), "words": ("STRING", (1,))}
    outputs = {"parts": ("FP32", (1,)), "parts:1": ("FP32", (1,))}
    given = config("tensorflow", inputs, outputs, max_batch=4, parameters={"TF_INIT_OPS_FILE": "start.json"})
    with running(given, tmp_path) as worker:
        words = worker.tensor("words", texts("b"), dtype="BYTES")
        rows = worker.run(work(1, floats([[1, 2]], "middle"), words), work(2, floats([[3, 4]], "middle"), words))
        assert [values(worker, row) for row in rows] == [[[[7]], [[14]]], [[[21]], [[28]]]]
        wrong = worker.tensor("words", texts("c"), dtype="BYTES")
        (row,) = worker.run(work(3, floats([[1, 2]], "middle"), wrong))
        assert values(worker, row) == [[[0]], [[0]]]


@pytest.mark.process
def test_an_operator_error_fails_only_its_request(tmp_path: Path) -> None:
    def make() -> Any:
        x = placeholder("x", "FP32", None)
        return {"x": x}, {"y": tf.matmul(x, tf.ones([3, 3]), name="product")}

    saved_model(tmp_path, make)
    with running(config("tensorflow", X, Y, max_batch=4), tmp_path) as worker:
        (row,) = worker.run(work(1, floats([[1, 2]])))
        assert "Original stack trace" not in assert_failed(row, "MODEL_FAILED", "{{node product}}").text
        (row,) = worker.run(work(2, floats([[1, 2, 3]])))
        assert values(worker, row) == [[[6, 6, 6]]]


def context(folder: Path, **settings: str) -> Context:
    given = {f"tensorflow,{key.replace('_', '-')}": value for key, value in settings.items()}
    return Context("m", 1, "m_0_0", folder, folder / "1", given, 1)


def simple(folder: Path, outputs: Any = Y, **parameters: str) -> ModelConfig:
    def make() -> Any:
        x = placeholder("x", "FP32", [-1, 3])
        return {"x": x}, {"y": tf.identity(x, "y"), "complex": tf.complex(x, x)}

    saved_model(folder, make)
    return config("tensorflow", X, outputs, max_batch=4, parameters=parameters)


def frozen(folder: Path, inputs: Any = X, outputs: Any = Y, **parameters: str) -> ModelConfig:
    frozen_graph(folder, lambda: tf.identity(placeholder("x", "FP32", [-1, 3]) + placeholder("b", "FP32", []), "y"))
    return config("tensorflow", inputs, outputs, max_batch=4, parameters=parameters)


def garbage(folder: Path, file: str) -> ModelConfig:
    path = folder / "1" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xff\xff garbage")
    return config("tensorflow", X, Y)


def nothing(folder: Path, file: str = "") -> ModelConfig:
    (folder / "1" / file).mkdir(parents=True)
    return config("tensorflow", X, Y)


def without_a_signature(folder: Path) -> ModelConfig:
    saved_model(folder, graph_of("x"), signature="__saved_model_init_op")
    return config("tensorflow", X, Y)


def ragged(folder: Path) -> ModelConfig:
    def make() -> Any:
        x = tf.compat.v1.ragged.placeholder(tf.float32, 1)
        return {"x": x}, {"y": tf.identity(x.flat_values)}

    saved_model(folder, make)
    return config("tensorflow", X, Y)


def optional(folder: Path) -> ModelConfig:
    found = simple(folder)
    return replace(found, input=(replace(found.input[0], optional=True),))


@cases(
    (nothing, NotFound, "version 1 of model 'm' has no file 'model.savedmodel'"),
    (lambda f: nothing(f, "model.savedmodel"), NotFound, "no file 'saved_model.pb' or 'saved_model.pbtxt'"),
    (lambda f: garbage(f, "model.savedmodel/saved_model.pb"), InvalidRequest, "invalid file saved_model.pb"),
    (lambda f: garbage(f, "model.graphdef"), InvalidRequest, "model.graphdef is not a GraphDef"),
    (without_a_signature, InvalidRequest, "the SavedModel has no signature"),
    (ragged, Unsupported, "tensor 'x' of the model is sparse or ragged"),
    (lambda f: simple(f, {"y": ("FP16", (3,))}), InvalidRequest, "is FP16 in the .* and FP32 in the"),
    (lambda f: simple(f, {"complex": ("FP32", (3,))}), Unsupported, "'complex' .* is of type complex64"),
    (optional, InvalidRequest, "'x' is optional, and the graph has no value for it"),
    (lambda f: simple(f, TF_NUM_INTRA_THREADS="-1"), InvalidRequest, "TF_NUM_INTRA_THREADS of model 'm'"),
    (lambda f: simple(f, TF_USE_PER_SESSION_THREADS="so"), InvalidRequest, "must be true or false, not 'so'"),
    (lambda f: simple(f, TF_INIT_OPS_FILE="a"), InvalidRequest, "left out for a SavedModel"),
    (lambda f: on_gpu(simple(f), 1), Unsupported, "GPU 1, and the TensorFlow that is installed finds none"),
    (frozen, InvalidRequest, "expects 1 inputs, model provides 2: it also has b"),
    (lambda f: frozen(f, outputs={"z": ("FP32", (3,))}), InvalidRequest, "output 'z', allowed outputs are: y"),
)
def test_unsupported_models_are_refused(make: Any, kind: type[ServeError], text: str, tmp_path: Path) -> None:
    assert_refused(make(tmp_path), tmp_path, kind, text, AS_GIVEN)


def test_a_frozen_graph_without_inputs_in_the_configuration(tmp_path: Path) -> None:
    given = frozen(tmp_path, {}, {})
    with pytest.raises(InvalidRequest, match=r"a frozen graph has no signature.*placeholders are b, x, .*reads y$"):
        TensorFlow(context(tmp_path)).complete(given)


def test_settings_of_the_session() -> None:
    parameters = {"TF_NUM_INTER_THREADS": "3", "TF_USE_PER_SESSION_THREADS": "on", "MAX_SESSION_SHARE_COUNT": "2"}
    level = ModelOptimizationPolicy(graph=ModelOptimizationPolicyGraph(level=1))
    given = replace(config("tensorflow", X, Y, parameters=parameters), optimization=level)
    found = sessions.options_of(context(Path("m"), allow_soft_placement="no"), given)
    assert (found.intra_op_parallelism_threads, found.inter_op_parallelism_threads) == (1, 3)
    assert (found.use_per_session_threads, found.allow_soft_placement) == (True, False)
    assert dict(found.device_count) == {"GPU": 0}
    assert found.graph_options.optimizer_options.global_jit_level == 1
    usual = sessions.options_of(context(Path("m")), config("tensorflow", X, Y))
    assert usual.allow_soft_placement
    assert usual.inter_op_parallelism_threads == -1, "in the thread of the worker"


@cases(
    ({"default_max_batch_size": "some"}, "default-max-batch-size must be an integer"),
    ({"allow_soft_placement": "so"}, "allow-soft-placement must be true or false, not 'so'"),
)
def test_invalid_settings_are_refused(settings: dict[str, str], text: str, tmp_path: Path) -> None:
    simple(tmp_path)
    model = TensorFlow(context(tmp_path, **settings))
    with pytest.raises(InvalidRequest, match=text):
        model.load(model.complete(config("tensorflow", {}, {"y": ("FP32", (3,))})))


@pytest.mark.parametrize("text", ["{}", '{"init_ops": "fill"}', "[", '{"init_ops": [1]}'])
def test_invalid_files_of_initialization_operators_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "start.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"start\.json must contain"):
        sessions.init_ops(context(tmp_path), "start.json")
    with pytest.raises(NotFound, match=r"no file 'other\.json', which parameter TF_INIT_OPS_FILE names"):
        sessions.init_ops(context(tmp_path), "other.json")


@pytest.mark.process
def test_a_graph_with_an_operator_of_a_library(tmp_path: Path) -> None:
    path = frozen_graph(tmp_path, lambda: placeholder("x", "FP32", [-1, 3]))
    graph = graph_pb2.GraphDef.FromString(path.read_bytes())
    graph.node.add(name="y", op="Ours", input=["x"])
    path.write_bytes(graph.SerializeToString())
    given = config("tensorflow", X, Y, max_batch=4)
    assert "Op type not registered 'Ours'" in load_failure(given, tmp_path).text
    given = replace(given, model_operations=ModelOperations(op_library_filename=("libours.so",)))
    (tmp_path / "libours.so").write_text("no library")
    assert "unable to load model 'm': libours.so: " in load_failure(given, tmp_path).text
    (tmp_path / "ours.cc").write_text(OPERATOR)
    flags = (*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags())
    compiled(tmp_path / "ours.cc", tmp_path / "libours.so", *flags)
    with running(given, tmp_path) as worker:
        (row,) = worker.run(work(1, floats([[1, 2, 3]])))
        assert values(worker, row) == [[[1, 2, 3]]]
