"""What requests contain: inputs and prompts, from texts, files and directories, or random ones."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from shmserve.errors import Unsupported
from shmserve.terminal.errors import Misuse
from shmserve.tools.load.generation.prompts import make_prompts
from shmserve.tools.load.generation.request_data import mean_rows, request_inputs
from shmserve.tools.load.plan import DEFAULT_OUTPUT, Endpoint, Lengths, PromptPlan, RequestInputs
from shmserve.tools.load.targets.base import ModelFacts, PromptRequest
from shmserve.tools.load.targets.kserve import json_values, raw_bytes
from shmserve.tools.load.targets.native import open_target
from tests.support.cases import cases


def facts(**inputs: tuple[str, list[int]]) -> ModelFacts:
    specs = {name: {"name": name, "datatype": dtype, "shape": shape} for name, (dtype, shape) in inputs.items()}
    return ModelFacts(inputs=specs, outputs={}, max_batch=8)


def requests(given: RequestInputs, known: ModelFacts) -> list[dict[str, Any]]:
    return [dict(one) for one in request_inputs(given, "m", known)]


def test_random_requests() -> None:
    known = facts(x=("FP32", [-1, 4]))
    found = requests(RequestInputs(batch=3, distinct=5, seed=1), known)
    assert [one["x"].shape for one in found] == [(3, 4)] * 5
    assert len({one["x"].tobytes() for one in found}) == 5
    again = requests(RequestInputs(batch=3, distinct=5, seed=1), known)
    assert all((one["x"] == other["x"]).all() for one, other in zip(found, again, strict=True))
    assert requests(RequestInputs(shapes=("x=2,7",)), facts(x=("INT64", [-1, -1])))[0]["x"].shape == (2, 7)
    with pytest.raises(Misuse, match="--batch 9: the max_batch_size of model 'm' is 8"):
        requests(RequestInputs(batch=9), facts(x=("FP32", [-1, 4])))


def test_optional_inputs_are_left_out_unless_they_are_given() -> None:
    known = replace(facts(x=("FP32", [-1, 4]), y=("FP32", [-1, 2]), n=("INT32", [-1, 1])), optional=frozenset("yn"))
    assert {name for one in requests(RequestInputs(), known) for name in one} == {"x"}
    (found,) = requests(RequestInputs(texts=("n=7",), shapes=("y=1,2",), distinct=1), known)
    assert found.keys() == {"x", "y", "n"}


def test_files_of_a_directory(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.full((1, 2), number, np.float32))
    known = facts(x=("FP32", [-1, 2]), n=("INT32", [-1, 1]))
    found = requests(RequestInputs(texts=(f"x=@{tmp_path}", "n=7")), known)
    assert [(one["x"].tolist(), one["n"].tolist()) for one in found] == [([[n, n]], [[7]]) for n in range(3)]
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(2):
        (documents / f"{number}.json").write_text(json.dumps({"inputs": {"x": [[number, 0]], "n": [[number]]}}))
    found = requests(RequestInputs(data=str(documents)), known)
    assert [(one["x"].tolist(), one["n"].tolist()) for one in found] == [([[n, 0]], [[n]]) for n in range(2)]
    (tmp_path / "rows").mkdir()
    for rows in (1, 2, 6):
        np.save(tmp_path / "rows" / f"{rows}.npy", np.zeros((rows, 4), np.float32))
    found = requests(RequestInputs(texts=(f"x=@{tmp_path / 'rows'}",)), facts(x=("FP32", [-1, 4])))
    assert mean_rows(found, 8) == 3
    assert (mean_rows(found, 0), mean_rows([{}], 8)) == (1, 1)


def test_each_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text("[[1, 2]]")
    (tmp_path / "v.bin").write_bytes(np.array([3, 4], "<f4").tobytes())
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    Image.fromarray(pixels).save(tmp_path / "v.png")
    floats = facts(x=("FP32", [-1, 2]))
    for name, expected in (("v.json", [[1, 2]]), ("v.bin", [[3, 4]])):
        assert requests(RequestInputs(texts=(f"x=@{tmp_path / name}",)), floats)[0]["x"].tolist() == expected
    picture = RequestInputs(texts=(f"x=@{tmp_path / 'v.png'}",))
    last = requests(picture, facts(x=("UINT8", [-1, 2, 3, 3])))[0]["x"]
    assert (last == pixels).all()
    first = requests(picture, facts(x=("FP32", [-1, 3, 2, 3])))[0]["x"]
    assert first.dtype == np.float32
    assert first == pytest.approx(pixels.transpose(2, 0, 1)[None] / 255)
    assert requests(picture, facts(x=("FP32", [-1, 3, 4, 6])))[0]["x"].shape == (1, 3, 4, 6)
    encoded = requests(picture, facts(x=("BYTES", [-1, 1])))[0]["x"]
    assert encoded.tolist() == [[(tmp_path / "v.png").read_bytes()]]


@cases(
    ("y=@file.npy", "the model has no input 'y'; it has x"),
    ("x=@{}/none.npy", "cannot read"),
    ("x=@{}/file.txt", "unknown suffix of .*; expected one of: .npy, .json, .png"),
    ("x=@{}/odd.json", r"cannot read .*odd\.json: it is not text"),
    ("x=@{}/odd.png", r"is \[-1, 2\], not \[.., 3, H, W\]"),
    ("p=@{}/odd.png", "is not an image"),
    ("p=@{}/large.png", r"large\.png cannot be read: Image size \(9 pixels\) exceeds limit"),
    ("x=@{}/empty", "the directory has no files"),
)
def test_invalid_inputs_are_refused(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (3, 3)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    (tmp_path / "file.txt").write_text("1")
    (tmp_path / "odd.json").write_bytes(b"\xff")
    (tmp_path / "odd.png").write_bytes(b"abc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Misuse, match=message):
        requests(RequestInputs(texts=(text.format(tmp_path),)), facts(x=("FP32", [-1, 2]), p=("UINT8", [-1, 2, 2, 3])))


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIL", "httptools", "hpack"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in ("http", "grpc"):
        for name in (module, f"{module}_connection"):
            monkeypatch.delitem(sys.modules, f"shmserve.tools.load.targets.{name}", raising=False)
        with pytest.raises(Unsupported, match=rf"load over {module}:// needs .*pip install .*\[bench\]"):
            open_target(Endpoint(url=f"{module}://127.0.0.1:1"))
    with pytest.raises(Misuse, match=r"needs the package pillow: .*\[bench\]"):
        requests(RequestInputs(texts=(f"x=@{tmp_path / 'v.png'}",)), facts(x=("UINT8", [-1, 2, 3, 3])))


def test_tensors_as_the_endpoints_take_them() -> None:
    known = facts(x=("FP32", [-1, 2]), s=("BYTES", [-1, 1]), h=("FP16", [-1, 1]), w=("INT64", [-1, -1, -1]))

    def values(name: str, array: Any) -> Any:
        return json_values(array, known.inputs[name], known)

    assert values("x", np.array([[1.5, 2]], np.float32)) == [1.5, 2.0]
    assert values("s", np.array([[b"\xc3\xa4"]], object)) == "\u00e4"
    assert values("w", np.arange(3).reshape(1, 1, 3)) == [0, 1, 2]
    for name, array, text in (
        ("x", np.zeros((2, 2), np.float32), "takes one row, and input 'x' has 2"),
        ("h", np.zeros((1, 1), np.float16), "input 'h' is FP16, which generate_stream cannot carry"),
        ("s", np.array([[b"\xff"]], object), "input 's' is not UTF-8 text"),
        ("w", np.zeros((1, 2, 3), np.int64), r"cannot express the shape \[2, 3\] of input 'w'"),
    ):
        with pytest.raises(Unsupported, match=text):
            values(name, array)
    array = np.empty(2, object)
    array[:] = [b"ab", "c"]
    assert raw_bytes(array) == b"\2\0\0\0ab\1\0\0\0c"


TEMPLATE = 7
"""Tokens that are part of every prompt."""


async def count(prompt: PromptRequest) -> int:
    """Three tokens for two words."""
    return TEMPLATE + len(prompt.text.split()) * 3 // 2


def made(wanted: PromptPlan, counts: bool = True) -> list[PromptRequest]:
    async def uncounted(prompt: PromptRequest) -> int:
        return 0

    return asyncio.run(make_prompts(wanted, count if counts else uncounted))


def test_random_prompts_have_the_wanted_lengths() -> None:
    found = made(PromptPlan(words=Lengths(100, 200), output=Lengths(8, 16), distinct=400, seed=3))
    tokens = [asyncio.run(count(prompt)) for prompt in found]
    assert min(tokens) < 105
    assert max(tokens) > 195
    assert all(98 <= number <= 202 for number in tokens)
    assert {prompt.max_tokens for prompt in found} == set(range(8, 17))
    assert len({prompt.text for prompt in found}) == len(found)
    assert found == made(PromptPlan(words=Lengths(100, 200), output=Lengths(8, 16), distinct=400, seed=3))
    normal = [asyncio.run(count(prompt)) for prompt in made(PromptPlan(words=Lengths(1, 199, 10.0), distinct=400))]
    assert sum(85 <= number <= 115 for number in normal) > 300
    with pytest.raises(Misuse, match="does not count the tokens of prompts"):
        made(PromptPlan(), counts=False)


LINES = (
    {"prompt": "one", "output_tokens": 5},
    {"messages": [{"role": "user", "content": "two"}]},
    {"custom_id": "3", "body": {"messages": [{"role": "user", "content": "three"}], "max_tokens": 6}},
    {"text": "four"},
    {"body": "no object", "text": "five"},
    {"conversations": ["no object"]},
)
MADE = [
    PromptRequest(text="one", max_tokens=5),
    PromptRequest(messages=[{"role": "user", "content": "two"}], max_tokens=DEFAULT_OUTPUT),
    PromptRequest(messages=[{"role": "user", "content": "three"}], max_tokens=6),
    PromptRequest(text="four", max_tokens=DEFAULT_OUTPUT),
    PromptRequest(text="five", max_tokens=DEFAULT_OUTPUT),
]


def test_prompts_of_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n".join(map(json.dumps, LINES)))
    assert made(PromptPlan(file=str(file))) == MADE
    assert {prompt.max_tokens for prompt in made(PromptPlan(file=str(file), output=Lengths(9, 9)))} == {9}
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}]))
    assert made(PromptPlan(file=str(file))) == [PromptRequest(text="Hello", max_tokens=DEFAULT_OUTPUT)]


@cases(
    ("{}", "has no entry with 'prompt'"),
    ('{"prompt": "x"}\n{"prompt": "y", "max_tokens": "many"}', "file, entry 2: 'many' is not a number of tokens"),
    ("no JSON", "has neither one JSON object per line nor one JSON list"),
    (None, "cannot read .*: No such file"),
)
def test_files_without_prompts_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(Misuse, match=message):
        made(PromptPlan(file=str(tmp_path / "file")))
