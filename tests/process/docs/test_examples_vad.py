"""The voice detector as a sequence model: many concurrent streams, each with the result that it would have alone.

The oracle runs one stream after the other through the unchanged network of the package: with the bare engine, as the
package's own wrapper does, and with that wrapper if it can be imported.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shmserve
from shmserve.repo import samples
from shmserve.testing import Server
from tests.support.shared_server import SharedServer

ort = pytest.importorskip("onnxruntime")

NETWORK = samples.vad_model_file()
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(NETWORK is None, reason="silero-vad is not installed"),
]

STREAMS = 32
FORMANTS = ((500, 80), (1500, 120), (2500, 160))
Sound = NDArray[np.float32]


def voice(seed: int) -> Sound:
    """Chunks [n, 512] of a sound like vowels with pauses: harmonics of a varying pitch, filtered by formants."""
    generator = np.random.default_rng(seed)
    chunks = 12 + seed % 7
    at = np.arange(chunks * samples.VAD_CHUNK) / samples.VAD_RATE
    pitch = 90 + 5 * seed
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.05 * np.sin(8 * np.pi * at + seed))) / samples.VAD_RATE
    sound = np.zeros(len(at))
    for harmonic in range(1, 30):
        loud = sum(1 / (1 + ((harmonic * pitch - middle) / width) ** 2) for middle, width in FORMANTS)
        sound += loud * np.sin(harmonic * phase)
    speaks = np.sin(2 * np.pi * (3 + seed % 3) * at) > -0.3
    sound = 0.1 * sound * speaks + 0.002 * generator.standard_normal(len(at))
    return sound.astype(np.float32).reshape(chunks, samples.VAD_CHUNK)


@pytest.fixture(scope="module")
def voices() -> list[Sound]:
    return [voice(seed) for seed in range(STREAMS)]


@pytest.fixture(scope="module")
def expected(voices: list[Sound]) -> list[Sound]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    network = ort.InferenceSession(str(NETWORK), options, providers=["CPUExecutionProvider"])
    found = []
    for chunks in voices:
        state, last, heard = np.zeros((2, 1, 128), np.float32), np.zeros(samples.VAD_CONTEXT, np.float32), []
        for chunk in chunks:
            feeds = {"input": np.concatenate([last, chunk])[None], "state": state, "sr": np.array(samples.VAD_RATE)}
            probability, state = network.run(None, feeds)
            heard.append(probability[0, 0])
            last = chunk[-samples.VAD_CONTEXT :]
        found.append(np.array(heard))
    return found


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    samples.build(repository, lambda text: None, ["vad"])
    direct = repository / "vad_direct"
    (direct / "1").mkdir(parents=True)
    (direct / "1" / "model.onnx").write_bytes((repository / "vad" / "1" / "model.onnx").read_bytes())
    text = (repository / "vad" / "config.pbtxt").read_text().replace('name: "vad"', 'name: "vad_direct"')
    assert "oldest { max_candidate_sequences: 64 }" in text
    (direct / "config.pbtxt").write_text(text.replace("oldest { max_candidate_sequences: 64 }", "direct { }"))
    with shared_server.serving(repository) as running:
        yield running


def test_expected_probabilities_vary(expected: list[Sound]) -> None:
    assert max(found.max() for found in expected) > 0.8
    assert min(found.min() for found in expected) < 0.2
    assert len({found.round(4).tobytes() for found in expected}) == STREAMS


def test_expected_probabilities_equal_those_of_silero_vad(voices: list[Sound], expected: list[Sound]) -> None:
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("silero_vad")
    wrapper = package.load_silero_vad(onnx=True)
    for chunks, wanted in zip(voices[:4], expected, strict=False):
        wrapper.reset_states()
        found = [wrapper(torch.from_numpy(chunk), samples.VAD_RATE).item() for chunk in chunks]
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def step(client: shmserve.Client, model: str, name: Any, chunks: Sound, at: int) -> Future[shmserve.Result]:
    return client.submit(
        model,
        {"CHUNK": chunks[at : at + 1]},
        sequence=name,
        sequence_start=at == 0,
        sequence_end=at == len(chunks) - 1,
    )


def heard(futures: list[Future[shmserve.Result]]) -> Sound:
    return np.array([future.result()["PROBABILITY"][0, 0] for future in futures], np.float32)


@pytest.mark.parametrize("model", ["vad", "vad_direct"])
@pytest.mark.parametrize("names", ["numbers", "texts"])
def test_concurrent_streams(
    client: shmserve.Client, model: str, names: str, voices: list[Sound], expected: list[Sound]
) -> None:
    """Chunks are sent in any order across streams, many in flight, but in order within each stream."""
    turns = [stream for stream, chunks in enumerate(voices) for _ in chunks]
    random.Random(f"{model} {names}").shuffle(turns)
    futures: list[list[Future[shmserve.Result]]] = [[] for _ in voices]
    for stream in turns:
        name = stream + 1 if names == "numbers" else f"stream {stream}"
        futures[stream].append(step(client, model, name, voices[stream], len(futures[stream])))
    for found, wanted in zip(futures, expected, strict=True):
        np.testing.assert_allclose(heard(found), wanted, atol=1e-5)


def test_chunks_sent_one_at_a_time(client: shmserve.Client, voices: list[Sound], expected: list[Sound]) -> None:
    for _ in range(2):  # the second time, all state has been reset
        found = [step(client, "vad", 7, voices[3], at).result()["PROBABILITY"] for at in range(len(voices[3]))]
        np.testing.assert_allclose(np.concatenate(found)[:, 0], expected[3], atol=1e-5)


def test_more_streams_than_slots(client: shmserve.Client, voices: list[Sound], expected: list[Sound]) -> None:
    many = [stream for _ in range(3) for stream in range(STREAMS)]
    futures = [
        [step(client, "vad_direct", 1000 + number, voices[stream], at) for at in range(len(voices[stream]))]
        for number, stream in enumerate(many)
    ]
    for stream, found in zip(many, futures, strict=True):
        np.testing.assert_allclose(heard(found), expected[stream], atol=1e-5)


def test_a_chunk_outside_a_sequence_is_refused(client: shmserve.Client, voices: list[Sound]) -> None:
    with pytest.raises(shmserve.InvalidRequest, match="START"):
        step(client, "vad", 99, voices[0], 3).result()
    with pytest.raises(shmserve.InvalidRequest, match="correlation ID"):
        client.infer("vad", {"CHUNK": voices[0][:1]})
