"""Responses: a model's parts as chunks and as one response, thinking, log probabilities, tool calls, backpressure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.dtypes import to_numpy
from shmserve.errors import InvalidRequest, ModelFailed, Unavailable
from shmserve.gateway.kserve.answers import Buffer, Held
from shmserve.gateway.kserve.plans import InputPlan, RequestOptions, RequestPlan
from shmserve.gateway.limits.caller_shares import CallerShares, ShareExceeded
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES, SlicedWork
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.formats import (
    DONE,
    ChatFormat,
    Choice,
    CompletionFormat,
    Echo,
    ResponseOptions,
    ToolCalls,
    chat_logprobs,
    completion_logprobs,
    logprobs_of,
)
from shmserve.gateway.openai.generation import AT_ONCE, Generation
from shmserve.gateway.openai.models import LanguageModel
from shmserve.gateway.openai.reading import Thinking, tags_of
from shmserve.gateway.openai.requests import OpenAiRequests
from shmserve.gateway.openai.texts import Delta, PartReader, TokenUsage
from shmserve.protocol.messages import Part, Tensor
from tests.support.cases import cases
from tests.support.gateway.openai_caller import OpenAiCaller
from tests.support.hypothesis_profiles import examples

OPTIONS = ResponseOptions("id", "m", 5, shows_usage=False)


def strings(*values: bytes) -> bytes:
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


def part(dtype: str = "UINT32", /, **outputs: list[bytes] | list[int]) -> Held:
    """Lists of bytes are of the type BYTES, lists of numbers of `dtype`."""
    tensors: list[Tensor] = []
    buffers: list[list[Buffer]] = []
    for name, values in outputs.items():
        is_text = all(isinstance(value, bytes) for value in values)
        raw = strings(*values) if is_text else np.array(values, to_numpy(dtype)).tobytes()
        tensors.append(Tensor(name, "BYTES" if is_text else dtype, (len(values),), raw))
        buffers.append([raw])
    return Held(Part(1, 1, tuple(tensors)), buffers)


def added(reader: PartReader, part: Held) -> list[Delta]:
    """What a small part adds to each choice."""
    found = [one for one in reader.deltas(part) if one is not None]
    assert [index for index, _ in found] == list(range(len(found)))
    return [delta for _, delta in found]


def test_a_large_part_is_read_in_slices() -> None:
    """Each delta has as much as a slice may process, and after each the others get a turn."""
    text, tokens = "é" * 200_000, [{"5": {"logprob": -1.0, "decoded_token": "é"}}] * 20_000
    large = part(
        text_output=[text.encode(), b"b"],
        logprobs=[json.dumps(tokens).encode(), b"[]"],
        finish_reason=[b"stop", b""],
        token_ids=[json.dumps([5] * 20_000).encode(), b"[]"],
    )
    found = list(PartReader("m", 2).deltas(large))
    deltas = [delta for index, delta in filter(None, found) if index == 0]
    assert max(len(delta.text.encode()) for delta in deltas) <= SLICE_BYTES + 3
    assert max(len(delta.logprobs or ()) for delta in deltas) <= SLICE_BYTES // 40
    assert found.count(None) >= (len(text.encode()) + len(json.dumps(tokens))) // SLICE_BYTES
    assert "".join(delta.text for delta in deltas) == text
    assert list(itertools.chain.from_iterable(delta.logprobs or () for delta in deltas)) == tokens
    assert sum(len(delta.token_ids or ()) for delta in deltas) == 20_000
    assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
    with pytest.raises(ModelFailed, match="is not a JSON list"):
        list(PartReader("m", 1).deltas(part(text_output=[b""], logprobs=[json.dumps(tokens).encode()[:-1]])))


@pytest.mark.parametrize("dtype", ["UINT16", "INT32", "UINT32", "INT64"])
def test_types_of_numbers(dtype: str) -> None:
    reader = PartReader("m", 2)
    added(reader, part(dtype, text_output=[b"a", b"b"], num_input_tokens=[300], num_output_tokens=[3, 4]))
    added(reader, part(dtype, text_output=[b"a", b"b"], num_cached_tokens=[200]))
    assert reader.usage == TokenUsage(300, 7, cached=200)
    (delta,) = added(PartReader("m", 1), part(dtype, text_output=[b"a"], token_ids=[5, 300]))
    assert delta.token_ids == [5, 300]
    first, second = added(PartReader("m", 2), part(text_output=[b"a", b"b"], token_ids=[b"[5]", b"[6, 7]"]))
    assert (first.token_ids, second.token_ids) == ([5], [6, 7])
    with pytest.raises(ModelFailed, match="output 'num_input_tokens' of model 'm' has the type FP32"):
        added(reader, part("FP32", text_output=[b"a", b"b"], num_input_tokens=[300]))


@settings(max_examples=examples(100))
@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=5))
def test_characters_split_between_parts_are_joined(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    reader = PartReader("m", 2)
    found = ["", ""]
    for begin, end in itertools.pairwise(places):
        deltas = added(reader, part(text_output=[raw[begin:end], b"x"]))
        found = [so_far + delta.text for so_far, delta in zip(found, deltas, strict=True)]
    assert found == [text, "x" * (len(places) - 1)]


def test_invalid_utf8_is_replaced() -> None:
    reader = PartReader("m", 1)
    texts = [delta.text for raw in (b"a\xff", b"\xc3", b"b") for delta in added(reader, part(text_output=[raw]))]
    assert texts == ["a\ufffd", "", "\ufffdb"]


@cases(
    ({"finish_reason": [b"stop"]}, "returned no output 'text_output'"),
    ({"text_output": [b"a"]}, "has 1 strings; expected 2"),
    ({"text_output": [b"a", b"b", b"c"]}, "has 3 strings; expected 2"),
    ({"text_output": [1, 2]}, "has 0 strings"),
    ({"text_output": [b"a", b"b"], "finish_reason": [b"stop"]}, "'finish_reason' of model 'm' has 1 strings"),
    ({"text_output": [b"a", b"b"], "logprobs": [b"{}", b"[]"]}, "'logprobs' of model 'm' is not a JSON list"),
    ({"text_output": [b"a", b"b"], "tool_calls": [b"[", b""]}, "'tool_calls' of model 'm' is not a JSON list"),
)
def test_invalid_parts_are_an_error_of_the_model(outputs: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFailed, match=text):
        added(PartReader("m", 2), part(**outputs))
    too_long = Held(Part(1, 1, (Tensor("text_output", "BYTES", (1,), b""),)), [[b"\xff\0\0\0a"]])
    with pytest.raises(ModelFailed):
        added(PartReader("m", 1), too_long)


def test_the_chosen_token_and_the_others() -> None:
    entries = {
        "1": {"logprob": -0.5, "rank": 1, "decoded_token": "\u00e9"},
        "2": {"logprob": float("-inf"), "rank": 9, "decoded_token": None},
        "3": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    }
    (by_id,) = logprobs_of(Delta("b", logprobs=[entries], token_ids=[3]), 2)
    assert (by_id.text, by_id.logprob, by_id.top) == ("b", -1.5, [("\u00e9", -0.5), ("b", -1.5)])
    (first,) = logprobs_of(Delta("b", logprobs=[entries]), 0)
    assert (first.text, first.top) == ("\u00e9", [])
    (all_of_them,) = logprobs_of(Delta("b", logprobs=[entries], token_ids=[2]), 5)
    assert (all_of_them.text, all_of_them.logprob, len(all_of_them.top)) == ("", -9999.0, 3)
    assert chat_logprobs([first])["content"][0]["bytes"] == [195, 169]
    assert logprobs_of(Delta(""), 3) == []


@pytest.mark.parametrize("given", [[1], [{}], [{"1": 2}], [{"1": {}}], [{"1": {"logprob": "a"}}], [None]])
def test_invalid_log_probabilities_are_refused(given: list[Any]) -> None:
    with pytest.raises(ModelFailed, match="'logprobs'"):
        logprobs_of(Delta("a", logprobs=given), 1)


def test_tool_calls_arrive_in_pieces_or_whole() -> None:
    calls = ToolCalls()
    first = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{"}}
    assert calls.add([first]) == [{"type": "function", **first}]
    other = {"function": {"name": "g", "arguments": "{}"}}
    (added,) = calls.add([other])
    assert added["index"] == 1
    assert added["id"].startswith("call_")
    assert calls.add([{"index": 0, "function": {"arguments": "}"}}]) == [{"index": 0, "function": {"arguments": "}"}}]
    assert [call["function"] for call in calls.whole()] == [{"name": "f", "arguments": "{}"}, other["function"]]
    assert all("index" not in call for call in calls.whole())


@pytest.mark.parametrize("wrong", [1, {}, {"function": 1}, {"index": 0, "function": {"arguments": 1}}])
def test_invalid_tool_calls_are_refused(wrong: Any) -> None:
    calls = ToolCalls()
    calls.add([{"index": 0, "function": {"name": "f"}}])
    with pytest.raises(ModelFailed):
        calls.add([wrong])


def documents(data: bytes) -> list[Any]:
    *events, end = data.split(b"\n\n")
    assert end == b""
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


TEXTS = st.text(max_size=6)


@settings(max_examples=examples(60))
@given(st.sampled_from([ChatFormat, CompletionFormat]), st.lists(TEXTS, min_size=1, max_size=5), TEXTS, st.booleans())
def test_the_chunks_add_up_to_the_whole_response(
    kind: type[ChatFormat | CompletionFormat], texts: list[str], model: str, shows_usage: bool
) -> None:
    found = kind(replace(OPTIONS, model=model, shows_usage=shows_usage))
    streamed, whole, data = Choice(), Choice(), b""
    deltas = [*[Delta(text) for text in texts[:-1]], Delta(texts[-1], "length")]
    for delta in deltas:
        data += found.chunk(1, streamed, delta)
        found.add(whole, delta)
    chunks = documents(data)
    common = {"id": "id", "created": 5, "model": model, "object": found.chunk_object}
    assert all(common.items() <= chunk.items() for chunk in chunks)
    assert all(("usage" in chunk) == shows_usage for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {choice["index"] for choice in choices} == {1}
    (answer,) = json.loads(b"".join(found.whole([whole], TokenUsage(1, 2))))["choices"]
    if kind is ChatFormat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == answer["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == answer["text"]
    assert (choices[-1]["finish_reason"], answer["finish_reason"]) == ("length", "length")
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


def test_text_beside_tool_calls() -> None:
    found, choice = ChatFormat(OPTIONS), Choice()
    chunks = documents(found.chunk(0, choice, Delta("a", "stop", tool_calls=[{"id": "1", "function": {"name": "f"}}])))
    (last,) = chunks[-1]["choices"]
    assert (last["delta"]["content"], last["finish_reason"]) == ("a", "tool_calls")
    found.add(choice, Delta("a", "stop"))
    message = json.loads(b"".join(found.whole([choice], TokenUsage())))["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("a", 1)


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_log_probabilities_of_a_whole_response(kind: type[ChatFormat | CompletionFormat]) -> None:
    """They are encoded as they arrive. The result equals that of all tokens at once."""
    found, choice = kind(replace(OPTIONS, top=1)), Choice()
    entries = [{"5": {"logprob": -1.0 - index, "decoded_token": word}} for index, word in enumerate(("a", "bc", "d"))]
    for some in (entries[:2], entries[2:]):
        assert found.add(choice, Delta("x", logprobs=some)) > 0
    (answer,) = json.loads(b"".join(found.whole([choice, Choice()], TokenUsage())))["choices"][:1]
    tokens = logprobs_of(Delta("", logprobs=entries), 1)
    expected = chat_logprobs(tokens) if kind is ChatFormat else completion_logprobs(tokens, 0)
    assert answer["logprobs"] == expected


def test_log_probabilities_of_a_prompt_and_its_text() -> None:
    found, choice = CompletionFormat(replace(OPTIONS, top=2)), Choice(Echo("Why so?"))
    likely = {"8": {"logprob": -1.0, "rank": 1, "decoded_token": "?"}}
    prompt = [None, {"7": {"logprob": -2.0, "rank": 2, "decoded_token": " so"}, **likely}, likely]
    text = [{"5": {"logprob": -3.0, "rank": 1, "decoded_token": "Yes"}}]
    found.add(choice, Delta("Yes", logprobs=text, prompt_logprobs=prompt))
    (answer,) = json.loads(b"".join(found.whole([choice], TokenUsage())))["choices"]
    assert answer["text"] == "Why so?Yes"
    assert answer["logprobs"] == {
        "text_offset": [0, 3, 6, 7],
        "token_logprobs": [None, -2.0, -1.0, -3.0],
        "tokens": ["Why", " so", "?", "Yes"],
        "top_logprobs": [None, {"?": -1.0, " so": -2.0}, {"?": -1.0}, {"Yes": -3.0}],
    }
    with pytest.raises(ModelFailed, match="'prompt_logprobs'"):
        found.add(Choice(Echo("a")), Delta("", prompt_logprobs=[None, 5]))


def test_choices_share_the_json_of_their_prompt() -> None:
    found, echo = CompletionFormat(OPTIONS), Echo("é" * 1000)
    parts = found.whole([Choice(echo) for _ in range(100)], TokenUsage())
    assert sum(part is echo.json for part in parts) == 100
    assert {choice["text"] for choice in json.loads(b"".join(parts))["choices"]} == {"é" * 1000}


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_chunks_have_the_tokens_so_far(kind: type[ChatFormat | CompletionFormat]) -> None:
    found, choice = kind(replace(OPTIONS, shows_usage=True, continuous=True)), Choice()
    data = found.chunk(0, choice, Delta("a"))
    choice.usage = TokenUsage(5, 2, cached=4)
    data += found.chunk(0, choice, Delta("b", "stop", stop="c"))
    before, *_, last = documents(data)
    assert (before["usage"], last["choices"][0]["stop_reason"]) == (None, "c")
    counts = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert last["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 4}}


def test_unknown_usage_is_omitted() -> None:
    found = ChatFormat(replace(OPTIONS, shows_usage=True))
    assert "usage" not in json.loads(b"".join(found.whole([Choice()], TokenUsage(1, None))))
    assert documents(found.end([Choice()], TokenUsage()).removesuffix(DONE))[0]["usage"] is None


def generation(client: OpenAiCaller, prompts: int, as_events: bool = True, echoes: Sequence[Echo | None] = ()) -> None:
    connection: Any = client
    response = CompletionFormat(OPTIONS)
    events = response if as_events else None
    made = Generation(connection, connection, "m", response, events, list(echoes) or [None] * prompts)
    made.begin(iter([RequestPlan((), 0, RequestOptions())] * prompts))


def give(stream: Any, text: bytes, last: bool = False) -> None:
    stream.part(part(text_output=[text]), last)


def said(client: OpenAiCaller) -> list[str]:
    events = [data.removesuffix(DONE) for data in client.sent]
    return [found["choices"][0]["text"] for data in events for found in documents(data)]


def test_a_client_that_does_not_read() -> None:
    """Parts are taken, and more of them requested, only while the client reads."""
    client = OpenAiCaller()
    generation(client, 2)
    first, second = client.tickets
    give(first, b"a")
    client.writable = False
    for text in (b"b", b"c"):
        give(first, text)
        give(second, text)
    assert (said(client), client.handed) == (["a"], 1)
    client.writable = True
    client.resume()
    assert (said(client), client.handed) == (["a", "b", "c", "b", "c"], 5)
    give(first, b"d", True)
    give(second, b"d", True)
    assert client.sent[-1].endswith(b"}\n\n" + DONE)
    assert client.ended
    assert not client.cancelled


VLLM: dict[str, Any] = {
    "input": [
        {"name": name, "data_type": "TYPE_STRING", "dims": ["1"]} for name in ("text_input", "sampling_parameters")
    ],
    "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": ["-1"]}],
}


def planned(client: OpenAiCaller, size: int, **more: Any) -> list[RequestPlan]:
    """The requests to the model that three prompts with two choices each become. `size`: of the sampling parameters."""
    plans: list[RequestPlan] = []

    def placed(specs: list[InputPlan]) -> SlicedWork[list[InputPlan]]:
        yield from ()
        return specs

    sender: Any = client
    sender.infer = lambda ticket, request, window: plans.append(request.plan)
    client.link.shares = CallerShares()
    sender.placed_tensors = placed
    document = {"model": "m", "prompt": ["a", "b", "c"], "n": 2, "sampling_parameters": {"x": "y" * size}, **more}
    request = bodies.completion(json.dumps(document).encode())
    OpenAiRequests(sender)._complete(sender, request, VLLM)  # noqa: SLF001 - a request without a connection
    return plans


def test_requests_share_their_sampling_parameters_and_prompts() -> None:
    plans = planned(OpenAiCaller(), 1000)
    assert len(plans) == 6
    assert len({id(plan.inputs[1].data) for plan in plans}) == 1
    assert len({id(plan.inputs[0].data) for plan in plans}) == 3


def test_requests_with_large_inputs_of_their_own_are_made_in_turns() -> None:
    client = OpenAiCaller()
    plans = planned(client, COPY_BYTES // 2, seed=1)
    assert len(plans) < 6
    assert client.loop.run() >= 2
    assert len(plans) == 6
    assert len({id(plan.inputs[1].data) for plan in plans}) == 6


@pytest.mark.parametrize("more", [{}, {"echo": True, "prompt": ["p" * 400_000, "q"]}])
def test_what_a_request_becomes_is_counted_before_it_is_made(more: dict[str, Any]) -> None:
    client = OpenAiCaller()
    client.share = 700_000
    with pytest.raises(ShareExceeded, match=r"requests to the model have \d+ bytes of prompts and sampling parameters"):
        planned(client, 100 if more else 200_000, **more)
    assert client.viewer is None, "nothing was sent"
    assert client.held == [(4 * 400_001) + 4 * 108 if more else 6 * 200_008 + 6]


def test_prompts_are_echoed_while_the_client_reads() -> None:
    """An echo is an event of its own; the choices of a prompt share its JSON."""
    client = OpenAiCaller()
    generation(client, 2, echoes=[Echo("a" * (SLICE_BYTES + 1)), Echo("b")])
    first, second = client.tickets
    client.writable = False
    give(first, b"x")
    give(second, b"y", True)
    assert not client.sent
    client.writable = True
    client.resume()
    client.loop.run()
    give(first, b"", True)
    assert sorted(said(client)) == sorted(["a" * (SLICE_BYTES + 1), "x", "b", "y", "", ""])
    assert client.ended


def test_a_large_part_is_taken_in_slices_in_order() -> None:
    client = OpenAiCaller()
    generation(client, 2)
    first, second = client.tickets
    give(first, b"a" * (3 * SLICE_BYTES))
    give(first, b"b")
    give(second, b"c", True)
    assert "".join(said(client)).count("a") < 3 * SLICE_BYTES, "the rest waits for its turns"
    client.loop.run()
    give(first, b"d", True)
    assert "".join(said(client)).replace("c", "") == "a" * (3 * SLICE_BYTES) + "bd"
    assert client.ended


def test_a_response_that_exceeds_its_share_is_not_made() -> None:
    client = OpenAiCaller()
    client.share = 4 * SLICE_BYTES
    generation(client, 1, as_events=False)
    give(client.tickets[0], b"a" * (20 * SLICE_BYTES), True)
    client.loop.run()
    assert isinstance(client.error, Unavailable)
    assert sum(client.held) <= 6 * SLICE_BYTES


def test_prompts_wait_for_room() -> None:
    with pytest.raises(Unavailable):
        generation(OpenAiCaller(0), 5)
    client = OpenAiCaller(2)
    generation(client, 5, as_events=False)
    for number in range(5):
        assert len(client.tickets) == min(5, number + 2)
        give(client.tickets[number], b"x%d" % number, True)
    assert [choice["text"] for choice in client.answered["choices"]] == [f"x{number}" for number in range(5)]


@pytest.mark.parametrize(("refused", "lost"), [(True, False), (False, True), (True, True)])
def test_a_failure_while_prompts_are_sent(refused: bool, lost: bool) -> None:
    """The second prompt is refused, the first fails, or both, as when the link to the broker is lost."""
    client = OpenAiCaller()

    def sending() -> None:
        if len(client.tickets) == 2:
            if lost:
                client.tickets[0].fail(Unavailable("lost"))
            if refused:
                client.tickets.pop()
                raise InvalidRequest("too long")

    client.sending = sending
    with nullcontext() if lost else pytest.raises(InvalidRequest):
        generation(client, 4)
    assert str(client.error) == ("lost" if lost else "None")
    assert len(client.tickets) == (1 if refused else 2), "no more are sent"
    assert client.cancelled == client.tickets[lost:], "the others are cancelled"
    give(client.tickets[0], b"late")
    assert not client.sent


def test_a_failure_while_the_next_prompt_is_sent() -> None:
    """The response after which it was sent does not end the stream."""
    client = OpenAiCaller()
    generation(client, AT_ONCE + 2)
    assert len(client.tickets) == AT_ONCE, "prompts are sent in portions"
    client.sending = lambda: client.tickets[1].fail(Unavailable("lost"))
    give(client.tickets[0], b"a")
    give(client.tickets[0], b"b", True)
    text, error = [documents(data)[0] for data in client.sent]
    assert text["choices"][0]["text"] == "a"
    assert error["error"]["message"] == "lost"
    assert client.cancelled == client.tickets[2:]


def test_text_before_an_invalid_part_is_sent() -> None:
    client = OpenAiCaller()
    client.writable = False
    generation(client, 1)
    for values in ({"text_output": [b"a"]}, {"other": [b"b"]}):
        client.tickets[0].part(part(**values), False)
    client.writable = True
    client.resume()
    text, error = [documents(data)[0] for data in client.sent]
    assert text["choices"][0]["text"] == "a"
    assert "returned no output" in error["error"]["message"]
    assert client.cancelled == client.tickets


def test_disconnecting_cancels_the_prompts_in_flight_and_the_rest_of_a_part() -> None:
    client = OpenAiCaller()
    generation(client, AT_ONCE + 5)
    give(client.tickets[0], b"a", True)
    give(client.tickets[1], b"a" * (3 * SLICE_BYTES), True)
    client.viewer.disconnected()
    assert len(client.cancelled) == AT_ONCE
    before = len(client.sent)
    give(client.tickets[2], b"a")
    client.loop.run()
    assert len(client.sent) <= before + 1
    assert len(client.tickets) == AT_ONCE + 1
    assert not client.ended


THOUGHTS = [
    ("<think>a<b</think>\n\nc", "a<b", "\n\nc"),
    ("\n<think></think>c</think>", "", "c</think>"),
    ("<thin", "", "<thin"),
    ("a<think>b</think>", "", "a<think>b</think>"),
    ("<think>a</thin", "a</thin", ""),
    ("", "", ""),
]
BEGUN = [("a\n</think>b", "a\n", "b"), ("a</", "a</", "")]
"""The template has begun the thinking."""


@pytest.mark.parametrize(
    ("start", "text", "thought", "answer"), [*[("<think>", *one) for one in THOUGHTS], *[("", *one) for one in BEGUN]]
)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_pieces_make_no_difference(data: st.DataObject, start: str, text: str, thought: str, answer: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = Thinking((start, "</think>"))
    found = [reader.feed(piece, number + 1 == len(pieces)) for number, piece in enumerate(pieces)]
    assert ("".join(one for one, _ in found), "".join(one for _, one in found)) == (thought, answer)


def test_tags_of_a_model() -> None:
    for text, expected in (("", None), ("</t>", ("", "</t>")), ("<t> </t>", ("<t>", "</t>"))):
        assert tags_of(LanguageModel("m", {}, frozenset(), {"reasoning_tags": text})) == expected
    with pytest.raises(InvalidRequest, match="more than two tags"):
        tags_of(LanguageModel("m", {}, frozenset(), {"reasoning_tags": "a b c"}))
