"""The parameters for padding: what they mean, and what is said of those that are wrong, with the line."""

from __future__ import annotations

import pytest

from shmserve.core.policy import PaddingPolicy
from shmserve.repo.compile import compile_policy
from shmserve.repo.load import Setting, examine, load
from shmserve.repo.rules.padding import Padded, padding_of
from tests.support.repo.texts import BACKENDS

FILE = "m/config.pbtxt"
MODEL = """backend: "identity"
max_batch_size: 8
input [ { name: "ids" data_type: TYPE_INT8 dims: [ -1 ] }, { name: "fixed" data_type: TYPE_BOOL dims: [ 4 ] } ]
input { name: "pairs:0" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
input { name: "words" data_type: TYPE_STRING dims: [ -1 ] }
output [ { name: "tokens" data_type: TYPE_FP32 dims: [ -1, 64 ] }, { name: "text" data_type: TYPE_FP32 dims: [ 64 ] } ]
"""
BATCHES = "dynamic_batching { }\n"


def parameters(**given: str) -> str:
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in given.items()]
    return "".join(lines)


def problems(text: str) -> list[str]:
    return [str(problem) for problem in examine(text, FILE, Setting("m", BACKENDS, (), ())).problems]


def test_what_is_said_is_what_is_done() -> None:
    text = MODEL + BATCHES + parameters(padding="ids pairs:0[1]=-1e3 pairs:0[2] words=[PAD]")
    config = load(text, name="m", backends=BACKENDS).config
    found = padding_of(config)
    assert found is not None
    assert found.inputs == (Padded("ids", (0,)), Padded("pairs:0", (1, 2), "-1e3"), Padded("words", (0,), "[PAD]"))
    assert found.outputs == (Padded("tokens", (0,)),), "those that have one dim of -1"
    policy = compile_policy(config, 1)
    assert policy.padding == PaddingPolicy((("ids", (0,)), ("pairs:0", (1, 2)), ("words", (0,))), 64, 1, 128)


def test_all_that_can_be_said() -> None:
    given = parameters(
        padding="ids=-7", padding_outputs="", padding_lookahead="9", padding_multiple="8", padding_batch_cost="0"
    )
    config = load(MODEL + BATCHES + given, name="m", backends=BACKENDS).config
    found = padding_of(config)
    assert found is not None
    assert found.outputs == (), "none is cut back"
    assert compile_policy(config, 1).padding == PaddingPolicy((("ids", (0,)),), 9, 8, 0)
    assert padding_of(load(MODEL, name="m", backends=BACKENDS).config) is None


HERE = '8:12: parameters["padding"]: '


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"padding": ""}, HERE + "is empty, expected the inputs to pad"),
        ({"padding": "idx"}, HERE + '"idx" is not an input; did you mean "ids"?'),
        ({"padding": "ids ids"}, HERE + '"ids" is named twice'),
        ({"padding": "pairs:0[1]=1 pairs:0[2]=2"}, HERE + '"pairs:0" is named twice'),
        ({"padding": "=5"}, HERE + 'found "=5", expected NAME, NAME=VALUE, NAME[AXIS] or NAME[AXIS]=VALUE'),
        ({"padding": "pairs:0[0]"}, HERE + 'axis 0 of input "pairs:0" can differ in length: expected a dim of -1'),
        ({"padding": "ids[5]"}, HERE + 'axis 5 of input "ids" can differ'),
        ({"padding": "fixed"}, HERE + 'no axis of input "fixed" can differ in length'),
        ({"padding": "ids=128"}, HERE + '"128" is not a value of input "ids", which is TYPE_INT8'),
        ({"padding": "ids=x"}, HERE + '"x" is not a value of input "ids"'),
        (
            {"padding": "ids", "padding_outputs": "text"},
            '9:12: parameters["padding_outputs"]: no axis of output "text"',
        ),
        ({"padding": "ids", "padding_outputs": "token"}, '"token" is not an output; did you mean "tokens"?'),
        ({"padding": "ids", "padding_outputs": "tokens=1"}, 'output "tokens" has a value, "1"; only inputs have one'),
        ({"padding": "ids", "padding_lookahead": "0"}, 'found "0", expected an integer from 1 to 4096'),
        ({"padding": "ids", "padding_multiple": "8.5"}, 'found "8.5", expected an integer from 1 to'),
        ({"padding_multiple": "8"}, 'parameters["padding_multiple"]: has no effect without the parameter "padding"'),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, str], text: str) -> None:
    found = problems(MODEL + BATCHES + parameters(**given))
    assert any(text in problem for problem in found), found


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (MODEL, 'parameters["padding"]: needs dynamic_batching: only requests that share a batch are padded'),
        (MODEL.replace(": 8", ": 0") + BATCHES, "needs max_batch_size > 0, found 0"),
        (MODEL.replace("-1, 64", "-1, -1") + BATCHES, 'output[0].dims: "tokens" has several dims of -1; name the'),
        (MODEL.replace("dims: [ -1 ] },", "dims: [ -1 ] allow_ragged_batch: true },") + BATCHES, "has allow_ragged_b"),
        (
            MODEL.replace("[ -1 ] },", "[ -1 ] reshape { shape: [ -1, 1 ] } },") + BATCHES,
            "has a reshape, and cannot be",
        ),
    ],
)
def test_models_that_cannot_be_padded(model: str, text: str) -> None:
    found = problems(model + parameters(padding="ids"))
    assert any(text in problem for problem in found), found


def test_what_only_the_model_knows_is_checked_once_it_has_said_it() -> None:
    unknown = 'backend: "onnxruntime"\ninput { name: "ids" data_type: TYPE_INT8 dims: [ -1 ] }\n'
    assert problems(unknown + parameters(padding="ids")) == []
