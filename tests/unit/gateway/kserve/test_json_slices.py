"""Large bodies are processed in slices. Their cost is counted in bytes and slices, not in time."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.gateway.http import bodies
from shmserve.gateway.kserve import json_outline, json_scan, json_strings, json_tensors, json_values
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.generate import VALUES, large_request
from shmserve.gateway.kserve.plans import plan_in_slices, plan_of
from shmserve.gateway.limits.turns import SLICE_BYTES, JobTurns, SlicedWork
from tests.support.cases import cases
from tests.support.gateway.http_connection import answered, connected, post, receive
from tests.support.gateway.sliced_work import finished, slices_of
from tests.support.hypothesis_profiles import examples
from tests.support.manual_loop import ManualLoop

MIB = 1 << 20
MOST = 64 * MIB
SLICE = 4 * SLICE_BYTES
"""Bytes of output per slice of inflation."""


@pytest.fixture(params=[3, 16])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of slices, so small that they end at any position of a body."""
    monkeypatch.setattr(json_scan, "SLICE_BYTES", request.param)
    monkeypatch.setattr(json_values, "SLICE_BYTES", request.param)
    monkeypatch.setattr(json_outline, "_CUT_BYTES", 8)
    size: int = request.param
    return size


def body(data: str, count: int, dtype: str = "INT32") -> bytes:
    """A request whose data is long enough to be cut out, unlike its shape."""
    padded = data.replace("[", "[" + " " * 8, 1)
    text = f'"id":"1","inputs":[{{"name":"x","shape":[{count}],"datatype":"{dtype}","data":{padded}}}]'
    return f'{{{text},"outputs":[{{"name":"y"}}]}}'.encode()


TENSOR = b'{"name":"x","shape":[1],"datatype":"FP32","data":[1]}'


def nested(draw: st.DrawFn, values: st.SearchStrategy[Any], depth: int) -> tuple[Any, int]:
    """A list of lists of equal depth, and the number of its values."""
    if depth == 1:
        flat = draw(st.lists(values, min_size=1, max_size=4))
        return flat, len(flat)
    inner = [nested(draw, values, depth - 1) for _ in range(draw(st.integers(1, 3)))]
    return [one for one, _ in inner], sum(count for _, count in inner)


_LETTERS = st.characters(codec="utf-8") | st.sampled_from('"\\\n\U0001f600é')
WORDS = st.text(_LETTERS, max_size=6) | st.text(_LETTERS, max_size=40) | st.sampled_from(['"', "\\", '\\"', "[,]", "{"])
KINDS = {
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "FP64": st.floats(allow_nan=True, allow_infinity=True),
    "BOOL": st.booleans(),
    "BYTES": WORDS,
}


@pytest.mark.parametrize("dtype", KINDS)
@settings(max_examples=examples(30))
@given(data=st.data(), depth=st.integers(1, 4), indent=st.sampled_from([None, 1]), ascii_=st.booleans())
def test_a_plan_in_slices_is_the_plan_of_the_whole(
    small: int, dtype: str, data: st.DataObject, depth: int, indent: int | None, ascii_: bool
) -> None:
    values, count = data.draw(st.composite(nested)(KINDS[dtype], depth))
    text = body(json.dumps(values, indent=indent, ensure_ascii=ascii_), count, dtype)
    whole, cut = plan_of(text), finished(plan_in_slices(text, MOST))
    assert bytes(cut.inputs[0].data or b"") == whole.inputs[0].data
    assert (cut.inputs[0].name, cut.inputs[0].shape) == (whole.inputs[0].name, whole.inputs[0].shape)
    assert (cut.options, cut.outputs) == (whole.options, whole.outputs)


@pytest.mark.parametrize("letter", ["a", "é", "\\n", "\\u00e9", "\\ud83d\\ude00", "\U0001f600"])
def test_a_long_string_is_decoded_in_slices(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decoded = json_values.string_of

    def string(data: bytes) -> str:
        sizes.append(len(data))
        return decoded(data)

    monkeypatch.setattr(json_values, "string_of", string)
    written = letter * (MIB // len(letter.encode()))
    found = finished(plan_in_slices(body(f'["b", "{written}" , "c"]', 3, "BYTES"), MOST)).inputs[0].data
    value = json.loads(f'"{written}"').encode()
    assert found == b"".join(len(one).to_bytes(4, "little") + one for one in (b"b", value, b"c"))
    assert len(sizes) >= MIB // SLICE_BYTES - 2
    assert max(sizes) <= 3 * SLICE_BYTES
    with pytest.raises(InvalidRequest, match="some of its data is a string"):
        finished(plan_in_slices(body(f'["{written}"]', 1), MOST))


@pytest.mark.parametrize("wrong", ["\\x", "\\ud83d", "\\u00g0", "\n", "\x01"])
@pytest.mark.parametrize("place", [0, 3 * SLICE_BYTES // 2, 4 * SLICE_BYTES])
def test_a_long_string_with_an_error_is_refused(wrong: str, place: int) -> None:
    text = "a" * place + wrong + "a" * (4 * SLICE_BYTES - place)
    with pytest.raises(InvalidRequest, match="failed to parse"):
        finished(plan_in_slices(body(f'["{text}"]', 1, "BYTES"), MOST))
    for values in (f'["{text}"1]', f'[1"{text}"]', f'["{text}""a"]'):
        with pytest.raises(InvalidRequest, match="failed to parse"):
            finished(plan_in_slices(body(values.replace(wrong, ""), 2, "BYTES"), MOST))


INVALID_LISTS = (
    "[1,]|[,1]|[1,,2]|[1 2]|[[1][2]]|[[1],2]|[1,[2]]|[[1]2]|[1[]]|[[],[1]]|[[1],[]]|[[1,],[2]]|[[1],[,2]]|"
    '[ , ]|[,]|[[,],[,]]|[1}|[{]|[[1},[2]]|[{"a":1}]|["a]|[1|[1]]|[nul]|[1,null]|[1,"2"]|[1.5]|[9999999999]|'
    "[--1]|[01]|[1\\n]|[1e]"
)


@cases(*INVALID_LISTS.split("|"), "[" * 98 + "1" + "]" * 98)
def test_invalid_lists_are_refused(data: str, small: int) -> None:
    for count in range(4):
        with pytest.raises(InvalidRequest):
            finished(plan_in_slices(body(data, count), MOST))


@pytest.mark.parametrize("data", ["[]", "[ ]", "[[],[]]", "[[[ ]],\n[[]]]"])
def test_empty_lists(small: int, data: str) -> None:
    assert not finished(plan_in_slices(body(data, 0), MOST)).inputs[0].data
    with pytest.raises(InvalidRequest, match="has 1 elements, and 0 are given"):
        finished(plan_in_slices(body(data, 1), MOST))


@settings(max_examples=examples(100))
@given(st.text('[]{},:"\\ 1a\n', max_size=40))
def test_any_text_is_refused_or_gives_the_same_plan_as_undivided(small: int, data: str) -> None:
    """Large requests are also refused for empty lists beside other lists."""
    text = body(data, 2)
    try:
        found: Any = bytes(finished(plan_in_slices(text, MOST)).inputs[0].data or b"")
    except InvalidRequest:
        return
    assert found == plan_of(text).inputs[0].data


def test_clients_cannot_write_the_placeholder_of_a_list(small: int) -> None:
    for mark in ('{"@":0}', '{"cut":0}', '{"cut 0000000000000000":0}'):
        with pytest.raises(InvalidRequest):
            finished(plan_in_slices(body(mark, 1), MOST))


def test_the_cost_of_nesting_is_linear_in_its_bytes() -> None:
    """The number of slices is equal, and objects are created only for values, not for brackets."""
    size = MIB
    unit = "[" * 95 + "1" + "]" * 95
    deep_count, flat_count = size // (len(unit) + 1), size // 2
    deep = body("[" + ",".join([unit] * deep_count) + "]", deep_count)
    flat = body("[" + ",".join(["1"] * flat_count) + "]", flat_count)
    assert abs(slices_of(plan_in_slices(deep, MOST)) - slices_of(plan_in_slices(flat, MOST))) <= 2
    outline = finished(json_outline.outline(deep))
    parts = [len(part) for part in json_values.flat("x", deep, outline.cuts[0])]
    assert sum(parts) == deep_count
    assert max(parts) <= SLICE_BYTES // len(unit) + 1


@pytest.mark.parametrize("depth", [96, 97, 10_000])
def test_the_depth_of_nesting_is_limited(depth: int) -> None:
    for data in ("[" * depth + "1" + "]" * depth, "[" * depth + "1," * 50_000 + "1" + "]" * depth):
        text = body(data, data.count("1"))
        if depth + 3 <= json_scan.JSON_DEPTH:
            assert finished(plan_in_slices(text, MOST)).inputs[0].data == plan_of(text).inputs[0].data
            continue
        for work in (plan_of, lambda text: finished(plan_in_slices(text, MOST))):
            with pytest.raises(InvalidRequest, match=r"^JSON nesting depth exceeds maximum allowed limit \(100\)$"):
                work(text)


@cases(
    (b'{"inputs":[],"parameters":{%b}}' % b",".join(b'"%x":1' % n for n in range(150_000)), "besides the 'data'"),
    (b'{"inputs":[%b]}' % b",".join([b'{"a":[]}'] * 150_000), "besides the 'data'"),
    (body("[" + "1" * 2 * MIB + "]", 1), "exceeds 1048576 bytes"),
    (body("[" + " " * 2 * MIB + "1]", 1), "exceeds 1048576 bytes"),
    (body("[" + ",".join(["1"] * 100_000) + "]", 10), "has 10 elements, and .* or more are given"),
    (b'{"inputs":[%b]}' % b",".join([TENSOR] * 10_000), "has 40001 fields and 30002 lists and objects"),
    (b'{"inputs":[],"id":[%b[]]}' % (b"[]," * 70_000), "fields and 70004 lists and objects"),
    (body("[" + "[]," * MIB + "[]]", 0), "bytes without a value"),
    (b'{"inputs":[]}]', "unmatched closing bracket"),
    ids=range(9),
)
def test_a_slice_and_what_is_decoded_at_once_are_bounded(text: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        finished(plan_in_slices(text, MOST))


def test_the_size_of_the_tensor_is_limited() -> None:
    text = "request JSON size of 400000 bytes exceeds the maximum allowed input size of 1000 bytes"
    with pytest.raises(InvalidRequest, match=text):
        finished(plan_in_slices(body("[" + ",".join(["1"] * 100_000) + "]", 100_000), 1000))


TEXT_MODEL: dict[str, Any] = {"input": [{"name": "t", "data_type": "TYPE_STRING", "dims": ["-1"]}]}


def test_generate_limits_the_number_of_values() -> None:
    finished(large_request(json.dumps({"text": ", " * MIB}).encode()))
    with pytest.raises(InvalidRequest, match="use infer"):
        finished(large_request(json.dumps({"text": [1] * (VALUES + 1)}).encode()))


LONG_STRINGS = ["a" * 300, "\u00e9\n" * 200, '"\\' * 150, "]}:,{[" * 60]
SLICES = "\U0001f600" * 40_000
"""Longer than a slice."""
KEYS = st.text(max_size=4) | st.sampled_from(LONG_STRINGS)
"""They stay in the rest of the document, whose limit has room for few keys like SLICES: only one is generated."""
NESTED = st.recursive(
    st.one_of(st.integers(-9, 9), st.text(max_size=8), st.sampled_from([*LONG_STRINGS, SLICES])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(60))
@given(st.dictionaries(KEYS | st.just(SLICES), NESTED, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_long_strings_are_cut_out_and_put_back(document: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only, separators=(" , ", " : ")).encode()
    strings = finished(json_strings.cut(text, VALUES))
    found, encoded = json.loads(strings.around), bytearray()
    finished(strings.encoded(found, encoded))
    assert json.loads(encoded) == document
    finished(strings.restore(found))
    assert found == document


def test_a_request_with_long_strings_is_decoded_in_slices() -> None:
    words = ["\n" * MIB, *["\u00e9" * 300] * 10_000]
    text = json.dumps({"t": words}).encode()
    assert slices_of(large_request(text)) >= len(text) // SLICE_BYTES
    plan = finished(finished(large_request(text)).plan(TEXT_MODEL, lambda size: None))
    assert bytes(plan.inputs[0].data or b"") == b"".join(map(with_size, words))
    with pytest.raises(InvalidRequest, match="besides its strings of 256 bytes and more"):
        finished(large_request(json.dumps({"t": ["a" * 200] * 12_000}).encode()))


def pieces_of(dtype: str, *parts: Buffer) -> list[Buffer]:
    """The pieces of an output in JSON. Each was held, and none exceeds what a slice makes."""
    held: list[int] = []
    pieces = finished(json_tensors.to_json_in_slices("y", dtype, (0,), parts, held.append))
    assert max(map(len, pieces)) <= 8 * SLICE_BYTES
    assert sum(held) + sum(piece == b"," for piece in pieces) >= sum(map(len, pieces))
    size, again = sum(map(len, parts)), json_tensors.to_json_in_slices("y", dtype, (0,), parts, held.append)
    assert slices_of(again) >= size // SLICE_BYTES
    return pieces


@pytest.mark.parametrize("dtype", ["FP32", "INT64", "UINT8", "BOOL"])
def test_numbers_are_written_in_slices(dtype: str) -> None:
    data = (np.arange(100_000) % 2).astype(to_numpy(dtype)).tobytes()
    text = bytes(json_tensors.to_json("y", dtype, (100_000,), data))
    for parts in ([data], [data[:40_000], memoryview(data)[40_000:]]):
        assert b"[%b]" % b"".join(pieces_of(dtype, *parts)) == text


def test_an_output_in_json_that_exceeds_its_share_is_not_made() -> None:
    made: list[int] = []

    def hold(size: int) -> None:
        made.append(size)
        if len(made) == 3:
            raise Unavailable("over the share")

    with pytest.raises(Unavailable):
        finished(json_tensors.to_json_in_slices("y", "FP32", (MIB,), [bytes(4 * MIB)], hold))
    assert len(made) == 3


def with_size(word: str) -> bytes:
    return len(word.encode()).to_bytes(4, "little") + word.encode()


@cases(["", "a", "é" * 1000, '"'] * 1000, ["ab"] * 30_000, ["a", "é" * MIB, "", '"' * MIB, "\U0001f600" * MIB, "b"])
def test_strings_are_written_in_slices(words: list[str]) -> None:
    data = b"".join(map(with_size, words))
    assert msgspec.json.decode(b"[%b]" % b"".join(pieces_of("BYTES", data))) == words


@pytest.mark.parametrize("text", [b"\xff", b"a" * MIB + b"\xc3"])
def test_strings_that_are_not_utf8_cannot_be_written(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        pieces_of("BYTES", len(text).to_bytes(4, "little") + text)


def test_inflation_stops_at_the_limit() -> None:
    bomb, held = gzip.compress(bytes(64 * MIB)), list[int]()
    said = f"decompressed request body exceeds the maximum allowed value of {MIB} bytes; raise --x"
    with pytest.raises(InvalidRequest, match=said):
        finished(bodies.inflate_body("gzip", bomb, MIB, "--x", held.append))
    assert sum(held) <= MIB
    assert max(held) <= SLICE
    held.clear()
    assert slices_of(bodies.inflate_body("gzip", bomb, 64 * MIB, "--x", held.append)) >= 64 * MIB // SLICE - 1
    assert sum(held) == 64 * MIB


class Turns:
    """Jobs of three slices each, logged by name."""

    def __init__(self) -> None:
        loop: Any = ManualLoop()
        self.loop, self.turns, self.log, self.done = loop, JobTurns(loop), list[str](), list[str]()

    def work(self, name: str) -> SlicedWork[str]:
        for _ in range(3):
            self.log.append(name)
            yield
        return name

    def run(self, name: str, then: Any = None, failed: Any = print) -> Any:
        return self.turns.run(self.work(name), then or self.done.append, failed)

    def run_all(self) -> None:
        """Runs the loop: one slice in each iteration."""
        while self.loop.soon:
            before = len(self.log)
            self.loop.iterate()
            assert len(self.log) <= before + 1


def test_one_slice_runs_per_loop_iteration() -> None:
    made = Turns()
    for name in "abc":
        made.run(name)
    assert made.log == ["a", "b", "c"], "the first slice at once"
    made.run("d").cancel()
    made.log.clear()
    made.run_all()
    assert (made.log, made.done) == (["a", "b", "c", "a", "b", "c"], ["a", "b", "c"])
    made.log.clear()
    made.run("a", lambda _: made.run("b"))
    made.run_all()
    assert made.log == ["a", "a", "a", "b", "b", "b"], "work that other work starts takes turns too"


def test_failed_work_does_not_affect_other_work() -> None:
    made, failed = Turns(), list[Exception]()

    def fail(_: object) -> None:
        raise ValueError

    def broken() -> SlicedWork[str]:
        yield
        raise KeyError

    made.turns.run(broken(), print, failed.append)
    made.run("a", fail, failed.append)
    made.run("b", fail, fail)
    made.run("c")
    with pytest.raises(ValueError):
        made.loop.run()
    made.loop.run()
    assert [type(error) for error in failed] == [KeyError, ValueError]
    assert made.done == ["c"], "not even an exception of a callback for errors stops it"


def test_a_request_is_answered_while_a_large_one_is_inflated() -> None:
    large, transport, _, loop = connected(input_bytes=64 * MIB)
    honest, other, _, _ = connected()
    data = bytes(16 * MIB)
    receive(large, post(gzip.compress(data), "Content-Encoding: gzip", "Inference-Header-Content-Length: 5"))
    assert not transport.sent
    assert len(loop.soon) == 1
    receive(honest, post(b"x"))
    assert answered(other.sent) == [(200, b"x")]
    assert loop.run() >= 16 * MIB // SLICE - 1
    assert answered(transport.sent) == [(200, data)]


def test_the_body_of_a_closed_connection_is_not_inflated_further() -> None:
    connection, transport, echo, loop = connected(False, input_bytes=64 * MIB)
    receive(connection, post(gzip.compress(bytes(16 * MIB)), "Content-Encoding: gzip"))
    connection.connection_lost(None)
    loop.run()
    assert not echo.answers
    assert not transport.sent


def test_white_space_outside_strings_is_not_counted(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """White space in strings is counted, and it still separates tokens."""
    tidy = body("[1, 2, 3]", 3).replace(b'"1"', b'"1  , \\"   2"')
    loose = tidy.replace(b',"', b" \n\t ," + b" " * 1000 + b'"')
    assert b'"1  , \\"   2"' in loose
    monkeypatch.setattr(json_outline, "AROUND_BYTES", 1000)
    assert finished(plan_in_slices(loose, MOST)) == plan_of(tidy)
    parted = loose.replace(b'"outputs"', b'"parameters":{"priority":1' + b" " * 1000 + b'2},"outputs"')
    with pytest.raises(InvalidRequest, match="failed to parse"):
        finished(plan_in_slices(parted, MOST))
    monkeypatch.setattr(json_outline, "AROUND_BYTES", 60)
    with pytest.raises(InvalidRequest, match="besides the 'data' of its inputs; the limit is 60"):
        finished(plan_in_slices(loose, MOST))
