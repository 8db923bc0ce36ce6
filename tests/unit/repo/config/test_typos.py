"""Slips of the pen in a file: each has its place, and says what was meant."""

from __future__ import annotations

import pytest

from tests.unit.repo.rules.test_schedulers import FILE, MODEL, problems


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        # a field
        ("max_batchsize: 8", '5:1: max_batchsize: ModelConfig has no such field; did you mean "max_batch_size"?'),
        ("dynamic_batching { max_queue_delay: 5 }", 'did you mean "max_queue_delay_microseconds"?'),
        ("instance_groups { }", 'did you mean "instance_group"?'),
        (
            "optimization { grahp { } }",
            "5:16: optimization.grahp: ModelOptimizationPolicy has no such field; did you mea",
        ),
        # the value of an enum
        (
            "instance_group { kind: KIND_CPUS }",
            "5:24: instance_group[0].kind: found KIND_CPUS, not a Kind; did you mean",
        ),
        (
            "input { data_type: TYPE_FLOAT32 }",
            '[1].data_type: found TYPE_FLOAT32, not a DataType; did you mean "TYPE_FP32',
        ),
        ("input { data_type: TYPE_BYTES }", 'did you mean "TYPE_STRING"?'),
        ("input { data_type: TYPE_INT_8 }", 'did you mean "TYPE_INT8"?'),
        (
            'input { data_type: "TYPE_FP32" }',
            '5:20: input[1].data_type: found "TYPE_FP32", expected TYPE_FP32 without q',
        ),
        ("input { data_type: 77 }", "5:20: input[1].data_type: found 77, not a DataType; expected one of TYPE_INVALID"),
        ("input { format: FORMAT_NWHC }", 'not a Format; did you mean "FORMAT_NHWC"?'),
        # a list of dims
        ("input { dims: [ 3, 244, x244 ] }", "5:25: input[1].dims[2]: found x244, expected int64, an integer from"),
        ("input { dims: [ 3, 244 244 ] }", '5:24: input[1].dims: found "244" in a list, expected "," or "]"'),
        ("input { dims: [ 3, 244, ] }", '5:25: input[1].dims: found "]", expected a value'),
        ("input { dims: [ 3, 244 }", '5:24: input[1].dims: found "}" in a list, expected "," or "]"'),
        ("input { dims: 3, 244 }", '5:18: input[1]: found "244", expected a field name or "}"'),
        ("input { dims: [ 3, 2.44 ] }", "5:20: input[1].dims[1]: found 2.44, expected int64"),
        ('input { dims: [ "3" ] }', '5:17: input[1].dims[0]: found "3", expected int64, an integer'),
        ("input { data_type: TYPE_FP32, dims: 3 244 }", "; write several values as a list: [ 1, 2 ]"),
        ("input { dims: ( 3 ) }", '5:15: input[1].dims: found "(", expected a value'),
        # an entry of a map
        ('parameters { kye: "k" value { } }', '.kye: a map entry has no such field; did you mean "key"?'),
        (
            'parameters { key: "k" valeu { } }',
            '5:23: parameters["k"].valeu: a map entry has no such field; did you mean',
        ),
        ('parameters { key: "k" value: "v" }', 'expected a block in { }, as in { string_value: "v" }'),
        (
            'parameters { key: "k" value { string_val: "v" } }',
            'parameters["k"].string_val: ModelParameter has no such f',
        ),
        ("parameters { key: k value { } }", '5:19: parameters[k]: found k, expected a string in quotes; write "k"'),
        ('parameters { "k": "v" }', '5:14: parameters: found "k", expected a field name or "}"'),
        ("parameters: 3", "5:13: parameters: found 3, expected { key: .. value: .. }"),
        (
            'metric_tags { key: "a" value: 1 }',
            '5:31: metric_tags["a"]: found 1, expected a string in quotes; write',
        ),
        # a bool, a number, a string
        (
            "response_cache { enable: ture }",
            "5:26: response_cache.enable: found ture, expected true or false; did you m",
        ),
        (
            'response_cache { enable: "true" }',
            '.enable: found "true", expected true or false; write true without quotes',
        ),
        ("response_cache { enable: yes }", "response_cache.enable: found yes, expected true or false"),
        (
            'instance_group { count: "2" }',
            '5:25: instance_group[0].count: found "2", expected int32, an integer fro',
        ),
        ('instance_group { count: "2" }', "write 2 without quotes"),
        ("instance_group { count: two }", "5:25: instance_group[0].count: found two, expected int32"),
        (
            "instance_group { count: 99999999999 }",
            "found 99999999999, expected int32, an integer from -2147483648 to",
        ),
        (
            "default_model_filename: model.onnx",
            '5:30: found ".", expected a field name; strings need quotes',
        ),
        ("metric_tags { key: 'a' value: 'b }", "5:31: metric_tags.value: this string is not closed on its line"),
        ("output { name: 5 }", '5:16: output[1].name: found 5, expected a string in quotes; write "5"'),
    ],
)
def test_a_typo_is_found_with_its_place_and_what_was_meant(line: str, wanted: str) -> None:
    found = problems(MODEL + line)
    assert any(wanted in problem for problem in found), found
    assert all(problem.startswith(f"{FILE}:5:") for problem in found), found
