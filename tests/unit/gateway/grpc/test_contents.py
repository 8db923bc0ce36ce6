"""Large typed contents are decoded in slices. The result equals protobuf's, or is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.gateway.grpc import contents
from shmserve.gateway.grpc.plans import RpcPlan, plan_in_slices, plan_of
from shmserve.gateway.limits.turns import SLICE_BYTES
from shmserve.protocol.grpc.messages import message_class
from tests.support.gateway.sliced_work import finished, slices_of
from tests.support.hypothesis_profiles import examples

REQUEST = message_class("inference.ModelInferRequest")


def request(*inputs: tuple[str, str, list[Any]], **more: Any) -> bytes:
    made = REQUEST(model_name="m", id="me", **more)
    for number, (dtype, field, values) in enumerate(inputs):
        one = made.inputs.add(name=f"i{number}", datatype=dtype, shape=[len(values)])
        getattr(one.contents, field).extend(values)
    data: bytes = made.SerializeToString()
    return data


def tensors(plan: RpcPlan) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(spec.name, spec.dtype, spec.shape, bytes(spec.data or b"")) for spec in plan.plan.inputs]


KINDS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "BOOL": ("bool_contents", st.booleans()),
    "INT8": ("int_contents", st.integers(-(2**31), 2**31 - 1) | st.integers(-128, 127)),
    "INT32": ("int_contents", st.integers(-(2**31), 2**31 - 1)),
    "INT64": ("int64_contents", st.integers(-(2**63), 2**63 - 1)),
    "UINT16": ("uint_contents", st.integers(0, 2**16 - 1)),
    "UINT64": ("uint64_contents", st.integers(0, 2**64 - 1)),
    "FP32": ("fp32_contents", st.floats(width=32)),
    "FP64": ("fp64_contents", st.floats()),
    "BYTES": ("bytes_contents", st.binary(max_size=300)),
}


@pytest.mark.parametrize("size", [16, SLICE_BYTES])
@settings(max_examples=examples(60))
@given(data=st.data())
def test_slices_give_the_plan_of_protobuf(monkeypatch: pytest.MonkeyPatch, size: int, data: st.DataObject) -> None:
    monkeypatch.setattr(contents, "SLICE_BYTES", size)
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=3))
    text = request(*[(kind, KINDS[kind][0], data.draw(st.lists(KINDS[kind][1], max_size=30))) for kind in kinds])
    try:
        whole = plan_of(text)
    except InvalidRequest:
        with pytest.raises(InvalidRequest, match="does not fit"):
            finished(plan_in_slices(text))
        return
    cut = finished(plan_in_slices(text))
    assert tensors(cut) == tensors(whole)
    assert (cut.model, cut.raw, cut.contents) == (whole.model, whole.raw, whole.contents)


@settings(max_examples=examples(100))
@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_give_the_plan_of_protobuf_or_are_refused(noise: bytes, place: int) -> None:
    text = request(("INT32", "int_contents", [1, -1, 300]), ("BYTES", "bytes_contents", [b"ab", b""]))
    for damaged in (text[:place] + noise + text[place:], text[:place] + noise, noise):
        try:
            found = finished(plan_in_slices(damaged))
        except InvalidRequest:
            continue
        assert tensors(found) == tensors(plan_of(damaged))


def test_contents_of_another_type_are_refused() -> None:
    for dtype, field in (("FP32", "int_contents"), ("INT8", "uint_contents"), ("BYTES", "int_contents")):
        with pytest.raises(InvalidRequest, match=f"{field} has some"):
            finished(plan_in_slices(request((dtype, field, [1]))))
    with pytest.raises(InvalidRequest, match="use raw_input_contents"):
        finished(plan_in_slices(request(("FP16", "fp32_contents", [1]))))


def test_the_elements_of_a_slice_are_limited() -> None:
    for dtype, values in (("INT8", [1] * 500_000), ("BYTES", [b""] * 250_000)):
        text = request((dtype, KINDS[dtype][0], values))
        assert slices_of(plan_in_slices(text)) >= len(text) // SLICE_BYTES


def test_the_bytes_and_fields_that_protobuf_parses_are_limited() -> None:
    parameters = {f"p{number}": {"string_param": "x" * 1000} for number in range(2000)}
    with pytest.raises(InvalidRequest, match="in addition to its tensors"):
        finished(plan_in_slices(request(("FP32", "fp32_contents", [1.0]), parameters=parameters)))
    with pytest.raises(InvalidRequest, match="more than 4096 fields"):
        finished(plan_in_slices(b"\x28\x01" * 5000))
