"""Reading config.pbtxt: places, suggestions, all problems at once, and nothing but ConfigError for whatever text."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.repo.config import protos
from shmserve.repo.config.outline import DEPTH, TOKENS, OutlineBlock, Token, outline, tokens
from shmserve.repo.config.problems import CONFIG_BYTES, LIMIT, ConfigError, Problem, nearest
from shmserve.repo.load import load, parse
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, DIRECT, DYNAMIC, SMALL

QUICK = settings(max_examples=examples(150))


def problems(text: str | bytes) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(text, name="m", backends=BACKENDS, file="m/config.pbtxt")
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.problems


def only(text: str | bytes) -> str:
    found = problems(text)
    assert len(found) == 1, found
    return str(found[0])


def test_small_model_loads() -> None:
    loaded = load(SMALL, name="m", backends=BACKENDS)
    assert loaded.warnings == ()
    assert loaded.config.name == "m"
    assert loaded.config.input[0].dims == (3,)


def test_all_problems_with_their_places() -> None:
    text = """name: "m"
backnd: "identity"
max_batch_size: 2147483648
input [ { name: "x" data_type: TYPE_FP23
          dims: [ 3, "4" ] },
        { name: y data_type: "TYPE_FP32" frmat: FORMAT_NHWC } ]
output { name: "z" dims { } optional: true }
dynamic_batching: 3
parameters { key: "k" valeu { string_value: "v" } }
instance_group [ { kind: KIND_CPUU }, { kind: 9 } ]
"""
    found = [(p.line, p.column, p.path, p.text) for p in problems(text)]
    assert [place[:3] for place in found] == [
        (2, 1, "backnd"),
        (3, 17, "max_batch_size"),
        (4, 32, "input[0].data_type"),
        (5, 22, "input[0].dims[1]"),
        (6, 17, "input[1].name"),
        (6, 30, "input[1].data_type"),
        (6, 42, "input[1].frmat"),
        (7, 25, "output[0].dims[0]"),
        (7, 29, "output[0].optional"),
        (8, 19, "dynamic_batching"),
        (9, 23, 'parameters["k"].valeu'),
        (10, 26, "instance_group[0].kind"),
        (10, 47, "instance_group[1].kind"),
    ]
    texts = [place[3] for place in found]
    assert texts[0] == 'ModelConfig has no such field; did you mean "backend"?'
    assert texts[1] == "found 2147483648, expected int32, an integer from -2147483648 to 2147483647"
    assert texts[2] == 'found TYPE_FP23, not a DataType; did you mean "TYPE_FP32"?'
    assert texts[3].startswith('found "4", expected int64')
    assert texts[4] == 'found y, expected a string in quotes; write "y"'
    assert texts[5] == 'found "TYPE_FP32", expected TYPE_FP32 without quotes'
    assert texts[6].endswith('did you mean "format"?')
    assert texts[8].startswith("ModelOutput has no such field; expected one of name, data_type, dims,")
    assert texts[9] == "found 3, expected a block in { }"
    assert texts[11].endswith('did you mean "KIND_CPU"?')
    assert texts[12] == "found 9, not a Kind; expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL"


def test_error_reads_as_one_line_for_each_problem() -> None:
    with pytest.raises(ConfigError, match="2:1") as caught:
        load('nam: "m"\nplatfrom: "x"', name="m", backends=BACKENDS, file="m/config.pbtxt")
    assert str(caught.value).splitlines() == [
        'm/config.pbtxt:1:1: nam: ModelConfig has no such field; did you mean "name"?',
        'm/config.pbtxt:2:1: platfrom: ModelConfig has no such field; did you mean "platform"?',
    ]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('name: "a" name: "b"', ":1:11: name: given twice, first on line 1"),
        ("max_batch_size: [ 1 ]", "found a list, but the field takes one value"),
        (
            "dynamic_batching { }\nsequence_batching { }",
            ':2:1: sequence_batching: only one of "dynamic_batching" (line 1) and "sequence_batching" may be given',
        ),
        ("version_policy { latest { } all { } }", 'only one of "latest" (line 1) and "all" may be given'),
        ('name: "m', ":1:7: name: this string is not closed on its line"),
        ("input [ {", '"{" is never closed: expected "}" before the end of file'),
        ("input [ { ]", ':1:11: input[0]: found "]", expected a field name or "}"'),
        ("input [ { } { } ]", 'found "{" in a list, expected "," or "]"'),
        ("max_batch_size 8", 'found "8" after "max_batch_size", expected ":" and a value or "{"'),
        ("max_batch_size: ", "found end of file, expected a value"),
        ("max_batch_size: }", 'found "}", expected a value'),
        ("[some.extension]: 3", 'found "[", expected a field name'),
        ("max_batch_size: 8.5", "found 8.5, expected int32"),
        ("max_batch_size: true", "found true, expected int32"),
        ("model_transaction_policy { decoupled: yes }", "found yes, expected true or false"),
        ("response_cache { enable: TRUE }", "found TRUE, expected true or false"),
        ("sequence_batching { direct { minimum_slot_utilization: half } }", "found half, expected a number"),
        ("model_warmup { batch_size: -1 }", "found -1, expected uint32, an integer from 0 to 4294967295"),
        ("metric_tags: 3", "found 3, expected { key: .. value: .. }"),
        ('metric_tags { key: 3 value: "x" }', "metric_tags[3]: found 3, expected a string in quotes"),
        ('metric_tags { key: "a" value: 3 }', 'metric_tags["a"]: found 3, expected a string in quotes'),
        (
            "dynamic_batching { priority_queue_policy { key: -1 } }",
            "priority_queue_policy[-1]: found -1, expected uint64",
        ),
        ("input { dims: 1e3 }", "input[0].dims[0]: found 1e3, expected int64"),
        ("input { data_type: FP16 }", 'did you mean "TYPE_FP16"?'),
        ("input { data_type: type_int8 }", 'did you mean "TYPE_INT8"?'),
        ("input { dim: 3 }", 'did you mean "dims"?'),
        ("maxBatchSize: 3", 'did you mean "max_batch_size"?'),
        ('"name": "m"', 'found "name", expected a field name'),
        ("\x00", 'found "\\x00", expected a field name'),
    ],
)
def test_texts_of_problems(text: str, wanted: str) -> None:
    assert wanted in only(text)


def test_the_key_of_an_entry_may_be_left_out() -> None:
    assert parse('metric_tags { value: "v" }').metric_tags == {"": "v"}
    dynamic = parse("dynamic_batching { priority_queue_policy { } }").dynamic_batching
    assert dynamic is not None
    assert list(dynamic.priority_queue_policy) == [0]


def test_text_format_as_it_is_written_in_the_field() -> None:
    """Colons, commas, brackets, comments, quotes: all the ways that existing files use."""
    text = """# a comment
    name : 'm'; max_batch_size: 0x10,
    input: [ { name: "a" "b", data_type: 11, dims: 010 dims: [ -1 ] } ]
    input < name: "c" >
    response_cache { enable: t }  model_transaction_policy { decoupled: 0 } # the end"""
    config = parse(text)
    assert config.name == "m"
    assert config.max_batch_size == 16
    assert [tensor.name for tensor in config.input] == ["ab", "c"]
    assert config.input[0].data_type == "TYPE_FP32"
    assert config.input[0].dims == (8, -1)
    assert config.response_cache is not None
    assert config.response_cache.enable
    assert parse("\ufeff".encode() + b'name: "m"').name == "m"


def test_a_key_given_twice_is_a_warning() -> None:
    text = (
        SMALL
        + 'parameters { key: "k" value { string_value: "1" } }\nparameters { key: "k" value { string_value: "2" } }'
    )
    loaded = load(text, name="m", backends=BACKENDS)
    assert loaded.config.parameters["k"].string_value == "2"
    assert loaded.warnings == (
        'config.pbtxt:7:19: parameters["k"]: given twice, first on line 6; the last one is used',
    )


# ------------------------------------------------------------------------------------------- fields not supported


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('runtime: "libx.so"', "runtime"),
        ("input { name: 'r' data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }", "input[1].is_shape_tensor"),
        ("model_repository_agents { }", "model_repository_agents"),
        ('model_operations { op_library_filename: "x.so" }', "model_operations.op_library_filename"),
        ('instance_group { profile: "1" }', "instance_group[0].profile"),
    ],
)
def test_what_could_change_an_answer_is_refused_by_name(text: str, path: str) -> None:
    found = [problem for problem in problems(SMALL + text) if problem.text.startswith("not supported: ")]
    assert [problem.path for problem in found] == [path]
    assert found[0].line == 6


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("optimization { cuda { graphs: true } }", "optimization.cuda.graphs"),
        ("optimization { input_pinned_memory { enable: false } }", "optimization.input_pinned_memory"),
        ('metric_tags { key: "a" value: "b" }', "metric_tags"),
    ],
)
def test_what_could_not_is_a_warning(text: str, path: str) -> None:
    loaded = load(SMALL + text, name="m", backends=BACKENDS)
    assert len(loaded.warnings) == 1
    assert re.fullmatch(rf"config\.pbtxt:6:\d+: {re.escape(path)}: has no effect: .+", loaded.warnings[0])


def test_what_is_off_needs_no_support() -> None:
    text = "model_transaction_policy { decoupled: false } response_cache { enable: false } model_operations { }"
    assert load(SMALL + text, name="m", backends=BACKENDS).warnings == ()


def test_refused_fields_and_broken_rules_come_together() -> None:
    paths = {problem.path for problem in problems(DYNAMIC)}
    assert paths >= {"name", "runtime", "input[0].is_shape_tensor", "instance_group[0].kind"}
    assert {problem.path for problem in problems(DIRECT)} >= {"backend"}


# ---------------------------------------------------------------------------------------------------- hostile texts


@pytest.mark.parametrize(
    "text",
    [
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
    ],
    ids=range(18),
)
def test_hostile_texts_are_a_clean_error(text: str) -> None:
    found = problems(text)
    assert 0 < len(found) <= LIMIT + 1
    assert sum(len(str(problem)) for problem in found) < 64 * 1024


def test_words_are_capped_before_protobuf_sees_them() -> None:
    assert f"more than {TOKENS} tokens" in only("input { } " * TOKENS)


def test_nesting_is_capped_before_protobuf_sees_it() -> None:
    assert f"nested deeper than {DEPTH} levels" in only("input{" * 1000)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'name: "m"\n\xff', "config.pbtxt:2:1: not UTF-8 text"),
        ("\n\n\ud800", "config.pbtxt:3:1: not UTF-8 text"),
        (b'name: "\\377"', "config.pbtxt"),
        ("x" * (CONFIG_BYTES + 1), f"{CONFIG_BYTES + 1} bytes, expected at most {CONFIG_BYTES}"),
    ],
)
def test_bytes_that_are_no_text(data: str | bytes, wanted: str) -> None:
    assert wanted in only(data)


def test_texts_have_no_control_characters() -> None:
    for problem in problems('name: "\\033[31m\\n" foo: 1\ninput { name: "\x1b" }'):
        assert str(problem).isprintable()
    for problem in problems(SMALL + 'instance_group { name: "\\n" } output { name: "a\\tb" }'):
        assert str(problem).isprintable()


_PIECES = sorted({token.text for text in ALL for token in tokens(text) if token.kind != "end"})


@QUICK
@given(st.one_of(st.text(), st.lists(st.sampled_from([*_PIECES, "\n", "-", "inf", "1.5f", "0x1F"])).map(" ".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert load(text, name="m", backends=BACKENDS).config.name == "m"


@QUICK
@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse(data)


@QUICK
@given(st.data())
def test_what_protobuf_takes_is_taken(data: st.DataObject) -> None:
    """Cut, double or exchange words of a good file: parse takes it exactly when protobuf alone does."""
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
        wanted = protos.to_config(message)
    except msgspec.ValidationError:
        # The number of an enum that has no such value: protobuf keeps it.
        with pytest.raises(ConfigError):
            parse(text)
    else:
        assert repr(parse(text)) == repr(wanted)


@QUICK
@given(messages(), st.booleans(), st.booleans())
def test_every_message_that_protobuf_prints_is_read(message: Any, as_utf8: bool, one_line: bool) -> None:
    text = text_format.MessageToString(message, as_utf8=as_utf8, as_one_line=one_line)
    assert repr(parse(text)) == repr(protos.to_config(message))


# ------------------------------------------------------------------------------------------------------ small parts


def test_outline_has_the_places() -> None:
    root = outline('a: 1\n  b { c: [ 2,\n "x" ] }')
    assert [(field.name.text, field.name.line, field.name.column) for field in root.fields] == [
        ("a", 1, 1),
        ("b", 2, 3),
    ]
    block = root.fields[1].values[0]
    assert isinstance(block, OutlineBlock)
    values = [value for value in block.fields[0].values if isinstance(value, Token)]
    assert [(token.text, token.line, token.column) for token in values] == [("2", 2, 12), ('"x"', 3, 2)]


@pytest.mark.parametrize(
    ("found", "near"),
    [
        ("preferred_batch_sizes", "preferred_batch_size"),
        ("PREFERRED_BATCH_SIZE", "preferred_batch_size"),
        ("queue_delay_microseconds", "max_queue_delay_microseconds"),
        ("zzz", None),
        ("x" * 1000, None),
    ],
)
def test_nearest(found: str, near: str | None) -> None:
    assert nearest(found, ["preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"]) == near
