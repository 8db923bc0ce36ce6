"""The voice detector as a sequence model: many concurrent streams, each with the result that it would have alone.

The oracle runs one stream after the other through the unchanged network of the package, as its own wrapper does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from numpy.typing import NDArray

import shmserve
from shmserve.repo import samples
from shmserve.testing import Server
from tests.support.shared_server import SharedServer

ort = pytest.importorskip("onnxruntime")

NETWORK = samples.vad_model_file()
pytestmark = [pytest.mark.process, pytest.mark.skipif(NETWORK is None, reason="silero-vad is not installed")]

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


VOICES = [voice(seed) for seed in range(STREAMS)]


@pytest.fixture(scope="module")
def expected() -> list[Sound]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    network = ort.InferenceSession(str(NETWORK), options, providers=["CPUExecutionProvider"])
    found = []
    for chunks in VOICES:
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


@pytest.mark.parametrize(("model", "repeats"), [("vad", 1), ("vad_direct", 3)], ids=["oldest", "more than slots"])
def test_concurrent_streams(client: shmserve.Client, model: str, repeats: int, expected: list[Sound]) -> None:
    """Chunks are sent in any order across streams, many in flight, but in order within each stream."""
    assert max(found.max() for found in expected) > 0.8 > 0.2 > min(found.min() for found in expected)
    turns = [stream for stream in range(repeats * STREAMS) for _ in VOICES[stream % STREAMS]]
    random.Random(model).shuffle(turns)
    futures: list[list[Future[shmserve.Result]]] = [[] for _ in range(repeats * STREAMS)]
    for stream in turns:
        chunks, at = VOICES[stream % STREAMS], len(futures[stream])
        given, last = {"CHUNK": chunks[at : at + 1]}, at == len(chunks) - 1
        name = stream + 1 if stream % 2 else f"stream {stream}"
        made = client.submit(model, given, sequence=name, sequence_start=at == 0, sequence_end=last)
        futures[stream].append(made)
    for stream, found in enumerate(futures):
        heard = [future.result()["PROBABILITY"][0, 0] for future in found]
        np.testing.assert_allclose(heard, expected[stream % STREAMS], atol=1e-5)
