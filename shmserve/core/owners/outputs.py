"""The outputs of requests: produced by a worker, held or pinned by whoever receives them, passed on, and dropped.

Invariant: no other module adds or releases a hold of a requester on an output. A requester decides how it holds
outputs: a client until it returns them, the run of an ensemble by pins.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.ledger import Ledger
from shmserve.core.records import Instance, Request, Requester
from shmserve.core.service.graph import handles_of
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Tensor


class Outputs:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def produce(self, instance: Instance, request: Request, tensors: Iterable[Tensor]) -> bool:
        """A worker's outputs go to the requester. False, without any change: the worker may not give some of them."""
        client, ledger, caller, forwarded = request.client, self._ledger, instance.caller, request.forwarded
        handles: list[Handle] = []
        for tensor in tensors:
            data = tensor.data
            if isinstance(data, bytes):
                continue
            if isinstance(data, int):
                return False
            for handle in data:
                owner = handle.segment >> OWNER_SHIFT
                if forwarded is not None and owner not in (0, instance.peer) and _is_input(request, handle):
                    if owner == client.number:
                        forwarded.add(handle)
                    else:
                        handles.append(handle)
                elif caller is not None and ledger.may_pass_on(caller, handle, request.audience):
                    handles.append(handle)
                elif owner == instance.peer:
                    if handle in handles or not ledger.is_new(handle, request.audience):
                        return False
                    handles.append(handle)
                elif not client.has_placed(handle):
                    return False
        request.requester.hold(handles)
        return True

    def refuse(self, instance: Instance, tensors: Iterable[Tensor]) -> None:
        """Returns to a worker outputs that no requester will get."""
        ledger = self._ledger
        for handle in handles_of(tensors):
            own = handle.segment >> OWNER_SHIFT == instance.peer
            if own and ledger.block_of(handle) is None:  # otherwise it is held, possibly by the worker
                ledger.send_back(handle)

    def pass_on(self, request: Request, handles: Iterable[Handle]) -> None:
        """Outputs that a run or the cache has pinned also go to the requester."""
        request.requester.hold(request.client.of_others(handles))

    def drop(self, requester: Requester, tensors: Iterable[Tensor]) -> None:
        """The requester will not get these outputs, or needs them no longer."""
        requester.drop(handles_of(tensors))

    def pin(self, handles: Iterable[Handle]) -> None:
        """Keeps outputs, for the cache or for a comparison, until `unpin`."""
        for handle in handles:
            self._ledger.keep(handle)

    def unpin(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self._ledger.unpin(handle)


def _is_input(request: Request, handle: Handle) -> bool:
    return any(isinstance(tensor.data, tuple) and handle in tensor.data for tensor in request.inputs)
