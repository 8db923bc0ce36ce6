"""Loading a config.pbtxt: any text is either loaded as protobuf loads it, or raises ConfigError.

The texts of problems are in `broken`; see test_broken.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.repo.config import protos
from shmserve.repo.config.outline import DEPTH, TOKENS, tokens
from shmserve.repo.config.problems import CONFIG_BYTES, LIMIT, ConfigError, Problem, nearest
from shmserve.repo.load import ExaminedConfig, ModelContext, examine, parse
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, DIRECT, DYNAMIC, SMALL

QUICK = settings(max_examples=examples(30))


def examined(text: str | bytes) -> ExaminedConfig:
    return examine(text, "m/config.pbtxt", ModelContext("m", BACKENDS))


def problems(text: str | bytes) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        examined(text).require()
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.problems


def test_all_forms_of_text_format() -> None:
    text = """# a comment
    name : 'm'; max_batch_size: 0x10,
    input: [ { name: "a" "b", data_type: 11, dims: 010 dims: [ -1 ] } ]
    input < name: "c" >
    response_cache { enable: t }  model_transaction_policy { decoupled: 0 } metric_tags { value: "v" } # the end"""
    assert parse("\ufeff".encode() + text.encode()) == parse(
        'name: "m" max_batch_size: 16 input { name: "ab" data_type: TYPE_FP32 dims: [ 8, -1 ] } input { name: "c" } '
        'response_cache { enable: true } model_transaction_policy { } metric_tags { key: "" value: "v" }'
    )


def test_later_of_duplicate_keys_is_used_with_a_warning() -> None:
    text = 'parameters { key: "k" value { string_value: "1" } } parameters { key: "k" value { string_value: "2" } }'
    assert examined(SMALL + text).require().parameters["k"].string_value == "2"
    (warning,) = examined(SMALL + text).warnings
    assert str(warning) == ('m/config.pbtxt:6:71: parameters["k"]: given twice, first on line 6; the last one is used')


@cases(
    "{" * CONFIG_BYTES,
    "a{" * (CONFIG_BYTES // 2),
    "input{" * (CONFIG_BYTES // 6),
    "input<" * (CONFIG_BYTES // 6),
    "input:[" * (CONFIG_BYTES // 7),
    "[" * CONFIG_BYTES,
    "<" * CONFIG_BYTES,
    '"' * CONFIG_BYTES,
    "\\" * CONFIG_BYTES,
    "#" * CONFIG_BYTES + "\n",
    'name: "' + "\\" * (CONFIG_BYTES - 7),
    "name: " + '"" ' * 100_000,
    "max_batch_size: " + "9" * 100_000,
    "x: 1 " * 200_000,
    ("a" * 1000 + ": 1 ") * 1000,
    "input { dims: [" + "1," * 400_000 + "1] }",
    "input { } " * 100_000,
    "x" * (CONFIG_BYTES + 1),
    ids=range(18),
)
def test_hostile_text_has_a_bounded_error(text: str) -> None:
    found = problems(text)
    assert 0 < len(found) <= LIMIT + 1
    assert sum(len(str(problem)) for problem in found) < 64 * 1024


@cases(
    ("input { } " * TOKENS, f"more than {TOKENS} tokens"),
    ("input{" * 1000, f"nested deeper than {DEPTH} levels"),
    (b'name: "m"\n\xff', "config.pbtxt:2:1: not UTF-8 text"),
    ("\n\n\ud800", "config.pbtxt:3:1: not UTF-8 text"),
    (b'name: "\\377"', "config.pbtxt"),
    ("\x00", 'found "\\x00", expected a field name'),
    ("x" * (CONFIG_BYTES + 1), f"{CONFIG_BYTES + 1} bytes, expected at most {CONFIG_BYTES}"),
    ids=["tokens", "depth", "bytes", "surrogate", "escape", "control", "size"],
)
def test_text_that_is_refused_before_protobuf_parses_it(data: str | bytes, expected: str) -> None:
    (problem,) = problems(data)
    assert expected in str(problem)


_PIECES = sorted({token.text for text in ALL for token in tokens(text) if token.kind != "end"})


@QUICK
@given(st.binary())
def test_any_bytes_are_parsed_or_raise_config_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse(data)


@QUICK
@given(st.data())
def test_text_is_accepted_exactly_if_protobuf_accepts_it(data: st.DataObject) -> None:
    """Deletes, duplicates, swaps or replaces words of a valid file."""
    words = [token.text for token in tokens(data.draw(st.sampled_from(ALL))) if token.kind != "end"]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        kind = data.draw(st.sampled_from(["cut", "double", "exchange", "other"]))
        if kind == "cut":
            del words[at]
        elif kind == "double":
            words.insert(at, words[at])
        elif kind == "exchange":
            other = data.draw(st.integers(0, len(words) - 1))
            words[at], words[other] = words[other], words[at]
        else:
            words[at] = data.draw(st.sampled_from([*_PIECES, "-1", "1e3", "nan", "-inf", "t", "010", "''"]))
    text = " ".join(words)
    message = protos.new_config()
    try:
        text_format.Parse(text, message, descriptor_pool=protos.POOL)
    except text_format.ParseError:
        with pytest.raises(ConfigError):
            parse(text)
        return
    try:
        expected = protos.to_config(message)
    except msgspec.ValidationError:
        # A number that the enum does not have: protobuf keeps it.
        with pytest.raises(ConfigError):
            parse(text)
    else:
        assert repr(parse(text)) == repr(expected)


@QUICK
@given(messages(), st.booleans(), st.booleans())
def test_every_message_that_protobuf_prints_is_parsed(message: Any, as_utf8: bool, one_line: bool) -> None:
    text = text_format.MessageToString(message, as_utf8=as_utf8, as_one_line=one_line)
    assert repr(parse(text)) == repr(protos.to_config(message))


def test_each_problem_is_one_printable_line() -> None:
    with pytest.raises(ConfigError) as caught:
        examined('nam: "m"\nplatfrom: "x"').require()
    assert str(caught.value).splitlines() == [
        'm/config.pbtxt:1:1: nam: ModelConfig has no such field; did you mean "name"?',
        'm/config.pbtxt:2:1: platfrom: ModelConfig has no such field; did you mean "platform"?',
    ]
    spoilt = 'instance_group { name: "\\n" } output { name: "a\\tb" }'
    for text in ('name: "\\033[31m\\n" foo: 1\ninput { name: "\x1b" }', SMALL + spoilt, DIRECT, DYNAMIC):
        assert all(str(problem).isprintable() for problem in problems(text))


def test_nearest_name() -> None:
    names = ["preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"]
    for found, near in (("preferred_batch_sizes", 0), ("PREFERRED_BATCH_SIZE", 0), ("queue_delay_microseconds", 1)):
        assert nearest(found, names) == names[near]
    assert nearest("zzz", names) is nearest("x" * 1000, names) is None
