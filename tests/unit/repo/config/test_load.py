"""Loading a config.pbtxt, or a configuration as JSON as in load requests: any text is either loaded as protobuf loads
it, or raises ConfigError.

The texts of problems are in `broken`; see test_broken.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format, text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.repo.config import protos
from shmserve.repo.config.outline import DEPTH, TOKENS, tokens
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.problems import CONFIG_BYTES, LIMIT, ConfigError, Problem
from shmserve.repo.config.schema import ModelConfig, as_triton_json
from shmserve.repo.load import ExaminedConfig, ModelContext, examine, parse
from shmserve.repo.storage.store import scan_model
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, DIRECT, DYNAMIC, SMALL

QUICK = settings(max_examples=examples(50), suppress_health_check=list(HealthCheck))


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


HOSTILE = [
    part * (CONFIG_BYTES // len(part)) for part in ("{", "a{", "input{", "input<", "input:[", "[", "<", '"', "\\")
]
HOSTILE += [
    "#" * CONFIG_BYTES + "\n",
    'name: "' + "\\" * (CONFIG_BYTES - 7),
    "name: " + '"" ' * 100_000,
    "max_batch_size: " + "9" * 100_000,
    "x: 1 " * 200_000,
    ("a" * 1000 + ": 1 ") * 1000,
    "input { dims: [" + "1," * 400_000 + "1] }",
    "input { } " * 100_000,
    "x" * (CONFIG_BYTES + 1),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(18))
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
    spoilt = 'instance_group { name: "\\n" } output { name: "a\\tb" }'
    for text in ('name: "\\033[31m\\n" foo: 1\ninput { name: "\x1b" }', SMALL + spoilt, DIRECT, DYNAMIC):
        assert all(str(problem).isprintable() for problem in problems(text))


def read(data: str | bytes | dict[str, Any]) -> ModelConfig:
    text = json.dumps(data) if isinstance(data, dict) else data
    return protos.to_config(parse_override(text).message)


def problems_of_override(data: str | bytes) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_override(data)
    return caught.value.problems


@QUICK
@given(messages(), st.booleans(), st.booleans(), st.booleans())
def test_json_of_protobuf_is_parsed(message: Any, snake: bool, defaults: bool, numbers: bool) -> None:
    text = json_format.MessageToJson(
        message,
        preserving_proto_field_name=snake,
        always_print_fields_with_no_presence=defaults,
        use_integers_for_enums=numbers,
    )
    assert parse_override(text).message == json_format.Parse(text, protos.new_config())


def test_forms_that_triton_clients_use() -> None:
    config = read(
        '{"max_batch_size": "16", "instance_group": [{"count": "2", "kind": "kind_cpu"}], "versionPolicy": null,'
        '"dynamic_batching": {"maxQueueDelayMicroseconds": "18446744073709551615", "preferred_batch_size": [4.0, 8]},'
        '"input": [{"name": "x", "data_type": "type_fp32", "dims": [-1, "9223372036854775807"]}],'
        '"sequence_batching": null, "parameters": {"k": {"string_value": "v"}}, "cc_model_filenames": {"7.5": "m"}}'
    )
    assert config == parse(
        'max_batch_size: 16 instance_group { count: 2 kind: KIND_CPU } parameters { key: "k" value { string_value: '
        '"v" } } dynamic_batching { max_queue_delay_microseconds: 18446744073709551615 preferred_batch_size: [ 4, 8 ] }'
        'input { name: "x" data_type: TYPE_FP32 dims: [ -1, 9223372036854775807 ] }'
        'cc_model_filenames { key: "7.5" value: "m" }'
    )
    # One value of a repeated field, as in Triton.
    one = {"name": "x", "data_type": "TYPE_FP32", "dims": 4}
    listed = {"input": [one | {"dims": [4]}], "instance_group": [{"count": 2}]}
    assert read({"input": one, "instance_group": {"count": 2}}) == read(listed)
    for text in (SMALL, *ALL):
        assert read(as_triton_json(parse(text))) == parse(text)


@cases(
    ("", "config override:1:1: not JSON: Expecting value"),
    ('{"name": "a",\n}', "config override:2:1: not JSON: "),
    ('{"max_batch_size": 1' + "0" * 10_000 + "}", "invalid JSON"),
    (b'{"name": "\xff"}', "config override:1:1: not UTF-8 text"),
    ("[" * CONFIG_BYTES, f"nested deeper than {DEPTH} levels"),
    ('{"a":' * 1000, f"nested deeper than {DEPTH} levels"),
    ('{"input": [' + "{}," * TOKENS + "{}]}", f"more than {TOKENS} values"),
    (" " * (CONFIG_BYTES + 1), f"{CONFIG_BYTES + 1} bytes, expected at most {CONFIG_BYTES}"),
    ids=["empty", "second line", "digits", "bytes", "lists", "objects", "values", "size"],
)
def test_json_that_cannot_be_parsed(data: str | bytes, expected: str) -> None:
    (problem,) = problems_of_override(data)
    assert expected in str(problem)
    assert str(problem).startswith("config override:")
    *_, last = found = problems_of_override(json.dumps({"input": [{"dims": ["x"] * 1000}]}))
    assert (len(found), last.text) == (LIMIT + 1, f"and {1000 - LIMIT} more problems")


_KEYS = [field.name for field in protos.CONFIG.fields] + ["name", "dims", "data_type", "kind", "latest", "x", "é"]
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["TYPE_FP32", "8", "-1", "NaN"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS) | st.text(), inner, max_size=4),
    max_leaves=12,
)


@QUICK
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=5))
def test_any_json_is_parsed_as_by_protobuf_or_raises_config_error(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    try:
        message = parse_override(text).message
    except ConfigError:
        return
    # Only parse_override accepts enum values in any case.
    with contextlib.suppress(json_format.ParseError):
        assert message == json_format.Parse(text, protos.new_config())


@QUICK
@given(st.binary() | st.text() | st.text(alphabet='{}[]":,0123456789.eE+-\\ntrue'))
def test_any_bytes_are_parsed_or_raise_config_error(data: bytes | str) -> None:
    for read_text in (parse, parse_override):
        with contextlib.suppress(ConfigError):
            read_text(data)


def test_an_override_replaces_the_file_and_rules_apply_to_it(tmp_path: Path) -> None:
    path = tmp_path / "m"
    (path / "1").mkdir(parents=True)
    (path / "config.pbtxt").write_text("this is not even a configuration")
    plain = as_triton_json(parse(SMALL + "instance_group { count: 3 }"))
    found: Any = scan_model(path, backends=BACKENDS, override=parse_override(json.dumps(plain)))
    assert (found.problem_texts, found.file) == ((), "override")
    assert found.config.instance_group[0].count == 3
    assert found.written == parse(SMALL + "instance_group { count: 3 }")
    plain |= {"name": "other", "runtime": "x.so", "metric_tags": {"a": "b"}}
    plain["input"][0]["dims"] = [0]
    found = scan_model(path, backends=BACKENDS, override=parse_override(json.dumps(plain)))
    assert found.problem_texts == (
        'config override: name: unexpected directory name "m" for model "other": the two must be equal',
        "config override: runtime: not supported: only a backend that is not built in loads `model.py` or a library",
        "config override: input[0].dims[0]: found 0, expected 1 or more, or -1 for any size",
    )
    assert found.warning_texts == (
        "config override: metric_tags: has no effect: metrics do not have model-specific labels yet",
    )
