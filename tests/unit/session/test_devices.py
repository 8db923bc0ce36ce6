"""Arrays on a GPU in a session, with fake CUDA: the sent handles must refer to the bytes of the arrays."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import HandleLost, InvalidRequest, Unavailable
from shmserve.protocol.messages import PROTOCOL, Answer, Cancel, Fail, Handle, Infer, Map, Part, Reply, Tensor, Welcome
from shmserve.session import Session, StreamTicket
from shmserve.session.gpu.tensors import _is_contiguous
from shmserve.shm.extents.cuda import is_device, parts_of
from tests.support.clients.sessions import RecordingTicket, decode, decoded, feed
from tests.support.hypothesis_profiles import examples
from tests.support.workers.gpu.device_arrays import Array, Foreign, end, read, write
from tests.support.workers.gpu.harness import standins

X = np.arange(5000, dtype=np.float32).reshape(5, 1000)


class Server:
    """The server's end: keeps the announced segments and reads handles."""

    def __init__(self, session: Session, owner: int = 1, takes: int = 1) -> None:
        self.session = session
        self.maps: dict[int, Map] = {}
        self.descriptors: dict[int, int] = {}
        self._of: dict[bytes, int] = {}
        feed(session, Welcome(PROTOCOL, owner, "s", {"device_memory": takes}))

    def take(self) -> list[Any]:
        found = []
        for packet in self.session.take():
            left = list(packet.descriptors)
            for message in decode(packet.data):
                if isinstance(message, Map):
                    self.maps[message.segment] = message
                    if message.name is None:
                        self.descriptors[message.segment] = left.pop(0)
                else:
                    found.append(message)
        return found

    def has_loaded(self) -> None:
        (asked,) = self.take()
        feed(self.session, Answer(asked.request, b"true"))

    def read(self, handle: Handle) -> bytes:
        segment = self.maps[handle.segment]
        assert handle.offset + handle.size <= segment.size
        if segment.name is None:
            return os.pread(self.descriptors[handle.segment], handle.size, handle.offset)
        return ctypes.string_at(self.address(handle), handle.size)

    def address(self, handle: Handle) -> int:
        name = self.maps[handle.segment].name
        assert name is not None
        exported, _ = parts_of(name)
        return self._of[exported] + handle.offset

    def know(self, runtime: Any) -> None:
        """Map exported names to addresses; the test is in the same process."""
        self._of = {runtime.ipcGetMemHandle(address): address for address in runtime.state.device}

    def on_gpu(self, handle: Handle) -> bool:
        return is_device(self.maps[handle.segment].name or "")


@pytest.fixture
def runtime() -> Iterator[Any]:
    with standins() as (runtime, _):
        yield runtime
        end(runtime)
        assert runtime.state.left() == {}


@pytest.fixture
def x(runtime: Any) -> Iterator[Foreign]:
    array = Foreign(runtime, X)
    yield array
    array.close()


@pytest.fixture
def session(runtime: Any) -> Iterator[Session]:
    made = Session()
    yield made
    made.close()


def infer(session: Session, inputs: Any, ticket: Any = None, **more: Any) -> Any:
    ticket = ticket or RecordingTicket()
    session.infer(ticket, "m", inputs, 0.0, **more)
    return ticket


def handle_of(message: Any, index: int = 0) -> Handle:
    assert isinstance(message, Infer)
    (handle,) = message.inputs[index].data  # type: ignore[misc]
    assert isinstance(handle, Handle)
    return handle


def used(session: Session) -> int:
    """More than 0 while any memory of the session, on the GPU or not, is in use."""
    return session.memory.devices.used + round(session.memory.used * (1 << 40))


def test_arrays_are_copied_to_exported_memory(runtime: Any, session: Session, x: Foreign) -> None:
    ticket = infer(session, {"x": x, "y": X[0]})
    server = Server(session)
    (message,) = server.take()
    server.know(runtime)
    assert message.inputs[0] == Tensor("x", "FP32", (5, 1000), (handle_of(message),))
    assert server.on_gpu(handle_of(message))
    assert server.read(handle_of(message)) == X.tobytes()
    feed(session, Reply(1, 1, ()))
    assert ticket.ends == 1
    assert used(session) == 0
    assert session.cancel(infer(session, {"x": x}))
    assert [type(message) for message in server.take()] == [Infer, Cancel]
    assert used(session), "until the answer"
    feed(session, Fail(2, "CANCELLED", "was"))
    assert used(session) == 0


def test_arrays_of_the_session_are_sent_without_a_copy(runtime: Any, session: Session) -> None:
    server = Server(session)
    x = session.memory.empty_on("cuda:0", (5, 1000), "float32")
    write(x.__cuda_array_interface__, X)
    rest = {"data": (x.block.address + 4000, False), "shape": (4, 1000), "typestr": "<f4", "version": 3, "stream": 1}
    runtime.state.streams[1] = runtime.state.streams[0]
    part = SimpleNamespace(__cuda_array_interface__=rest, owner=x)
    infer(session, {"x": x, "part": part})
    (message,) = server.take()
    server.know(runtime)
    assert server.read(handle_of(message)) == X.tobytes()
    whole, cut = handle_of(message), handle_of(message, 1)
    assert cut == Handle(whole.segment, whole.offset + 4000, 16000)
    assert runtime.state.named("memcpyAsync") == []
    del x, part
    assert used(session), "the request keeps the memory"
    feed(session, Reply(1, 1, ()))
    session.memory.empty_on(0, (1,), "int8")
    assert used(session) == 256
    del runtime.state.streams[1]


def test_small_and_empty_arrays_are_sent_inline(runtime: Any, session: Session) -> None:
    server = Server(session)
    small, none = Foreign(runtime, X[0]), Foreign(runtime, X[:0])
    infer(session, {"small": small, "none": none})
    (message,) = server.take()
    assert [tensor.data for tensor in message.inputs] == [X[0].tobytes(), b""]
    assert server.maps == {}
    small.close()
    none.close()


def test_a_request_to_a_model_without_the_gpu_is_repeated_through_host_memory(runtime: Any, session: Session) -> None:
    server = Server(session)
    x, y = Foreign(runtime, X), session.memory.empty_on(0, (1, 1000), "float32")
    ticket = infer(session, {"x": x}, outputs={"y": y})
    (message,) = server.take()
    assert server.on_gpu(message.outputs[0].place)
    x_was = x.__cuda_array_interface__
    write(x_was, X * 0)  # allowed: the array was copied
    feed(session, Fail(1, HandleLost.code, "elsewhere"))
    (again,) = server.take()
    assert (again.request, ticket.ends) == (1, 0)
    assert not server.on_gpu(handle_of(again))
    assert server.read(handle_of(again)) == X.tobytes()
    assert again.outputs[0].place is None
    feed(session, Reply(1, 1, (Tensor("y", "FP32", (1, 1000), (X[:1] + 1).tobytes()),)))
    assert ticket.answer["y"] is y
    np.testing.assert_array_equal(read(y.__cuda_array_interface__), X[:1] + 1)
    write(x_was, X)
    infer(session, {"x": x})
    (next_one,) = server.take()
    assert not server.on_gpu(handle_of(next_one))
    failed = infer(session, {"x": x})
    server.take()
    feed(session, Fail(3, HandleLost.code, "really lost"))
    assert isinstance(failed.error, HandleLost)
    feed(session, Reply(2, 1, ()))
    del y, ticket
    session.memory.empty_on(0, (1,), "int8")
    assert used(session) == 256
    x.close()


def test_a_stream_that_has_begun_is_not_repeated(session: Session, x: Foreign) -> None:
    class Flow(StreamTicket):
        def on_part(self) -> None: ...

    server = Server(session)
    late, early = Flow(), Flow()
    infer(session, {"x": x}, late, window=16)
    infer(session, {"x": x}, early, window=16)
    server.take()
    feed(session, Part(1, 1, (Tensor("y", "FP32", (1,), bytes(4)),)))
    feed(session, Fail(1, HandleLost.code, "gone"))
    assert isinstance(late.error, HandleLost)
    feed(session, Fail(2, HandleLost.code, "elsewhere"))
    assert early.error is None
    assert [type(message) for message in server.take()] == [Infer]


def test_requests_are_repeated_on_a_new_connection(runtime: Any, session: Session) -> None:
    server = Server(session)
    x, place = Foreign(runtime, X), session.memory.empty_on(0, (5, 1000), "float32")
    infer(session, {"x": x}, outputs={"y": place})
    session.memory.devices.far.add("other")
    (before,) = server.take()
    session.disconnected()
    server = Server(session, 7)
    server.has_loaded()
    (message,) = server.take()
    server.know(runtime)
    assert handle_of(message).segment >> 32 == message.outputs[0].place.segment >> 32 == 7
    assert handle_of(message).offset == handle_of(before).offset
    assert server.read(handle_of(message)) == X.tobytes()
    assert session.memory.devices.far == set()
    session.disconnected()
    server = Server(session, 8, takes=0)
    server.has_loaded()
    (message,) = server.take()
    assert not server.on_gpu(handle_of(message))
    assert message.outputs[0].place is None
    assert server.read(handle_of(message)) == X.tobytes()
    infer(session, {"x": x})
    (message,) = server.take()
    assert not server.on_gpu(handle_of(message))
    x.close()


@pytest.mark.parametrize("memory", ["posix", "frames"])
def test_without_memfds_arrays_go_through_host_memory(x: Foreign, memory: str) -> None:
    session = Session(memory)
    feed(session, Welcome(PROTOCOL, 1, "s", {"device_memory": 0}))
    infer(session, {"x": x})
    packets = session.take()
    *announced, message = decoded(packets)
    if memory == "frames":
        assert packets[-1].frames == (X.tobytes(),)
    else:
        (segment,), handle = announced, handle_of(message)
        with open(f"/dev/shm{segment.name}", "rb") as file:
            assert os.pread(file.fileno(), handle.size, handle.offset) == X.tobytes()
    session.close()


def test_memory_of_a_closed_client_is_used_by_the_next(runtime: Any, session: Session) -> None:
    x = session.memory.empty_on(0, (5, 1000), "float32")
    address = x.block.address
    del x
    session.close()
    other = Session()
    y = other.memory.empty_on(0, (5, 1000), "float32")
    assert y.block.address == address
    assert len(runtime.state.named("malloc")) == 1
    del y
    other.close()


def test_an_output_of_another_shape_than_its_array_is_refused(session: Session) -> None:
    server = Server(session)
    y = session.memory.empty_on(0, (2, 1000), "float32")
    ticket = infer(session, {"x": X[0]}, outputs={"y": y})
    place = server.take()[0].outputs[0].place
    feed(session, Reply(1, 1, (Tensor("y", "FP32", (1000, 2), (place,)),)))
    assert "has shape [1000, 2], but was written to an array of shape [2, 1000]" in str(ticket.error)


def test_dlpack_in_both_directions(runtime: Any, session: Session, x: Foreign) -> None:
    server = Server(session)

    class Only:
        described = x.__cuda_array_interface__

        def __dlpack__(self, **how: Any) -> Any: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    infer(session, {"x": Only()})
    (message,) = server.take()
    server.know(runtime)
    assert server.read(handle_of(message)) == X.tobytes()
    y = session.memory.empty_on("cuda", (3,), "float16")
    assert y.__dlpack_device__() == (2, 0)
    assert y.__dlpack__(stream=1) == ("capsule", y.block.address, {"stream": 1})
    assert repr(y) == "DeviceArray(shape=(3,), dtype=float16, device='cuda:0')"


def test_unusable_arrays_and_devices_are_refused(runtime: Any, session: Session, x: Foreign) -> None:
    Server(session)
    good = x.__cuda_array_interface__
    for change, text in (
        ({"strides": (4, 20)}, "not contiguous"),
        ({"mask": x}, "cannot be sent"),
        ({"typestr": ">f4"}, "cannot be sent"),
        ({"typestr": "<U4"}, "not a tensor|cannot be sent"),
        ({"typestr": "what"}, "not a tensor"),
        ({"shape": "ab"}, "not a tensor"),
        ({"data": ()}, "not a tensor"),
        ({"shape": (1,) * 40}, "40 dims"),
    ):
        x.__cuda_array_interface__ = good | change
        with pytest.raises(InvalidRequest, match=text):
            infer(session, {"small": X, "x": x})

    class Leaf:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("it needs its gradient")

    with pytest.raises(InvalidRequest, match="cannot be used: it needs its gradient"):
        infer(session, {"x": Leaf()})
    runtime.state.total = 0
    x.__cuda_array_interface__ = good
    with pytest.raises(Unavailable, match="not enough memory on the GPU"):
        infer(session, {"small": X, "x": x})
    assert used(session) == 0
    assert session.tickets == {}
    for device in ("gpu", "cuda:x", "cuda:-1", -1, "0"):
        with pytest.raises(InvalidRequest, match="'cuda', 'cuda:N' or a number"):
            session.memory.empty_on(device, (1,), "float32")
    with pytest.raises(InvalidRequest, match="on a GPU"):
        session.memory.empty_on(0, (1,), "O")


def test_a_failed_copy_through_the_host_fails_the_request(
    runtime: Any, session: Session, x: Foreign, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(session)
    ticket = infer(session, {"x": x})
    server.take()
    runtime.state.failures["memcpyAsync"] = 700
    feed(session, Fail(1, HandleLost.code, "elsewhere"))
    assert isinstance(ticket.error, HandleLost)
    assert "cannot copy GPU tensors through host memory: the GPU failed" in caplog.text
    assert used(session) == 0


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_contiguity_agrees_with_numpy(shape: list[int], data: st.DataObject) -> None:
    array: Array = np.zeros([2 * dim for dim in shape], np.int16)
    cuts = tuple(data.draw(st.sampled_from([slice(None), slice(0, dim), slice(0, dim, 2)])) for dim in shape)
    turned = data.draw(st.booleans())
    found = array[cuts].T if turned else array[cuts]
    if found.size:
        assert _is_contiguous(found.shape, 2, found.strides) == found.flags.c_contiguous
