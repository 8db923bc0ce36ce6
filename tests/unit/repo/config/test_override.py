"""A configuration as JSON: protobuf's own JSON reader is the oracle, and nothing but ConfigError comes out."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.repo.config import protos
from shmserve.repo.config.outline import DEPTH, TOKENS
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.problems import CONFIG_BYTES, LIMIT, ConfigError, Problem
from shmserve.repo.config.schema import ModelConfig, as_triton_json
from shmserve.repo.load import parse
from shmserve.repo.storage.store import scan_model
from tests.support.hypothesis_profiles import examples
from tests.support.repo.messages import messages
from tests.support.repo.texts import ALL, BACKENDS, SMALL

QUICK = settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))


def read(data: str | bytes | dict[str, Any]) -> ModelConfig:
    text = json.dumps(data) if isinstance(data, dict) else data
    return protos.to_config(parse_override(text).message)


def problems(data: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_override(data if isinstance(data, (str, bytes)) else json.dumps(data))
    return caught.value.problems


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("text", [SMALL, *ALL])
def test_what_is_shown_of_a_configuration_is_read_again(text: str) -> None:
    config = parse(text)
    assert read(as_triton_json(config)) == config


@QUICK
@given(messages(), st.booleans(), st.booleans(), st.booleans())
def test_what_protobuf_writes_is_read(message: Any, snake: bool, defaults: bool, numbers: bool) -> None:
    text = json_format.MessageToJson(
        message,
        preserving_proto_field_name=snake,
        always_print_fields_with_no_presence=defaults,
        use_integers_for_enums=numbers,
    )
    assert parse_override(text).message == json_format.Parse(text, protos.new_config())


def test_the_form_of_tritons_callers() -> None:
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


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"max_batchsize": 8}, 'max_batchsize: ModelConfig has no such field; did you mean "max_batch_size"?'),
        ({"input": [{"dim": [1]}]}, 'input[0].dim: ModelInput has no such field; did you mean "dims"?'),
        ({"input": [{}, {"dims": [1, "x"]}]}, 'input[1].dims[1]: found "x", expected int64, an integer from -92'),
        ({"input": [{"dims": 3}]}, "input[0].dims: found 3, expected a list in [ ]"),
        ({"input": {"name": "x"}}, "input: found { }, expected a list in [ ]"),
        ({"input": [3]}, "input[0]: found 3, expected { } with the fields name, data_type, format, dims, .."),
        ({"input": [None]}, "input[0]: found null, expected { }"),
        ({"input": [{"data_type": "TYPE_FP23"}]}, 'found "TYPE_FP23", not a DataType; did you mean "TYPE_FP32"?'),
        ({"input": [{"data_type": 77}]}, "input[0].data_type: found 77, expected one of TYPE_INVALID, "),
        ({"input": [{"data_type": True}]}, "input[0].data_type: found true, expected one of TYPE_INVALID, "),
        ({"max_batch_size": 2**31}, "max_batch_size: found 2147483648, expected int32, an integer from"),
        ({"max_batch_size": 1.5}, "max_batch_size: found 1.5, expected int32"),
        ({"max_batch_size": True}, "max_batch_size: found true, expected int32"),
        ({"max_batch_size": " 8"}, 'max_batch_size: found " 8", expected int32'),
        ({"max_batch_size": [8]}, "max_batch_size: found [ ], expected int32"),
        ({"max_batch_size": "9" * 30}, "expected int32"),
        ({"response_cache": {"enable": "true"}}, 'response_cache.enable: found "true", expected true or false'),
        ({"response_cache": {"enable": 1}}, "response_cache.enable: found 1, expected true or false"),
        ({"response_cache": True}, "response_cache: found true, expected { } with the fields enable"),
        ({"version_policy": {"all": 1}}, "version_policy.all: found 1, expected { } with nothing in it"),
        ({"name": 5}, "name: found 5, expected a string in quotes"),
        ({"metric_tags": {"a": 1}}, 'metric_tags["a"]: found 1, expected a string in quotes'),
        ({"metric_tags": [1]}, 'metric_tags: found [ ], expected { "key": value, .. }'),
        ({"parameters": {"a": "b"}}, 'parameters["a"]: found "b", expected { } with the fields string_value'),
        ({"dynamic_batching": {"priority_queue_policy": {"x": {}}}}, "priority_queue_policy[x]: found "),
        (
            {"dynamic_batching": {}, "sequence_batching": {}},
            'only one of "dynamic_batching" and "sequence_batching" ma',
        ),
        ('{"name": "a", "name": "b"}', "name: given twice"),
        ('{"max_batch_size": 1, "maxBatchSize": 2}', "max_batch_size: given twice"),
        ('{"metric_tags": {"a": "1", "a": "2"}}', 'metric_tags["a"]: given twice'),
        (
            '{"dynamic_batching": {"priority_queue_policy": {"1": {}, "01": {}}}}',
            "priority_queue_policy[01]: given twi",
        ),
        ('{"name": "\\ud800"}', 'name: found "\\ud800", expected a string in quotes'),
        ("[]", "found [ ], expected { } with the fields of a ModelConfig"),
        ("null", "found null, expected { } with the fields of a ModelConfig"),
        ("", "config override:1:1: not JSON: Expecting value"),
        ('{"name": "a",\n}', "config override:2:1: not JSON: "),
        ("{'name': 1}", "config override:1:2: not JSON: "),
        ('{"name": "a"} x', "not JSON: Extra data"),
        ('{"max_batch_size": NaN}', "NaN is not a JSON number; write it in quotes"),
        ('{"max_batch_size": 1' + "0" * 10_000 + "}", "invalid JSON"),
        (b'{"name": "\xff"}', "config override:1:1: not UTF-8 text"),
        ("[" * CONFIG_BYTES, f"nested deeper than {DEPTH} levels"),
        ('{"a":' * 1000, f"nested deeper than {DEPTH} levels"),
        ('{"input": [' + "{}," * TOKENS + "{}]}", f"more than {TOKENS} values"),
        (" " * (CONFIG_BYTES + 1), f"{CONFIG_BYTES + 1} bytes, expected at most {CONFIG_BYTES}"),
        (
            {"sequence_batching": {"direct": {"minimum_slot_utilization": 1e39}}},
            "minimum_slot_utilization: found 1e+39, expected a number",
        ),
        ({"sequence_batching": {"direct": {"minimum_slot_utilization": "half"}}}, 'found "half", expected a number'),
    ],
)
def test_what_is_wrong_is_named(data: Any, wanted: str) -> None:
    found = [str(problem) for problem in problems(data)]
    assert len(found) == 1, found
    assert wanted in found[0]
    assert found[0].startswith("config override:")
    assert found[0].isprintable()


def test_all_problems_at_once() -> None:
    found = problems({"nam": "x", "input": [{"dims": [1.5]}, {"data_type": "FP99"}], "output": [{"name": 1}]})
    assert [problem.path for problem in found] == ["nam", "input[0].dims[0]", "input[1].data_type", "output[0].name"]
    many = problems({"input": [{"dims": ["x"] * 1000}]})
    assert len(many) == LIMIT + 1
    assert many[-1].text == f"and {1000 - LIMIT} more problems"


_KEYS = [field.name for field in protos.CONFIG.fields] + ["name", "dims", "data_type", "kind", "latest", "x", "é"]
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.sampled_from(["TYPE_FP32", "8", "-1", "NaN"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.text()), inner, max_size=4)
    ),
    max_leaves=12,
)


@QUICK
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=5))
def test_any_json_is_read_as_protobuf_reads_it_or_refused(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    try:
        message = parse_override(text).message
    except ConfigError:
        return
    # Enums in any case are ours.
    with contextlib.suppress(json_format.ParseError):
        assert message == json_format.Parse(text, protos.new_config())


@QUICK
@given(st.one_of(st.binary(), st.text(), st.text(alphabet='{}[]":,0123456789.eE+-\\ntrue')))
def test_any_bytes_are_read_or_refused(data: bytes | str) -> None:
    with contextlib.suppress(ConfigError):
        parse_override(data)


# ----------------------------------------------------------------------------------------------- in place of a file


def test_an_override_is_taken_instead_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    (path / "1").mkdir(parents=True)
    (path / "config.pbtxt").write_text("this is not even a configuration")
    override = parse_override(json.dumps(as_triton_json(parse(SMALL + "instance_group { count: 3 }"))))
    found = scan_model(path, backends=BACKENDS, override=override)
    assert found.problems == ()
    assert found.file == "override"
    assert found.config is not None
    assert found.config.instance_group[0].count == 3
    assert found.given == parse(SMALL + "instance_group { count: 3 }")


def test_an_override_keeps_the_rules_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    (path / "1").mkdir(parents=True)
    plain = as_triton_json(parse(SMALL)) | {"name": "other", "runtime": "x.so", "metric_tags": {"a": "b"}}
    plain["input"][0]["dims"] = [0]
    found = scan_model(path, backends=BACKENDS, override=parse_override(json.dumps(plain)))
    assert found.problems == (
        "config override: runtime: not supported: only the backend's own library can be loaded",
        'config override: name: unexpected directory name "m" for model "other": the two must be equal',
        "config override: input[0].dims[0]: found 0, expected 1 or more, or -1 for any size",
    )
    assert found.warnings == (
        "config override: metric_tags: has no effect: metrics do not have model-specific labels yet",
    )
