"""Python-based backends: one model.py in the backend directory runs all models with its name, as in Triton.

The backend of these tests resembles those for language models. It has modules beside it, completes the configuration,
reads its settings from the model's model.json, runs an engine on an event loop and in a separate process, and answers
from another thread. The engine answers with the words of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.errors import ModelFailed, ServeError
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.living import until, write
from tests.support.model_files import write_model
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.process

BACKEND = '''
import asyncio
import json
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

from utils.engine import Engine
from utils.metrics import Counters


class Stopped(Exception):
    """Raised by a module beside this one."""


def settings():
    with open(os.path.join(pb_utils.get_model_dir(), "model.json")) as file:
        return json.load(file)


class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, auto_complete_model_config):
        text = {"name": "text", "data_type": "TYPE_STRING", "dims": [1]}
        auto_complete_model_config.add_input(text)
        auto_complete_model_config.add_input(text | {"name": "stream", "data_type": "TYPE_BOOL", "optional": True})
        for name in settings()["outputs"]:
            auto_complete_model_config.add_output(text | {"name": name, "dims": [-1]})
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        auto_complete_model_config.set_max_batch_size(0)
        return auto_complete_model_config

    def initialize(self, args):
        self.args = args
        self.config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(self.config)
        entry = pb_utils.get_output_config_by_name(self.config, "words")
        self.dtype = pb_utils.triton_string_to_numpy(entry["data_type"])
        self.counters = Counters({"model": args["model_name"], "version": args["model_version"]})
        self.engine = Engine(settings()["prefix"])
        self.loop = asyncio.new_event_loop()
        self.loop_thread = threading.Thread(target=self.loop.run_forever)
        self.loop_thread.start()

    def execute(self, requests):
        for request in requests:
            asyncio.run_coroutine_threadsafe(self.answer(request), self.loop)

    async def answer(self, request):
        sender = request.get_response_sender()
        try:
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
            stream = pb_utils.get_input_tensor_by_name(request, "stream")
            limit = json.loads(request.parameters()).get("max_words")
            words = []
            async for word in self.engine.words(text, limit, sender.is_cancelled):
                words.append(word)
                if stream and stream.as_numpy()[0]:
                    sender.send(self.response([word]), 0)
            self.counters.words.increment(len(words))
            last = pb_utils.InferenceResponse() if stream else self.response(words)
        except Exception as error:
            tensor = pb_utils.Tensor("words", np.asarray(["N/A"], dtype=self.dtype))
            failed = pb_utils.TritonError(f"{type(error).__qualname__}: {error}")
            last = pb_utils.InferenceResponse(output_tensors=[tensor], error=failed)
        sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, words):
        tensors = [pb_utils.Tensor("words", np.asarray([word.encode() for word in words], dtype=self.dtype))]
        if pb_utils.get_output_config_by_name(self.config, "facts") is not None:
            facts = json.dumps({**self.args, "model_config": ""})
            tensors.append(pb_utils.Tensor("facts", np.asarray([facts], dtype=np.object_)))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def finalize(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.loop_thread.join()
        self.engine.stop()
        pb_utils.Logger.log_info("the engine has stopped")
'''
ENGINE = '''
import asyncio
import multiprocessing

METHOD = "fork"


def run(prefix, texts):
    """The engine, in its own process."""
    while (text := texts.recv()) is not None:
        texts.send([prefix + word for word in text.split()])


class Engine:
    def __init__(self, prefix):
        context = multiprocessing.get_context(METHOD)
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=run, args=(prefix, other))
        self._process.start()
        other.close()

    async def words(self, text, limit, is_cancelled):
        if text == "stop":
            from model import Stopped
            raise Stopped("as requested")
        self._pipe.send(text)
        for word in self._pipe.recv()[:limit]:
            yield word
        if text == "wait":
            while not is_cancelled():
                await asyncio.sleep(0.002)
            print("the request was cancelled")

    def stop(self):
        self._pipe.send(None)
        self._process.join()
        assert self._process.exitcode == 0
'''
METRICS = """
import triton_python_backend_utils as pb_utils


class Counters:
    def __init__(self, labels):
        family = pb_utils.MetricFamily(
            name="words:generated_total", description="Words.", kind=pb_utils.MetricFamily.COUNTER
        )
        self.words = family.Metric(labels=labels)
"""
CONFIG = 'backend: "words"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'


class Place:
    """A server with a backend directory, whose models are loaded by tests."""

    def __init__(self, folder: Path, server: Server, client: shmserve.Client) -> None:
        self.folder, self.server, self.client = folder, server, client

    def load(self, name: str, config: str = CONFIG, prefix: str = "", outputs: tuple[str, ...] = ("words",)) -> None:
        folder = write_model(self.folder / "models", name, config)
        write(folder / "1" / "model.json", json.dumps({"prefix": prefix, "outputs": outputs}))
        self.client.load(name)

    def words(self, name: str, text: str, **parameters: int) -> list[str]:
        given = {"text": np.array([text], object)}
        (found,) = self.client.stream(name, given, parameters=parameters, timeout=PATIENCE_S)
        return [word.decode() for word in found["words"].tolist()]


def backend(folder: Path, engine: str = ENGINE, source: str = BACKEND) -> None:
    (folder / "utils").mkdir(parents=True)
    for path, text in (("model.py", source), ("utils/engine.py", engine), ("utils/metrics.py", METRICS)):
        write(folder / path, text)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    folder = tmp_path_factory.mktemp("python_based")
    (folder / "models").mkdir()
    backend(folder / "backends" / "words")
    backend(folder / "backends" / "spawning", ENGINE.replace('"fork"', '"spawn"'))
    options = ("--model-control-mode", "explicit", "--backend-directory", str(folder / "backends"))
    with Server(folder / "models", *options) as server:
        yield folder, server


@pytest.fixture
def place(serving: tuple[Path, Server]) -> Iterator[Place]:
    with serving[1].client() as client:
        yield Place(*serving, client)


def test_models_of_one_backend(place: Place) -> None:
    place.load("plain", outputs=("words", "facts"))
    place.load("prefixed", CONFIG + 'runtime: "model.py"\n', prefix="a-")
    assert place.words("plain", "one two three", max_words=2) == ["one", "two"]
    assert place.words("prefixed", "one two") == ["a-one", "a-two"]

    config = place.client.config("plain")
    assert [(entry["name"], entry["optional"]) for entry in config["input"]] == [("text", False), ("stream", True)]
    assert [entry["name"] for entry in config["output"]] == ["words", "facts"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [entry["name"] for entry in place.client.config("prefixed")["output"]] == ["words"]

    given = {"text": np.array(["one two"], object), "stream": np.array([True])}
    parts = [answer for answer in place.client.stream("plain", given, timeout=PATIENCE_S) if "words" in answer]
    assert [part["words"].tolist() for part in parts] == [[b"one"], [b"two"]]
    facts = json.loads(parts[0]["facts"][0])
    assert (facts["model_name"], facts["model_version"]) == ("plain", "1")
    assert (facts["model_instance_kind"], facts["model_instance_device_id"]) == ("MODEL", "0")
    assert (Path(facts["model_repository"]) / "1" / "model.json").is_file()

    assert 'words:generated_total{model="prefixed",version="1"} 2' in place.client.metrics()
    with pytest.raises(ModelFailed, match=r"Stopped: as requested"):
        place.words("plain", "stop")

    place.client.unload("prefixed")
    place.client.unload("plain", timeout=PATIENCE_S)
    stopped = {f"[{name}_0_0] the engine has stopped" for name in ("plain", "prefixed")}
    until(place.client, lambda: all(line in place.server.log for line in stopped))


def test_a_cancelled_request_reaches_the_engine(place: Place) -> None:
    place.load("cancelled")
    for _ in place.client.stream("cancelled", {"text": np.array(["wait"], object), "stream": np.array([True])}):
        break  # leaving the loop cancels the request
    until(place.client, lambda: "[cancelled_0_0] the request was cancelled" in place.server.log)
    assert place.words("cancelled", "next") == ["next"]
    place.client.unload("cancelled")


def test_an_engine_in_a_spawned_process(place: Place) -> None:
    """A spawned process imports the module of its function, which is beside the model.py."""
    place.load("spawned", CONFIG.replace("words", "spawning"), prefix="s-")
    assert place.words("spawned", "one") == ["s-one"]
    place.client.unload("spawned")


@cases(
    ("import nothing_of_that_name.part", "install the package that provides 'nothing_of_that_name' for the server"),
    ("import numpy.part", "the installed version of 'numpy' lacks what it imports"),
    ("import utils.part", "the installed version of 'utils' lacks what it imports"),
    ids=["missing", "old", "own"],
)
def test_a_missing_package_is_reported(what: str, reason: str, place: Place) -> None:
    name = what.split()[1].split(".", maxsplit=1)[0]
    backend(place.folder / "backends" / name, source=BACKEND.replace("class Stopped", f"{what}\n\n\nclass Stopped"))
    with pytest.raises(ServeError) as found:
        place.load(f"with_{name}", CONFIG.replace("words", name))
    assert f"backend '{name}' cannot be loaded: " in str(found.value)
    assert reason in str(found.value)
