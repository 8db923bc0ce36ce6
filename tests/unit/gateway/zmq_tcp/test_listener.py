"""The ZeroMQ listener in a thread, connected to a fake broker: what it forwards, restarts on both sides, the roles of
keys, hostile clients and limits, and its shutdown. Each test is checked to leave nothing."""

from __future__ import annotations

import gc
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import Unavailable
from shmserve.protocol.messages import Cancel, More
from tests.support.broker.fake_broker import MODELS, FakeBroker, echo
from tests.support.broker.running_broker import running
from tests.support.cases import cases
from tests.support.clients.client_faces import FACES
from tests.support.gateway.zmq_listener import HELLO, LIMITS, Bare, ListenerThread
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def broker() -> Iterator[FakeBroker]:
    with running(FakeBroker) as made:
        yield made


@pytest.fixture(scope="module")
def listener(broker: FakeBroker) -> Iterator[ListenerThread]:
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        made = ListenerThread(Path(folder), broker.lane)
        with made.client() as client:
            # Connects the listener to the broker, and makes both allocate all their memory.
            for future in [client.submit("echo", {"x": np.zeros(3 << 20, np.uint8)}) for _ in range(2)]:
                future.result()
            client.infer("echo", {"x": np.zeros(4 << 20, np.uint8)})
        yield made
        made.stop()


@pytest.fixture(autouse=True)
def _as_it_was(broker: FakeBroker, listener: ListenerThread) -> Iterator[None]:
    """Checks that no request or memory of a test is left in the listener or the broker."""
    yield
    gc.collect()
    listener.do(lambda: listener.listener.link.send_soon())
    with Bare(listener, "alice") as bare:  # its query is processed after the returned memory
        bare.send([9, 1, "live"])
        assert bare.receive()[:3] == [37, 1, b'{"live": true}']
    while listener.do(lambda: listener.listener.peers):
        assert listener.listener.peers < 10
    assert broker.held_handles == []
    while not broker.parked.empty():
        broker.parked.get()
    while not broker.told.empty():
        broker.told.get()


@pytest.fixture
def bare(listener: ListenerThread) -> Iterator[Callable[..., Bare]]:
    with ExitStack() as made:
        yield lambda name="alice", **more: made.enter_context(Bare(listener, name, **more))


@pytest.fixture
def client(listener: ListenerThread) -> Iterator[Any]:
    with listener.client() as made:
        yield made


def test_tensors_are_forwarded(client: Any) -> None:
    for shape in ((), (0, 3), (4,), (1024,), (1025,), (300, 1000)):
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        found = client.infer("echo", {"x": x, "again": x}, version=3, parameters={"a": 1, "b": "c"})
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["again"], x)
        assert (found.version, found.parameters) == (3, {"a": 1, "b": "c"})
    words = np.array([["a" * 3000, "ä"], ["", "b" * 3000]], object)
    assert client.infer("echo", {"x": words})["x"].tolist() == [[w.encode() for w in row] for row in words.tolist()]
    rows = np.arange(20_000.0).reshape(4, -1)
    np.testing.assert_array_equal(client.infer("rows", {"x": rows})["x"], rows, "outputs in parts")
    futures = [client.submit("echo", {"x": np.full(1500, n)}) for n in range(60)]
    assert [int(future.result()["x"][7]) for future in futures] == list(range(60))


def test_errors_and_queries_are_forwarded(client: Any, broker: FakeBroker) -> None:
    with pytest.raises(shmserve.NotFound, match="unknown model: 'nothing'"):
        client.infer("nothing", {"x": np.ones(1)})
    assert client.live()
    assert client.models() == [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]
    broker.answers["metadata"] = {"name": "n", "texts": ["x" * 300_000]}
    assert client.metadata("n") == broker.answers["metadata"]
    with pytest.raises(shmserve.DeadlineExceeded, match=r"within the timeout of 0\.02 s"):
        client.infer("hold", {"x": np.zeros(5000)}, timeout=0.02)
    broker.answer()
    client.live()


def test_a_stream_is_requested_as_it_is_read(client: Any, broker: FakeBroker) -> None:
    count = np.array([6], np.float32)
    with client.stream("parts", {"x": count}, window=4, parameters={"size": 2000}) as stream:
        found = [next(stream), next(stream)]
        assert broker.wait_for(More).count == 2
        found += stream
    for number, part in enumerate(found):
        np.testing.assert_array_equal(part["y"], np.full(2000, number, np.float32))
        assert part.parameters == {"index": number + 1}
    assert len(found) == 6
    with client.stream("parts", {"x": count}, window=2) as stream:
        next(stream)
    assert broker.wait_for(Cancel)
    with (
        client.stream("parts", {"x": count}, parameters={"fail": True}) as stream,
        pytest.raises(shmserve.ModelFailed, match="no more of this"),
    ):
        list(stream)


def test_bodies_of_operations_are_forwarded_up_to_the_limit(client: Any, broker: FakeBroker) -> None:
    got: list[bytes] = []

    def load(model: str, version: int, body: bytes) -> Any:
        got.append(body)
        return {"model": model, "versions": [], "changed": True, "warnings": []}

    broker.answers["load"] = load
    content = np.random.default_rng(2).bytes(3_000_000)
    client.load("new", config={"backend": "x"}, files={"1/model.bin": content})
    assert got[0].endswith(b"\n" + content)
    with pytest.raises(shmserve.InvalidRequest, match=f"exceeds {LIMITS.input_bytes} bytes.*--http-max-input-size"):
        client.load("new", config={"backend": "x"}, files={"1/model.bin": bytes(LIMITS.input_bytes)})
    assert client.live()


def test_tensors_over_the_limit_or_share_are_refused(
    client: Any, broker: FakeBroker, listener: ListenerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.live()  # makes the client know the limits
    with pytest.raises(shmserve.InvalidRequest, match=f"over the limit of {LIMITS.input_bytes} for one message"):
        client.infer("echo", {"x": np.zeros(LIMITS.input_bytes + 1, np.uint8)})
    large = np.zeros(3 << 20, np.uint8)
    monkeypatch.setattr(listener.listener.link.shares.requests, "calm_bytes", 0)
    monkeypatch.setattr(listener.listener.link.shares.requests, "_input_bytes", 24 << 20)
    held = [client.submit("hold", {"x": large}) for _ in range(2)]
    with pytest.raises(shmserve.Unavailable, match=r"exceed its share \(--limit caller_share\) of 25165824 bytes"):
        client.infer("echo", {"x": large})
    for future in held:
        broker.answer()
        future.result()
    assert client.infer("echo", {"x": large})["x"].nbytes == large.nbytes


def test_a_cancelled_request_is_answered_once(broker: FakeBroker, bare: Any) -> None:
    one = bare()
    one.send([7, 5, "hold", 0, [["x", "UINT8", [5000], 0]]], frames=(bytes(5000),))
    peer, infer, frames = broker.next_parked()
    one.send([8, 5])
    assert one.receive() == [34, 5, "CANCELLED", "the request was cancelled by the client"]
    assert broker.wait_for(Cancel).request == infer.request
    broker.do(lambda: echo(broker, peer, infer, frames))  # sent before the cancellation was received
    assert one.quiet()


def test_a_restarted_server_or_gateway_gets_the_requests_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = FakeBroker(tmp_path)
    broker.start()
    (tmp_path / "keys").mkdir()
    listener = ListenerThread(tmp_path / "keys", broker.lane, exit_timeout_s=0.01)
    x = np.arange(5000.0)
    with listener.client() as client:
        for restarts_broker in (True, False):
            with monkeypatch.context() as patch:
                future = client.submit("hold", {"x": x})
                broker.next_parked()
                (broker if restarts_broker else listener).stop()
                patch.setitem(MODELS, "hold", echo)
                if restarts_broker:
                    broker.start()
                else:
                    listener = ListenerThread(tmp_path / "keys", broker.lane, address=listener.url)
                np.testing.assert_array_equal(future.result()["x"], x)
                del future
        broker.stop()
        with pytest.raises(shmserve.ConnectionLost, match="server behind this gateway is unreachable") as caught:
            client.infer("echo", {"x": x})
        assert "/" not in str(caught.value)
        assert client.live() is False
        broker.start()
        np.testing.assert_array_equal(client.infer("echo", {"x": x})["x"], x)
    listener.stop()
    broker.stop()


def test_a_client_has_the_roles_of_its_key(listener: ListenerThread, broker: FakeBroker) -> None:
    with listener.client("bob") as bob:
        assert bob.infer("echo", {"x": np.array(1)})["x"] == 1
        assert bob.ready()
        with pytest.raises(shmserve.Denied, match=r"'models' needs the role observe or operate.*--zmq-keys"):
            bob.models()
        with pytest.raises(shmserve.Denied, match="'load' needs the role operate, but this connection has infer;"):
            bob.load("echo")


def test_r25_what_only_operators_may_see(listener: ListenerThread, broker: FakeBroker) -> None:
    """The gateway itself has the role operate, whichever client it acts for."""
    broker.answers["activity"] = {"clients": [{"number": 1, "user": "uid:7"}]}
    broker.answers["models"] = [{"name": "m", "instances": [{"name": "m_0", "last_words": ["plums"]}]}]
    broker.answers["logs"] = {"records": []}
    found = {}
    for name in ("alice", "olga"):
        with listener.client(name) as client:
            found[name] = client.activity()["clients"][0]["user"], client.models()[0]["instances"][0]["last_words"]
            if name == "alice":
                assert client.logs() == {"records": []}
            else:
                with pytest.raises(shmserve.Denied, match="'logs' needs the role operate, but this connection has obs"):
                    client.logs()
    assert found == {"alice": ("uid:7", ["plums"]), "olga": ("", [])}


@pytest.mark.parametrize("face", list(FACES))
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"key_file": "eve.key"}, r"rejected the key .* file of --zmq-keys"),
        ({"server_key": "eve.pub"}, r"does not have the server key .* check the url and server_key="),
    ],
)
def test_a_rejected_key_has_its_reason(listener: ListenerThread, face: str, wrong: dict[str, str], text: str) -> None:
    keys = listener.keys("alice") | {name: listener.folder / file for name, file in wrong.items()}
    with FACES[face](listener.url, **keys, timeout=PATIENCE_S) as client, pytest.raises(shmserve.Denied, match=text):
        client.infer("echo", {"x": np.array(1)})


def test_a_client_without_keys_is_refused(
    listener: ListenerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, open_to_all = listener.keys("alice"), tmp_path / "open.key"
    open_to_all.write_text(right["key_file"].read_text())
    open_to_all.chmod(0o644)
    for url, keys, text in (
        (listener.url, {}, r"tcp:// needs server_key= \(or SHMSERVE_SERVER_KEY\)"),
        (listener.url, {"server_key": right["server_key"]}, r"tcp:// needs key_file= \(or SHMSERVE_KEY_FILE\)"),
        ("unix:///nowhere/lane.sock", right, "only for tcp://, not unix://"),
        (listener.url, right | {"key_file": open_to_all}, "is readable by other users: chmod 600"),
    ):
        with pytest.raises(shmserve.InvalidRequest, match=text):
            shmserve.Client(url, **keys)
    monkeypatch.setenv("SHMSERVE_SERVER_KEY", str(right["server_key"]))
    monkeypatch.setenv("SHMSERVE_KEY_FILE", str(right["key_file"]))
    with shmserve.Client(listener.url, timeout=PATIENCE_S) as client:
        assert client.live()


def test_the_file_of_keys_is_reloaded(listener: ListenerThread) -> None:
    with listener.client("bob") as bob:
        assert bob.live()
        listener.write_keys("alice", "eve")
        listener.do(listener.listener.read_keys)
        with pytest.raises(shmserve.Denied, match=r"rejected the key|has no roles"):
            bob.infer("echo", {"x": np.array(1)})
    with listener.client("eve") as eve:
        assert eve.live()
    (listener.folder / "keys").write_text("nonsense\n")
    listener.do(listener.listener.read_keys)  # keeps the valid keys
    with listener.client("eve") as eve:
        assert eve.live()
    listener.write_keys("alice", "bob")
    listener.do(listener.listener.read_keys)


def test_a_reused_identity_receives_no_messages_of_its_former_client(
    listener: ListenerThread, broker: FakeBroker, bare: Any
) -> None:
    alice = bare("alice", identity=b"mine")
    alice.send([7, 5, "hold", 0, [["x", "UINT8", [1], b"a"]]])
    peer, infer, frames = broker.next_parked()
    alice.close()
    assert broker.wait_for(Cancel).request == infer.request
    bob = bare("bob", identity=b"mine")
    broker.do(lambda: echo(broker, peer, infer, frames))
    bob.send([9, 6, "models"])
    assert bob.receive()[:3] == [34, 6, "DENIED"]
    assert bob.quiet()


@cases(
    ([7, 1, "echo", 0, []], "CONNECTION_LOST", "the first message of a connection must be Hello"),
    ([6, 9, 0, "x", "frames"], "PROTOCOL", "protocol version 9 is not supported, only"),
    ([6, 1, 0, "x", "posix"], "PROTOCOL", "only be sent as 'frames'"),
)
def test_an_invalid_first_message_ends_the_connection(message: Any, code: str, text: str, bare: Any) -> None:
    one = bare(greet=False)
    one.send(message)
    tag, received, words = one.receive()
    assert (tag, received) == (39, code)
    assert text in words
    one.send([4, 1])  # ignored
    one.send(HELLO)
    assert one.receive()[0] == 32


NO_MEMORY = "shared memory is not supported over tcp: send tensors in frames"


def of(*data: Any) -> list[Any]:
    """A request with inputs of this data."""
    return [7, 4, "echo", 0, [["x", "UINT8", [1], one] for one in data]]


@cases(
    ([1, 1 << 32, 4096, "/name"], 39, ("INVALID_ARG", NO_MEMORY)),
    ([2, 1], 39, ("INVALID_ARG", NO_MEMORY)),
    (HELLO, 39, ("PROTOCOL", "second Hello on one connection")),
    ([3, [[1, 0, 8]]], 34, (0, "INVALID_ARG", "this client holds no handles to return")),
    ([9, 4, "nonsense"], 34, (4, "INVALID_ARG", "unknown query 'nonsense'; known queries: live")),
    ([9, 4, "live", "", 0, b"body"], 34, (4, "INVALID_ARG", "the query 'live' takes no body")),
    ([7, 0, "echo", 0, []], 34, (0, "INVALID_ARG", "request number 0 is 0 or already in flight")),
    (of([[1, 0, 1]]), 34, (4, "INVALID_ARG", "input 'x' is in shared memory")),
    (of(1), 34, (4, "INVALID_ARG", "input 'x' refers to frame 1, but the message has 1 frames")),
    (of(-1), 34, (4, "INVALID_ARG", "input 'x' refers to frame -1, but the message has 1 frames")),
    ([*of(), [["x", [1, 0, 1]]]], 34, (4, "INVALID_ARG", "output 'x' is requested in shared memory")),
    ([*of(), [["x"], ["x"]]], 34, (4, "INVALID_ARG", "output 'x' is requested twice")),
    (
        [12, "echo", 0, [[["x", "UINT8", []]], [4, 5], [1, 1], [[b"a"], [b"b"]]]],
        34,
        (0, "INVALID_ARG", "InferBatch is not supported over tcp: send each request as Infer"),
    ),
    ([99, 4], 34, (4, "PROTOCOL", "unknown message type 99")),
    (5, 34, (0, "PROTOCOL", "a message must be an array that begins with its tag")),
)
def test_invalid_messages_are_refused(
    message: Any, tag: int, fields: tuple[Any, ...], bare: Any, broker: FakeBroker
) -> None:
    one = bare()
    before = len(broker.requests)
    one.send(message, frames=(b"frame",))
    *received, text = one.receive()
    assert received == [tag, *fields[:-1]]
    assert fields[-1] in text
    assert tag == 39 or one.quiet()
    assert len(broker.requests) == before


def test_the_number_of_an_operation_whose_body_is_incomplete_is_taken(bare: Any, broker: FakeBroker) -> None:
    broker.answers["load"] = {"loaded": True}
    one = bare()
    one.send([9, 4, "load", "m", 0, b"{", True])
    one.send(of(b"a"))
    assert one.receive() == [34, 0, "INVALID_ARG", "request number 4 is 0 or already in flight"]
    one.send([9, 4, "", "", 0, b"}"])
    assert one.receive()[:3] == [37, 4, b'{"loaded": true}']


def test_a_frame_of_several_inputs_is_counted_for_each(bare: Any) -> None:
    one = bare()
    one.send([7, 4, "echo", 0, [[f"x{n}", "UINT8", [1 << 20], 0] for n in range(256)]], frames=(bytes(1 << 20),))
    assert one.receive()[:3] == [34, 4, "INVALID_ARG"]


def test_a_flood_of_invalid_bytes_ends_the_connection(bare: Any, listener: ListenerThread) -> None:
    one = bare()
    one.socket.send(b"\xc1garbage")
    assert one.receive()[:3] == [34, 0, "PROTOCOL"]
    one.socket.send_multipart([b"", b"frame"])
    assert one.receive()[:3] == [34, 0, "PROTOCOL"]
    for _ in range(1100):
        one.socket.send(b"\xc1")
    with listener.client("bob") as honest:
        assert honest.live()
    last = one.receive()
    while last[0] == 34:
        last = one.receive()
    assert last[:2] == [39, "UNAVAILABLE"]
    assert "client_errors" in last[2]


def test_a_client_that_does_not_read_is_disconnected(bare: Any, listener: ListenerThread, broker: FakeBroker) -> None:
    one = bare(kept=1)
    frame = bytes(3 << 20)
    number = 0
    with listener.client("bob") as honest:
        assert honest.live()
        while listener.listener.peers == 2:
            number += 1
            one.send([7, number, "hold", 0, [["x", "UINT8", [len(frame)], 0]]], frames=(frame,))
            broker.answer()
            assert honest.live()


def test_requests_and_connections_of_a_key_are_limited(
    bare: Any, listener: ListenerThread, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener.listener.link.shares.requests, "calm_calls", 100)
    monkeypatch.setattr(listener.listener.link.shares.requests, "calls", 400)
    first = bare()
    for number in range(1, 102):
        first.send([7, number, "hold", 0, []])
    assert first.receive()[:3] == [34, 101, "UNAVAILABLE"]
    others = [bare() for _ in range(5)]
    seventh = bare(greet=False)
    seventh.send(HELLO)
    assert seventh.receive()[:2] == [39, "UNAVAILABLE"]
    assert all(other.quiet() for other in others)


def read_to_the_end(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):  # also an end
        while connection.recv(4096):
            pass


def test_other_protocols_at_the_port_do_not_affect_clients(listener: ListenerThread) -> None:
    host, port = "127.0.0.1", int(listener.url.rpartition(":")[2])
    with socket.create_connection((host, port), 20) as half_open:
        with socket.create_connection((host, port), 20) as web:
            web.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
            read_to_the_end(web)
        with listener.client() as honest:
            assert honest.live()
        assert half_open.fileno() > 0


def test_connections_without_a_handshake_are_limited(bare: Any, listener: ListenerThread) -> None:
    one = bare()
    host, port = "127.0.0.1", int(listener.url.rpartition(":")[2])
    with ExitStack() as crowd:
        made = [crowd.enter_context(socket.create_connection((host, port), 20)) for _ in range(40)]
        for refused in made[20:]:  # the limit is 16, one of them of alice
            read_to_the_end(refused)
        assert one.quiet()
    # libzmq reports the ends one by one; until then, a new connection may be refused and is tried again.
    with listener.client() as honest:
        assert honest.live()


def test_shutdown_answers_requests_in_flight_and_refuses_others(broker: FakeBroker) -> None:
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        listener = ListenerThread(Path(folder), broker.lane)
        with Bare(listener, "alice") as one:
            one.send([7, 5, "hold", 0, [["x", "UINT8", [1], b"a"]]])
            peer, infer, frames = broker.next_parked()
            listener.begin_to_stop()
            while not listener.do(lambda: listener.listener.stopping):
                pass
            one.send([7, 6, "echo", 0, [["x", "UINT8", [1], b"a"]]])
            assert one.receive() == [34, 6, Unavailable.code, "the gateway is stopping"]
            broker.do(lambda: echo(broker, peer, infer, frames))
            assert one.receive()[:2] == [33, 5]
        listener.join()


def test_several_listeners_can_share_a_port(broker: FakeBroker, tmp_path: Path) -> None:
    with ExitStack() as made:
        endpoints = [ListenerThread(tmp_path, broker.lane) for _ in range(2)]
        for listener in endpoints:
            made.callback(listener.stop)
        port = endpoints[0].do(lambda: endpoints[0].listener.open("tcp://[::1]:0", share=True))
        assert endpoints[1].do(lambda: endpoints[1].listener.open(f"tcp://[::1]:{port}", share=True)) == port
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            endpoints[1].do(lambda: endpoints[1].listener.open(f"tcp://[::1]:{port}"))
        with ExitStack() as clients:
            for _ in range(4):
                url, keys_of_alice = f"tcp://[::1]:{port}", endpoints[0].keys("alice")
                assert clients.enter_context(shmserve.Client(url, **keys_of_alice, timeout=PATIENCE_S)).live()
            assert sum(listener.listener.peers for listener in endpoints) == 4
