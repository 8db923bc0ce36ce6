"""The checks of a request, and the error texts, which are Triton's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.policy import ModelPolicy, TensorSpec
from shmserve.core.service.validation import Checker
from shmserve.dtypes import ITEM_BYTES
from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import FIELD_BYTES, Handle, Tensor, Wanted
from tests.support.cases import cases

NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape."
)


def checker(max_batch: int = 8, *inputs: TensorSpec, outputs: str = "y") -> Checker:
    named = tuple(TensorSpec(name, "FP32", (-1,)) for name in outputs.split())
    return Checker(ModelPolicy("m", 1, max_batch, inputs or (TensorSpec("INPUT0", "FP32", (16,)),), named))


def tensor(
    name: str = "INPUT0", shape: tuple[int, ...] = (1, 16), dtype: str = "FP32", size: int | None = None
) -> Tensor:
    count = 1
    for dim in shape:
        count *= dim
    return Tensor(name, dtype, shape, bytes(count * ITEM_BYTES[dtype] if size is None else size))


def refused(one: Checker, *tensors: Tensor, outputs: Any = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        one.check(tensors, outputs)
    return caught.value.message


ONE = TensorSpec("INPUT0", "FP32", (16,))
TWO = (ONE, TensorSpec("INPUT1", "FP32", (16,)))
THREE = (*TWO, TensorSpec("INPUT2", "FP32", (16,)))
FOUR = (*THREE, TensorSpec("INPUT3", "FP32", (16,), optional=True))
EIGHT = TensorSpec("INPUT0", "FP32", (8,))
STRINGS = TensorSpec("INPUT1", "BYTES", (16,))
MANY = tuple(TensorSpec(f"x{n}", "UINT8", (4096,)) for n in range(17))
HUGE = (1, 2**63 - 1, 2**63 - 1, 2**63 - 1)
SHAPE = "unexpected shape for input 'INPUT0' for model 'm'. Expected "
SIZE = "input byte size mismatch for input 'INPUT0' for model 'm'. Expected 32, got 40"


@cases(
    (
        THREE,
        [tensor()],
        "expected 3 inputs but got 1 inputs for model 'm'. Got input(s) ['INPUT0'], but missing required input(s) "
        "['INPUT1','INPUT2']. Please provide all required input(s).$",
    ),
    # Before errors in other inputs
    (TWO, [tensor(dtype="FP64")], "expected 2 inputs but got 1 inputs for model 'm'"),
    (
        FOUR,
        [],
        "expected number of inputs between 3 and 4 but got 0 inputs for model 'm'. Got input(s) [], but missing "
        "required input(s) ['INPUT0','INPUT1','INPUT2']",
    ),
    (
        TWO,
        [tensor(), tensor("INPUT1"), tensor("x")],
        "unexpected inference input 'x', allowed inputs are: INPUT0, INPUT1",
    ),
    (TWO, [tensor(), tensor()], "input 'INPUT0' already exists in request to model 'm'$"),
    ([ONE], [tensor(shape=(1, 17))], f"{SHAPE}[-1,16], got [1,17].$"),
    ([ONE], [tensor(shape=(16,))], f"{SHAPE}[-1,16], got [16].{NOTE}$"),
    (
        [TensorSpec("INPUT0", "FP32", (-1, -1))],
        [Tensor("INPUT0", "FP32", (1, -4, -4), bytes(64))],
        "input 'INPUT0' for model 'm' has shape [1,-4,-4]: no dimension can be negative$",
    ),
    ([ONE], [tensor(shape=(9, 16))], "inference request batch-size must be <= 8 for 'm'"),
    (
        TWO,
        [tensor(shape=(2, 16)), tensor("INPUT1", shape=(3, 16))],
        "input 'INPUT1' batch size does not match other inputs for 'm'",
    ),
    ([EIGHT], [tensor(shape=(1, 8), size=40)], f"{SIZE}$"),
    ([EIGHT], [Tensor("INPUT0", "FP32", (1, 8), (Handle(5, 0, 20), Handle(5, 64, 20)))], f"{SIZE}$"),
    (
        [STRINGS],
        [tensor("INPUT1", dtype="BYTES", size=56)],
        "expected 16 string elements for inference input 'INPUT1' for model 'm', which take at least 64 bytes, got "
        "56 bytes$",
    ),
    (
        [TensorSpec("x", "BYTES", (-1,))],
        [tensor("x", (1, 0), "BYTES", 3)],
        "expected 0 string elements for inference input 'x'",
    ),
    ([ONE], [Tensor("INPUT0", "FP32", (1, 16), 7)], "input 'INPUT0' refers to frame 7"),
    ([TensorSpec("x", "FP64", (-1, -1, -1))], [Tensor("x", "FP64", HUGE, b"")], "more than any memory can hold"),
    ([TensorSpec("x", "BYTES", (-1,))], [Tensor("x", "BYTES", (1, 2**62), b"")], "more than any memory can hold"),
    (MANY, [tensor(f"x{n}", (1, 4096), "UINT8") for n in range(17)], str(FIELD_BYTES)),
)
def test_invalid_inputs_are_refused(inputs: Any, tensors: list[Tensor], text: str) -> None:
    """`text`: a part of the error; with $, all of it."""
    found = refused(checker(8, *inputs), *tensors)
    assert found == text[:-1] if text.endswith("$") else text in found


@pytest.mark.parametrize("dtype", ["INT32", "", "fp32", "FLOAT", "\0", "INT128"])
def test_an_input_of_another_type_is_refused(dtype: str) -> None:
    expected = f"inference input 'INPUT0' data-type is '{dtype}', but model 'm' expects 'FP32'"
    assert refused(checker(), Tensor("INPUT0", dtype, (1, 16), bytes(64))) == expected


def test_a_shape_without_a_batch_dimension_is_refused() -> None:
    assert refused(checker(0), tensor(shape=(17,))) == f"{SHAPE}[16], got [17]."


def test_valid_sizes_of_strings_and_of_empty_tensors() -> None:
    for size in (64, 65, 4000):
        assert checker(8, STRINGS).check((tensor("INPUT1", dtype="BYTES", size=size),), None)[0] == 1
    strings = checker(8, TensorSpec("INPUT1", "BYTES", (-1,)))
    assert strings.check((tensor("INPUT1", (1, 0), "BYTES", 0),), None) == (1, (("INPUT1", (0,)),), 0, False, 0)
    empty = checker(8, TensorSpec("x", "FP64", (-1, -1, -1)))
    assert empty.check((Tensor("x", "FP64", (1, 2**63 - 1, 0, 2**63 - 1), b""),), None)[0] == 1


def test_unknown_and_repeated_outputs_are_refused() -> None:
    one = checker(outputs="y w")
    unexpected = "unexpected inference output 'z' for model 'm', its outputs are: w, y"
    assert refused(one, tensor(), outputs=(Wanted("z"),)) == unexpected
    assert refused(one, tensor("other"), outputs=(Wanted("z"),)) == unexpected, "outputs first"
    repeated = refused(one, tensor(), outputs=(Wanted("y"), Wanted("y")))
    assert repeated == "output 'y' already exists in request to model 'm'"
    for outputs in ((Wanted("w"), Wanted("y")), ()):
        assert one.check((tensor(),), outputs) == (1, None, 64, False, 0)
    assert one.check((tensor(),), (Wanted("w", Handle(1, 2, 3)),))[3]


def test_scalars_and_models_without_batches() -> None:
    one = checker(0, TensorSpec("x", "INT64", ()), TensorSpec("z", "BOOL", (3,)))
    assert one.check((tensor("x", (), "INT64"), tensor("z", (3,), "BOOL")), None) == (0, None, 11, False, 0)


DIMS = st.lists(st.sampled_from([-1, 0, 1, 3]), max_size=3).map(tuple)


@given(
    dims=DIMS,
    shape=st.lists(st.integers(-1, 9), max_size=4).map(tuple),
    max_batch=st.sampled_from([0, 4]),
    dtype=st.sampled_from(["FP32", "UINT8", "FP64"]),
    off=st.sampled_from([0, 0, 0, 1]),
)
def test_exactly_the_valid_tensors_are_accepted(
    dims: tuple[int, ...], shape: tuple[int, ...], max_batch: int, dtype: str, off: int
) -> None:
    size = ITEM_BYTES[dtype]
    for dim in shape:
        size *= dim
    one = checker(max_batch, TensorSpec("x", dtype, dims))
    whole = (-1, *dims) if max_batch else dims
    good = len(whole) == len(shape) and all(want in (-1, got) for want, got in zip(whole, shape, strict=True))
    good = good and min(shape, default=0) >= 0 and not (max_batch and shape[0] > max_batch) and not off
    made = Tensor("x", dtype, shape, bytes(max(0, size) + off))
    for _ in range(2):  # the second time from the cache
        try:
            rows, _, inline, in_shared_memory, _ = one.check((made,), None)
        except InvalidRequest:
            assert not good
        else:
            assert good
            assert (rows, inline, in_shared_memory) == (shape[0] if max_batch else 0, size, False)


def test_the_cache_of_valid_shapes_is_bounded() -> None:
    one = checker(8, TensorSpec("x", "FP32", (-1, -1)))
    for a, b in itertools.product(range(1, 81), range(1, 81)):
        one.check((Tensor("x", "FP32", (1, a, b), (Handle(1, 0, 4 * a * b),)),), None)
    assert len(one._valid_inputs) == 4096  # noqa: SLF001 - only memory would show it
