"""Requests and responses of the generate extension, compared with numpy and the module `json`; and forms, as the
standard library and curl write them, and broken ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from email.message import EmailMessage
from email.policy import HTTP
from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.answers import Held
from shmserve.gateway.kserve.forms import FIELD_BYTES, Form, form_of
from shmserve.gateway.kserve.generate import GenerateForm, GenerateRequest, event, generated, generated_in_slices
from shmserve.gateway.kserve.plans import InputPlan, RequestOptions, RequestPlan
from shmserve.gateway.limits.turns import COPY_BYTES, SLICE_BYTES
from shmserve.gateway.upstream.documents import error_body
from shmserve.protocol.messages import Handle, Part, Tensor
from shmserve.shm.strings import decode_bytes
from tests.support.cases import cases
from tests.support.gateway.sliced_work import finished, slices_of

LINES = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n'


def read(body: bytes) -> Form:
    return finished(form_of(body))


def written(parts: Iterable[tuple[str, bytes, str | None]]) -> bytes:
    message = EmailMessage(HTTP)
    message.add_header("Content-Type", "multipart/form-data")
    for name, value, filename in parts:
        part = EmailMessage(HTTP)
        part.set_content(value, "application", "octet-stream", cte="binary")
        more = {} if filename is None else {"filename": filename}
        del part["Content-Disposition"]
        part.add_header("Content-Disposition", "form-data", name=name, **more)
        message.attach(part)
    return bytes(message).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("size", [0, 1, COPY_BYTES - 40, COPY_BYTES, 3 * COPY_BYTES + 5])
def test_fields_and_files(size: int) -> None:
    """The boundary may be at any place, also at the end of what is searched at once."""
    content = b"\r\n--" * (size // 4) + b"-" * (size % 4)
    body = written([("a", "ü".encode(), None), ("f", content, "ä b.wav"), ("l[]", b"1", None), ("l[]", b"2", None)])
    found = read(body)
    assert found.fields == {"a": "ü", "l[]": ["1", "2"]}
    assert {name: list(map(bytes, files)) for name, files in found.files.items()} == {"f": [content]}


@cases(
    (b"", "does not begin with a boundary"),
    (b'{"model": "m"}', "does not begin with a boundary"),
    (b"--" + b"x" * 100 + b"\r\n", "does not begin with a boundary"),
    (LINES[:-7], "last boundary is missing"),
    (LINES.replace(b"name", b"nome"), "has no name"),
    (LINES.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * 5000 + b"\r\n\r\n"), "headers that are too long"),
    (LINES.replace(b"\r\n1", b"\r\n\xff"), "the field 'a' of the form is not UTF-8"),
    (LINES[:-7] * 65 + b"--x--", "more than 64 parts"),
    (LINES.replace(b"\r\n1", b"\r\n" + b"1" * (FIELD_BYTES + 1)), f"'a' of the form has {FIELD_BYTES + 1} bytes"),
)
def test_broken_forms(body: bytes, text: str) -> None:
    assert read(LINES).fields == {"a": "1"}
    with pytest.raises(InvalidRequest, match=text):
        read(body)


def test_many_files_are_searched_in_slices() -> None:
    """None of them alone is a slice."""
    body = written([("f", bytes(COPY_BYTES - 1), "f")] * 9)
    assert slices_of(form_of(body)) >= 4


def generate_plan(text: bytes, config: Any) -> RequestPlan:
    return finished(GenerateRequest(text).plan(config, lambda size: None))


def config(batch: int = 0, **inputs: tuple[str, list[Any]]) -> dict[str, Any]:
    tensors = [{"name": name, "data_type": f"TYPE_{dtype}", "dims": dims} for name, (dtype, dims) in inputs.items()]
    return {"max_batch_size": batch, "input": tensors}


TEXT = config(4, text=("STRING", ["1"]), many=("FP32", ["-1"]), image=("UINT8", [2, "-1"]), free=("INT32", [-1, -1]))


def test_inputs_and_parameters() -> None:
    request = {"text": "hé", "many": [1, 2.5], "id": "me", "priority": 2, "temperature": 0.5, "parameters": {"top": 3}}
    plan = generate_plan(json.dumps(request).encode(), TEXT)
    assert plan.inputs == (
        InputPlan("text", "BYTES", (1, 1), 7, b"\x03\0\0\0h\xc3\xa9"),
        InputPlan("many", "FP32", (1, 2), 8, np.array([1, 2.5], np.float32).tobytes()),
    )
    assert plan.options == RequestOptions("me", 2, parameters={"temperature": 0.5, "top": 3})
    nested = generate_plan(b'{"text": "a", "parameters": {"many": [1, 2.5], "top": 3}}', TEXT)
    assert nested == generate_plan(b'{"text": "a", "many": [1, 2.5], "top": 3}', TEXT), "as in Triton's examples"


@cases(
    ("many", 3, (1, 1)),
    ("many", [], (1, 0)),
    ("image", [1, 2, 3, 4, 5, 6], (1, 2, 3)),
    ("free", [1, 2], (1, 1, 2)),
    ("free", 7, (1, 1, 1)),
)
def test_shapes(name: str, value: Any, shape: tuple[int, ...]) -> None:
    (found,) = generate_plan(json.dumps({name: value}).encode(), TEXT).inputs
    assert found.shape == shape
    assert found.size == np.prod(shape) * (1 if name == "image" else 4)
    (unbatched,) = generate_plan(b'{"x": [1, 2]}', config(x=("INT64", [2]))).inputs
    assert (unbatched.shape, unbatched.data) == ((2,), np.array([1, 2]).tobytes())


@cases(
    (b"{", "failed to parse"),
    (b"[]", "not an object"),
    (b"[" * 100_000, "JSON nesting depth exceeds"),
    (b'{"text": ' + b"[" * 120 + b"]" * 120 + b"}", "JSON nesting depth exceeds"),
    (b'{"text": "a", "text": "b"}', "input 'text' already exists in request"),
    (b'{"a": 1, "parameters": {"a": 2}}', "parameter 'a' is given more than once"),
    (b'{"text": "a", "parameters": {"text": "b"}}', "input 'text' already exists in request"),
    (b'{"parameters": {"text": "b"}, "text": "a"}', "input 'text' already exists in request"),
    (b'{"parameters": {"many": {}}}', "an object"),
    (b'{"text": ["a", "b"]}', "has 1 elements, and 2 are given"),
    (b'{"image": [1, 2, 3]}', "has 2 elements, and 3 are given"),
    (b'{"text": null}', "null"),
    (b'{"text": 1}', "is of BYTES, and some of its data is an integer"),
    (b'{"text": {"a": 1}}', "an object"),
    (
        b'{"other": [1]}',
        "parameter 'other' has invalid type. It is not an input.*Expected {\"text\": BYTES, "
        r'"many": \[FP32, ...\], "image": \[UINT8, ...\], "free": \[INT32, ...\]}; other keys are parameters',
    ),
    (b'{"parameters": {"a": {}}}', "has invalid type."),
    (b'{"id": {}}', "has invalid type."),
    (b'{"triton_x": 1}', "reserved"),
    (b'{"n": 99999999999999999999}', "64 bits"),
    (b'{"n": ' + b"9" * 5000 + b"}", "failed to parse"),
    ids=lambda value: value[:20] if isinstance(value, bytes) else value,
)
def test_invalid_requests_are_refused(text: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        generate_plan(text, TEXT)


def test_the_text_of_an_error_may_have_lone_surrogates() -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_plan(b'{"\\ud800": [1]}', TEXT)
    assert json.loads(error_body(str(caught.value)))["error"]


SCHEMAS = {"inputs": {"item": {"type": "object"}, "items": {"type": "object"}, "image": {"contentEncoding": "base64"}}}
SCHEMAS["outputs"] = SCHEMAS["inputs"]
TYPED = config(item=("STRING", [1]), items=("STRING", ["-1"]), image=("STRING", [1]), text=("STRING", [1]),
               n=("INT32", [1]), many=("FP32", [-1]))  # fmt: skip
TYPED["parameters"] = {"json_schemas": {"string_value": json.dumps(SCHEMAS)}}
TYPED["output"] = TYPED["input"]


def values_of(plan: RequestPlan) -> dict[str, list[bytes]]:
    return {spec.name: decode_bytes(spec.data, spec.shape).tolist() for spec in plan.inputs if spec.dtype == "BYTES"}


def test_inputs_with_a_schema_are_json_or_files() -> None:
    request = {"item": [1, {"a": None}], "items": [{"b": 1}, {}], "image": "data:image/png;base64,AAEC", "text": "AAEC"}
    plan = generate_plan(json.dumps(request).encode(), TYPED)
    items = [b'{"b":1}', b"{}"]
    expected = {"item": [b'[1,{"a":null}]'], "items": items, "image": [b"\0\1\2"], "text": [b"AAEC"]}
    assert values_of(plan) == expected
    for wrong, message in [(b'"image": "?"', "not base64"), (b'"image": 1', "a string in"), (b'"items": {}', "a list")]:
        with pytest.raises(InvalidRequest, match=message):
            generate_plan(b"{%b}" % wrong, TYPED)


def test_outputs_with_a_schema_are_json_or_files() -> None:
    tensors = (
        Tensor("item", "BYTES", (1,), b"\2\0\0\0[]"),
        Tensor("items", "BYTES", (1,), b"\2\0\0\0{}"),
        Tensor("image", "BYTES", (1,), b"\3\0\0\0\0\1\2"),
    )
    held = Held(Part(1, 3, tensors), [[bytes(tensor.data)] for tensor in tensors])  # type: ignore[arg-type]
    expected = {"item": [], "items": [{}], "image": "AAEC"}
    whole = generated("m", RequestPlan((), 0, RequestOptions()), TYPED, held)
    slices = generated_in_slices("m", RequestPlan((), 0, RequestOptions()), TYPED, held, lambda size: None)
    for text in (whole, b"".join(map(bytes, finished(slices)))):
        assert json.loads(text) == {"model_name": "m", "model_version": "3", **expected}


def form_plan(*parts: tuple[str, bytes, bool]) -> RequestPlan:
    """A part is a name, a value, and whether it is a file."""
    body = written((name, value, "f" if is_file else None) for name, value, is_file in parts)
    request = GenerateForm(finished(form_of(body)))
    return finished(request.plan(TYPED, lambda size: None))


def test_forms() -> None:
    plan = form_plan(
        ("image", b"\xff\0", True), ("items", b"1", True), ("items", b"22", True), ("text", "ü".encode(), False),
        ("n", b"3", False), ("many", b"[1, 2]", False), ("item", b'{"a": 1}', False), ("id", b"me", False),
        ("top", b"4", False),
    )  # fmt: skip
    expected = {"image": [b"\xff\0"], "items": [b"1", b"22"], "text": ["ü".encode()], "item": [b'{"a":1}']}
    assert values_of(plan) == expected
    numbers = {spec.name: (spec.shape, spec.data) for spec in plan.inputs if spec.dtype != "BYTES"}
    assert numbers == {"n": ((1,), b"\3\0\0\0"), "many": ((2,), np.array([1, 2], np.float32).tobytes())}
    assert plan.options == RequestOptions("me", parameters={"top": "4"})


@cases(
    (("n", b"x", False), "the field 'n' of the form is not JSON"),
    (("n", b"[" * 200, False), "nesting depth"),
    (("n", b"1", True), "input 'n' of INT32 cannot be a file"),
    (("other", b"", True), "is not an input of the model"),
    (("image", b"?", False), "not base64"),
    (("image", b"AA==AAAA", False), "not base64"),
)
def test_invalid_forms_are_refused(part: tuple[str, bytes, bool], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        form_plan(part)
    half = b"[%b1]" % (b"1," * (FIELD_BYTES // 4))
    with pytest.raises(InvalidRequest, match=f"more than {FIELD_BYTES} bytes of JSON"):
        form_plan(("many", half, False), ("item", half, False))
    with pytest.raises(InvalidRequest, match="has 1 elements, and 2 are given"):
        form_plan(("text", b"a", True), ("text", b"b", True))


def test_files_are_copied_in_slices_and_counted() -> None:
    """A file of several slices in a request, as base64 and in a form, and in a response."""
    file = bytes(6 * SLICE_BYTES)
    counted: list[int] = []
    request = GenerateRequest(json.dumps({"image": base64.b64encode(file).decode()}).encode())
    form = GenerateForm(finished(form_of(written([("items", file, "f")] * 64))))
    for work, count in ((request.plan(TYPED, counted.append), 6), (form.plan(TYPED, counted.append), 64)):
        assert slices_of(work) >= count
    assert counted == [len(file), 64 * len(file)]
    counted.clear()
    tensor = Tensor("image", "BYTES", (1,), len(file).to_bytes(4, "little") + file)
    held = Held(Part(1, 3, (tensor,)), [[bytes(tensor.data)]])  # type: ignore[arg-type]
    response = generated_in_slices("m", RequestPlan((), 0, RequestOptions()), TYPED, held, counted.append)
    assert slices_of(response) >= 6
    assert sum(counted) > len(file)


def test_a_response_and_its_event() -> None:
    tensors = (
        Tensor("one", "FP32", (1, 1), np.array([0.5], np.float32).tobytes()),
        Tensor("text", "BYTES", (1,), b"\2\0\0\0hi"),
        Tensor("more", "INT8", (3,), (Handle(1, 0, 2), Handle(1, 64, 1))),
    )
    half = np.array([0.5], np.float32).tobytes()
    held = Held(Part(1, 3, tensors), [[half], [b"\2\0\0\0hi"], [memoryview(b"\1\2"), memoryview(b"\3")]])
    text = generated("m", RequestPlan((), 0, RequestOptions("me")), {}, held)
    assert json.loads(text) == {
        "model_name": "m", "model_version": "3", "id": "me", "one": 0.5, "text": "hi", "more": [1, 2, 3],
    }  # fmt: skip
    in_slices = generated_in_slices("m", RequestPlan((), 0, RequestOptions("me")), {}, held, lambda size: None)
    assert b"".join(finished(in_slices)) == text
    assert event(text) == b"data: " + text + b"\n\n"
    assert b"\n" not in text
