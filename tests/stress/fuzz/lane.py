"""A series of events for a real core: a hostile client, an honest client, and workers that finish, crash and restart.

All requests of the honest client are answered, as the fakes verify; every invariant of the core holds after every turn;
and after the hostile client has disconnected, none of its resources are left.
"""

from __future__ import annotations

import re
from typing import Any

from shmserve.core import events
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.errors import ProtocolError
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Ask,
    Bye,
    Cancel,
    ClientMessage,
    Columns,
    Fail,
    FailHeld,
    Goodbye,
    Handle,
    Hello,
    Infer,
    InferBatch,
    LeaseEnd,
    Map,
    Options,
    Ping,
    Return,
    Tensor,
    TensorForm,
    Unmap,
    Wanted,
)
from tests.stress.fuzz.reader import Reader
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.world import World

SECRETS = re.compile(r"/(?:tmp|run|dev|home|work|usr|proc|var|root)\b|0x[0-9a-f]{6,}|shmserve[-_][0-9a-f]{8}|Traceback")
"""Text that no client may get: paths, memory addresses, names of segments."""
MODEL = ModelPolicy(
    "m", 1, 4, (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), BatchPolicy(delay_ns=1000)
)
LENT = ModelPolicy("lent", 1, 4, (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), BatchPolicy())
"""A model of which clients that send one request at a time get leases."""
MOST = 200
"""Maximum number of events in one input."""
ODD = (0, 1, 2, 16, 4096, 2**31, 2**32, 2**62, 2**63 - 1)
_codec = codec.Codec(ClientMessage)


class Hostile(FakeClient):
    """Keeps what it receives, and asserts nothing."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer, "hostile", "lane", "memfd")
        self.given: list[Handle] = []

    def receive(self, message: Any) -> None:
        if isinstance(message, (Fail, FailHeld, Goodbye)):
            found = SECRETS.search(message.text)
            assert found is None, f"a client is told {found and found[0]!r}: {message.text}"
        self.given += references(getattr(message, "outputs", ()))
        if isinstance(message, LeaseEnd) and message.lease in self.leases:
            self.leases.pop(message.lease).client_open = False

    def read_leases(self) -> None:
        for lease in self.leases.values():
            lease.take_answers()


class Course:
    def __init__(self, data: bytes) -> None:
        self.read = Reader(data)
        self.world = World()
        self.world.deploy(MODEL, 2, large="y")
        self.world.deploy(LENT, 2)
        lending = self.world.core.state.ready["lent"].service.lending
        assert lending is not None
        lending.needed = 2
        self.honest = self.world.connect("honest")
        self.alone = self.world.connect("alone", leases=True)
        self.world.turn([(self.honest.peer, self.world.own_segment(self.honest, 4096))])
        self.hostile = self._connect()
        self.asked = 0

    def _connect(self) -> Hostile:
        peer = self.world.connect("hostile", leases=True).peer
        made = self.world.clients[peer] = Hostile(peer)
        made.takes_leases = True
        return made

    def run(self) -> None:
        steps = (
            self._packet, self._infer, self._infer, self._infer_batch, self._infer_batch, self._give_back,
            self._map, self._unmap, self._small, self._cancel, self._honest, self._honest, self._finish,
            self._finish, self._die, self._wait, self._leave, self._alone, self._alone, self._lent, self._end_lease,
        )  # fmt: skip
        for _ in range(MOST):
            if not self.read:
                break
            self.read.pick(steps)()
            if self.hostile.ended:
                self.hostile = self._connect()
        self._end()

    def _end(self) -> None:
        self.world.gone(self.hostile)
        for _ in range(4 * MOST):
            self._work()
            if not (self.honest.open or self.alone.open):
                break
            self.world.advance(self.world.now + 10**9)
        assert not self.honest.open, f"never answered: {self.honest.open}"
        assert not self.alone.open, f"never answered: {self.alone.open}"
        self.world.gone(self.alone)
        for handle in list(self.honest.holds):
            self.honest.give_back(handle)
            self._from(self.honest, [Return((handle,))])
        self.world.gone(self.honest)
        self._work()
        state = self.world.core.state
        assert not state.clients, "a client is left"
        assert not state.requests, "requests are left"
        assert not state.leases, "leases are left"
        for worker in self.world.workers.values():
            assert not worker.out, f"{worker.name} was not given back {list(worker.out)}"

    # ------------------------------------------------------------------------------------ the workers

    def _work(self) -> None:
        for worker in list(self.world.workers.values()):
            while worker.running is not None and not worker.dead:
                worker.finish(self.world.now)
                self.world.settle()
            while worker.lease is not None and (worker.lease.running or worker.lease.requests) and not worker.dead:
                worker.run_leased(self.world.now)
                self.world.settle()

    def _worker(self) -> Any:
        workers = [worker for worker in self.world.workers.values() if not worker.dead]
        return self.read.pick(workers) if workers else None

    def _finish(self) -> None:
        worker = self._worker()
        if worker is not None and worker.running is not None:
            worker.finish(self.world.now, rows_first=self.read.byte() % 3)
            self.world.settle()

    def _die(self) -> None:
        worker = self._worker()
        if worker is not None:
            self.world.crash(worker)

    def _wait(self) -> None:
        self.world.advance(self.world.now + self.read.pick((1, 1000, 10**6, 10**9, 40 * 10**9)))

    # ------------------------------------------------------------------------------------ the honest client

    def _honest(self) -> None:
        """A request of the honest client, within its limit, so that it is never refused."""
        if len(self.honest.open) > 50:
            return
        self.asked += 1
        own = next(iter(self.honest.own))
        data: Any = self.read.pick(((Handle(own, 0, 16),), bytes(16)))
        self.honest.sends(self.asked)
        self._from(self.honest, [Infer(self.asked, "m", 0, (Tensor("x", "FP32", (1, 4), data),))])

    def _alone_one(self) -> None:
        """Sends a request over the lease, if there is one."""
        self.asked += 1
        infer = Infer(self.asked, "lent", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),))
        for lease in self.alone.leases.values():
            self.alone.send_leased(lease, infer)
            return
        self.alone.sends(self.asked)
        self._from(self.alone, [infer])

    def _alone(self) -> None:
        for _ in range(4):
            if self.alone.open:
                self._work()
            if not self.alone.open:
                self._alone_one()

    # ------------------------------------------------------------------------------------ leases

    def _lent(self) -> None:
        """The hostile client sends single requests, and invalid ones or nothing over its lease."""
        for lease in self.hostile.leases.values():
            for number in range(self.read.byte() % 3):
                lease.send(Infer(number, "lent", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),)))
            self.world.settle()
            return
        for _ in range(4):
            self._from(self.hostile, [Infer(self.read.byte(), "lent", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),))])
            self._work()

    def _end_lease(self) -> None:
        """A worker ends its lease, or begins to run one of its requests."""
        worker = self._worker()
        if worker is None or worker.lease is None:
            return
        if worker.lease.requests and worker.lease.running is None and self.read.byte() % 2:
            worker.lease.begin(self.world.now)
        elif worker.lease.running is None:
            worker.end_lease(0, self.world.now)
        self.world.settle()

    # ------------------------------------------------------------------------------------ the hostile one

    def _from(self, client: FakeClient, messages: list[Any]) -> None:
        """Passes messages on as the broker's shell does: a Map without a name has a descriptor, from which the shell
        determines the rest."""
        happened: list[tuple[int, Any]] = []
        known = self.world.core.state.ledger.segments
        for message in messages:
            if isinstance(message, codec.Refused):
                message = events.Garbled(message.request, message.text)
            elif isinstance(message, Map) and message.name is None:
                if message.segment >> OWNER_SHIFT != client.peer or message.segment in known:
                    message = events.Garbled(0, "not a new one in this connection's range", "INVALID_ARG")
            happened.append((client.peer, message))
        if happened:
            self.world.turn(happened)

    def _packet(self) -> None:
        """A packet of arbitrary bytes."""
        try:
            found = _codec.decode(self.read.rest(200))
        except ProtocolError as error:
            found = [codec.Refused(0, error.message)]
        self._from(self.hostile, found)

    def _segment(self) -> int:
        of = self.read.pick((self.hostile.peer, self.honest.peer, 0, 1, 99, 1 << 20))
        return (of << OWNER_SHIFT) + self.read.byte() % 4

    def _handle(self) -> Handle:
        held = [*self.hostile.given, *self.honest.holds]
        if held and self.read.byte() % 2:
            return self.read.pick(held)
        return Handle(self._segment(), self.read.pick(ODD), self.read.pick(ODD))

    def _tensor(self) -> Tensor:
        shape: Any = self.read.pick(((1, 4), (1, 4), (4, 1), (5, 1), (0, 4), (1, -1), (1, 2**62), (4,), ()))
        data: Any = self.read.pick((bytes(16), b"", None, 0))
        if data is None:
            data = tuple(self._handle() for _ in range(self.read.byte() % 3))
        name: str = self.read.pick(("x", "x", "x", "y"))
        dtype: str = self.read.pick(("FP32", "FP32", "INT8", ""))
        return Tensor(name, dtype, shape, data)

    def _infer(self) -> None:
        inputs = tuple(self._tensor() for _ in range(self.read.pick((1, 1, 0, 2))))
        wanted = self.read.pick((None, None, (Wanted("y"),), (Wanted("z"),), (Wanted("y", self._handle()),)))
        options = self.read.pick((None, None, Options(priority=3), Options(sequence=5), Options(queue_timeout_us=1)))
        number, model = self.read.byte() % 40, self.read.pick(("m", "m", "lent", "n", ""))
        infer = Infer(number, model, self.read.pick((0, 0, 1, 2)), inputs, wanted, self.read.pick(ODD), options)
        self._from(self.hostile, [infer] * self.read.pick((1, 1, 1, 2)))

    def _infer_batch(self) -> None:
        widths = self.read.pick(((4,), (4,), (1,), (), (0,), (-1,), (2**62, 4)))
        names: tuple[str, ...] = self.read.pick((("x",), ("x",), ("x",), (), ("x", "x"), ("y",)))
        forms = tuple(TensorForm(name, self.read.pick(("FP32", "FP32", "INT8", "")), widths) for name in names)
        count = self.read.pick((1, 2, 3, 5, 64, 65, 0))
        first, size = self.read.byte() % 40, self.read.pick((16, 16, 4, 0))
        numbers: list[Any] = [first + index for index in range(count)]
        rows: list[Any] = [self.read.pick((1, 1, 1, 2, 0, 2**62)) if index < 3 else 1 for index in range(count)]
        data: list[Any] = [(bytes(size * min(axis, 3)),) * len(forms) for axis in rows]
        if numbers and self.read.byte() % 4 == 0:
            longer: list[Any] = self.read.pick([numbers, rows, data])
            longer.append(longer[0])
        columns = Columns(forms, tuple(numbers), tuple(rows), tuple(data))
        model = self.read.pick(("m", "m", "m", "n", ""))
        batch = InferBatch(model, self.read.pick((0, 0, 1, 2)), columns, self.read.pick(ODD))
        self._from(self.hostile, [batch] * self.read.pick((1, 1, 1, 2)))

    def _give_back(self) -> None:
        self._from(self.hostile, [Return(tuple(self._handle() for _ in range(self.read.byte() % 4)))])

    def _map(self) -> None:
        message = Map(self._segment(), self.read.pick(ODD), self.read.pick((None, None, None, "", "/x", "/..")))
        if message.name is None and message.segment >> OWNER_SHIFT == self.hostile.peer:
            self.hostile.own.setdefault(message.segment, message.size)
        self._from(self.hostile, [message])

    def _unmap(self) -> None:
        self._from(self.hostile, [Unmap(self._segment())])

    def _cancel(self) -> None:
        self._from(self.hostile, [Cancel(self.read.byte() % 40)])

    def _small(self) -> None:
        message = self.read.pick(
            (Ping(1), Bye(), Hello(1, 1, "again", "memfd"), Hello(9, 1, "", ""), Ask(1, "models"), Ask(2, "none", "m"))
        )
        self._from(self.hostile, [message])

    def _leave(self) -> None:
        self.world.gone(self.hostile)


def run(data: bytes) -> None:
    Course(data).run()
