"""Sends requests to the broker on behalf of HTTP and gRPC clients. Invariant: an error in one request affects only the
response to that request; the endpoint decides its form."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import Internal, ServeError
from shmserve.gateway.auth.header_forwarding import merged
from shmserve.gateway.kserve.answers import Held
from shmserve.gateway.kserve.plans import InputPlan, RequestPlan
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.caller_shares import Creditor, Payer, release
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.gateway.upstream.device_regions import DeviceRegion
from shmserve.gateway.upstream.documents import BrokerQuery
from shmserve.gateway.upstream.link import GatewayLink, Piece, allocate, placed_in_slices, stored
from shmserve.gateway.upstream.regions import Region, Regions
from shmserve.protocol.messages import INLINE_BYTES, Reply
from shmserve.session import WINDOW, StreamTicket, Ticket
from shmserve.session.foreign_memory import RegionPart

log = logging.getLogger("shmserve.gateway")
_CACHED_MODELS = 1024
NO_TIME = 0.0
"""Passed as the current time, which the session uses only for requests with a client timeout."""


class ChargedTicket(Ticket):
    """A call with one reply, charged to the client that waits for it."""

    __slots__ = ("input_bytes", "payer")

    payer: Creditor | None
    input_bytes: int


class PendingCall(ChargedTicket):
    """A call that is released before its reply or error is passed on."""

    __slots__ = ()

    def settle(self, answer: Any) -> None:
        release(self)
        try:
            self.take(answer)
        except Exception as error:
            self.failed(serve_error(error))

    def fail(self, error: ServeError) -> None:
        release(self)
        self.failed(error)

    @abstractmethod
    def take(self, answer: Any) -> None: ...

    @abstractmethod
    def failed(self, error: ServeError) -> None: ...


ReplyCheck: TypeAlias = "Callable[[PendingInference, Reply], bool]"


class PendingInference(PendingCall):
    __slots__ = ("_check",)

    _check: ReplyCheck | None

    def check_reply_with(self, check: ReplyCheck | None) -> None:
        """`check` is called with this call and the reply. It returns False if it has sent the request again."""
        self._check = check

    def settle(self, answer: Any) -> None:
        check, self._check = self._check, None
        if check is not None:
            reply: Any = answer.reply if type(answer) is Held else answer
            try:
                if not check(self, reply):
                    return
            except ServeError as error:
                self.fail(error)
                return
        super().settle(answer)


class PendingQuery(PendingCall):
    """A query. Its document is passed to `then`, an error to `otherwise`."""

    __slots__ = ("_otherwise", "_query", "_then")

    def __init__(
        self, query: BrokerQuery, then: Callable[[Any], None], otherwise: Callable[[ServeError], None]
    ) -> None:
        self._query = query
        self._then = then
        self._otherwise = otherwise

    def take(self, answer: Any) -> None:
        self._then(self._query.show(answer))

    def failed(self, error: ServeError) -> None:
        try:
            self._then(self._query.failed(error))
        except ServeError as failure:
            self._otherwise(failure)


class PendingStream(StreamTicket):
    """A request with any number of responses, charged to the client that waits for them. Each part is a Held."""

    __slots__ = ("input_bytes", "payer")

    def __init__(self, window: int = WINDOW) -> None:
        super().__init__(window)
        self.payer: Creditor | None = None
        self.input_bytes = 0

    def part(self, result: Any, last: bool) -> None:
        if last:
            release(self)
        super().part(result, last)

    def fail(self, error: ServeError) -> None:
        release(self)
        super().fail(error)

    def settle(self, answer: Any) -> None:
        """Handles the single reply of a model that is not decoupled as the last part."""
        if type(answer) is Reply:
            answer = Held(answer, [[tensor.data] for tensor in answer.outputs if type(tensor.data) is bytes])
        self.part(answer, True)


Charge = ChargedTicket | PendingStream


def withdraw(link: GatewayLink, ticket: Charge) -> None:
    """Cancels a request whose client no longer waits."""
    release(ticket)
    link.cancel(ticket)


def serve_error(error: Exception) -> ServeError:
    """The error that the client receives. An unexpected exception is logged."""
    if isinstance(error, ServeError):
        return error
    log.error("cannot forward a response", exc_info=error)
    return Internal("the gateway could not forward the response; see its log")


def ask(link: GatewayLink, payer: Payer, ticket: Charge, query: BrokerQuery) -> None:
    """Sends a query. Raises the errors that the client receives, such as Unavailable if a share is exceeded."""
    payer.queries.charge(ticket, 0)
    try:
        link.session.ask(ticket, query.what, NO_TIME, query.model, query.version or None, None, query.body)
    except BaseException:
        release(ticket)
        raise
    link.send_soon()


_Key = tuple[str, str]
"""Model and version."""


class _ConfigQuery(Ticket):
    """Asks for a model's configuration. What `read` takes from it is kept in `known`."""

    __slots__ = ("_key", "_known", "_read")

    def __init__(self, known: BoundedCache[_Key, Any], key: _Key, read: Callable[[Any], Any]) -> None:
        self._known = known
        self._key = key
        self._read = read

    def settle(self, answer: Any) -> None:
        self._known.put(self._key, self._read(answer))

    def fail(self, error: ServeError) -> None:
        self._known.pop(self._key, None)


def _output_names(config: Any) -> list[str]:
    return [output["name"] for output in config.get("output", ())]


def _is_no_ensemble(config: Any) -> bool:
    return "ensemble_scheduling" not in config


class ModelRequest(Struct):
    """A request to a model. `pieces`: the bytes of the plan's inputs. `forwarded`: headers to pass on to the model."""

    payer: Payer
    model: str
    version: str
    plan: RequestPlan
    pieces: Sequence[Piece]
    id: str
    forwarded: dict[str, str] | None = None


class RequestSender:
    """Sends the requests of one endpoint. HTTP and gRPC share `regions`."""

    def __init__(self, link: GatewayLink, regions: Regions) -> None:
        self.link = link
        self.regions = regions
        self._model_outputs: BoundedCache[_Key, list[str]] = BoundedCache(_CACHED_MODELS)
        """The outputs of models. Empty: not known yet, or different from the configuration."""
        self._by_workers: BoundedCache[_Key, bool] = BoundedCache(_CACHED_MODELS)
        """Whether workers can write the outputs of models into regions: for an ensemble they cannot."""

    def local_input(self, spec: InputPlan) -> Any:
        """The bytes of an input from the JSON or from a region, or the part of the region that workers read in
        place."""
        if spec.place is None:
            return b"" if spec.data is None else spec.data
        region = self.regions.find(spec.place)
        part = region.part(spec.place)
        if part is not None:
            return part
        assert isinstance(region, Region)
        size = spec.place.size
        target: Piece = bytearray(size) if size <= INLINE_BYTES else allocate(self.link.session.memory, size)
        region.read_into(spec.place, target)
        return target

    def placed(self, pieces: Sequence[Piece]) -> SlicedWork[list[Piece]]:
        """Copies large inputs to memory that workers can read, in slices."""
        placed = []
        for piece in pieces:
            placed.append(piece if isinstance(piece, RegionPart) else (yield from self._placed(piece)))
        return placed

    def placed_tensors(self, specs: Sequence[InputPlan]) -> SlicedWork[list[InputPlan]]:
        placed = []
        for spec in specs:
            data: Any = None if spec.data is None else (yield from self._placed(spec.data))
            placed.append(spec if data is spec.data else replace(spec, data=data))
        return placed

    def _placed(self, piece: Piece) -> SlicedWork[Piece]:
        return placed_in_slices(self.link.session.memory, piece)

    def output_regions(self, plan: RequestPlan) -> dict[str, Region | DeviceRegion] | None:
        """The regions that outputs are written to."""
        return {name: self.regions.find(place) for name, place in plan.places.items()} if plan.places else None

    def _outputs(self, request: ModelRequest, window: int) -> Any:
        """The requested outputs. An output with a target region gets the part that the worker writes, if possible."""
        parts, plan = {}, request.plan
        for name, place in plan.places.items():
            region = self.regions.find(place)
            on_gpu = isinstance(region, DeviceRegion)
            part = region.part(place) if on_gpu or not window else None
            if part is not None and (on_gpu or self._written_by_workers(request.model, request.version)):
                parts[name] = part
        outputs = plan.outputs or ()
        return {**(outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)), **parts}

    def _written_by_workers(self, model: str, version: str) -> bool:
        """Whether workers can write all outputs. The first request of a model queries its configuration, for later
        requests."""
        known = self._by_workers.get((model, version))
        if known is None:
            self._by_workers.put((model, version), False)
            self._learn(self._by_workers, (model, version), _is_no_ensemble)
        return bool(known)

    def _learn(self, known: BoundedCache[_Key, Any], key: _Key, read: Callable[[Any], Any]) -> None:
        model, version = key
        self.link.session.ask(_ConfigQuery(known, key, read), "config", NO_TIME, model, version or None)
        self.link.send_soon()

    def _wanted(self, request: ModelRequest, outputs: list[str]) -> tuple[list[str] | None, ReplyCheck | None]:
        """The outputs to request, and the check of the reply. None if they are all outputs of the model, which most
        clients name: such a request is encoded and checked faster, and can go straight to a worker over a lease."""
        key = (request.model, request.version)
        known = self._model_outputs.get(key)
        if known is None:
            return outputs, partial(self._learn_outputs, key)
        if known == outputs:
            return None, partial(self._check_outputs, request, outputs)
        return outputs, None

    def _learn_outputs(self, key: _Key, ticket: PendingInference, reply: Reply) -> bool:
        """Called when the first request of a model has succeeded."""
        self._model_outputs.put(key, [])
        self._learn(self._model_outputs, key, _output_names)
        return True

    def _check_outputs(self, request: ModelRequest, outputs: list[str], ticket: PendingInference, reply: Reply) -> bool:
        """If the model's outputs differ from its configuration, the request is sent again, and outputs are named from
        now on. `ticket` is an argument because a partial of the ticket that holds it would keep its memory alive."""
        if [tensor.name for tensor in reply.outputs] == outputs:
            return True
        self._model_outputs.put((request.model, request.version), [])
        release(ticket)
        self.infer(ticket, request)
        return False

    def infer(self, ticket: Charge, request: ModelRequest, window: int = 0) -> None:
        """Raises the errors that the client receives, such as Unavailable if a share is exceeded. `window`: stream
        window; 0: the request has a single reply."""
        link, payer, plan, pieces = self.link, request.payer, request.plan, request.pieces
        options = plan.options
        payer.charge(ticket, sum([len(piece) for piece in pieces if not isinstance(piece, RegionPart)]))
        try:
            if names := plan.in_regions:
                ticket.payer = self.regions.use(payer, names)
            inputs = stored(link.session.memory, plan.inputs, pieces)
            outputs = self._outputs(request, window) if plan.places else plan.outputs
            if isinstance(ticket, PendingInference):
                check: ReplyCheck | None = None
                if type(outputs) is list and options.sequence is None:
                    outputs, check = self._wanted(request, outputs)
                ticket.check_reply_with(check)
            parameters, forwarded = options.parameters, request.forwarded
            link.session.infer(
                ticket,
                request.model,
                inputs,
                NO_TIME,
                outputs,
                request.version or None,
                None,
                options.priority,
                options.sequence,
                options.sequence_start,
                options.sequence_end,
                parameters if forwarded is None else merged(parameters, forwarded),
                request.id or None,
                window,
                payer.token,
                payer.name,
            )
        except BaseException:
            release(ticket)
            raise
        link.send_soon()
