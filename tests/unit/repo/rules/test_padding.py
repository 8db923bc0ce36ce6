"""The meaning of the parameters for padding. Invalid ones are in `broken`; see test_broken."""

from __future__ import annotations

from shmserve.core.policy import PaddingPolicy
from shmserve.repo.compile import compile_policy
from shmserve.repo.load import ModelContext, examine
from shmserve.repo.rules.padding import Padded, Padding, padding_of
from tests.support.model_files import parameters
from tests.support.repo.texts import BACKENDS

MODEL = """backend: "identity"
max_batch_size: 8
dynamic_batching { }
input [ { name: "ids" data_type: TYPE_INT8 dims: [ -1 ] }, { name: "fixed" data_type: TYPE_BOOL dims: [ 4 ] } ]
input { name: "pairs:0" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
input { name: "words" data_type: TYPE_STRING dims: [ -1 ] }
output [ { name: "tokens" data_type: TYPE_FP32 dims: [ -1, 64 ] }, { name: "text" data_type: TYPE_FP32 dims: [ 64 ] } ]
"""


def padded(**given: str) -> tuple[Padding | None, PaddingPolicy | None]:
    config = examine(MODEL + parameters(**given), "config.pbtxt", ModelContext("m", BACKENDS)).require()
    return padding_of(config), compile_policy(config, 1).padding


def test_axes_values_and_defaults() -> None:
    padding, policy = padded(padding="ids pairs:0[1]=-1e3 pairs:0[2] words=[PAD]")
    assert padding is not None
    assert padding.inputs == (Padded("ids", (0,)), Padded("pairs:0", (1, 2), "-1e3"), Padded("words", (0,), "[PAD]"))
    assert padding.outputs == (Padded("tokens", (0,)),), "those that have one dim of -1"
    assert policy == PaddingPolicy((("ids", (0,)), ("pairs:0", (1, 2)), ("words", (0,))), 64, 1, 128)
    numbers = {"padding_lookahead": "9", "padding_multiple": "8", "padding_batch_cost": "0"}
    padding, policy = padded(padding="ids=-7", padding_outputs="", **numbers)
    assert padding is not None
    assert padding.outputs == ()
    assert policy == PaddingPolicy((("ids", (0,)),), 9, 8, 0)
    assert padded() == (None, None)
