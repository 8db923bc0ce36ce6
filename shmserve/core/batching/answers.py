"""Memory in workers' results: validated, then given to the caller or returned to the worker."""

from __future__ import annotations

from shmserve.core.records import Instance, Request
from shmserve.core.requests import completion
from shmserve.core.state import State
from shmserve.protocol.messages import OWNER_SHIFT, Handle
from shmserve.protocol.worker_messages import Row


def take(state: State, instance: Instance, request: Request, row: Row) -> bool:
    """Gives the memory of the row to the caller. Returns False, without any change, if the worker may not give some of
    it."""
    client, ledger, caller = request.client, state.ledger, instance.caller
    handles: list[Handle] = []
    for tensor in row.outputs:
        data = tensor.data
        if isinstance(data, bytes):
            continue
        if isinstance(data, int):
            return False
        for handle in data:
            owner = handle.segment >> OWNER_SHIFT
            if request.aliases and owner not in (0, instance.peer) and _is_input(request, handle):
                if owner != client.number:
                    handles.append(handle)
            elif caller is not None and ledger.may_pass_on(caller, handle, request.audience):
                handles.append(handle)
            elif owner == instance.peer:
                if handle in handles or not ledger.is_new(handle, request.audience):
                    return False
                handles.append(handle)
            elif not client.has_placed(handle):
                return False
    if request.step_of:
        for handle in handles:
            ledger.keep(handle)
    else:
        completion.give(state, client, handles)
    return True


def send_back(state: State, instance: Instance, row: Row) -> None:
    """Returns outputs that no caller will receive."""
    for tensor in row.outputs:
        if isinstance(tensor.data, tuple):
            for handle in tensor.data:
                own = handle.segment >> OWNER_SHIFT == instance.peer
                if own and state.ledger.block_of(handle) is None:  # otherwise it is held, possibly by the worker
                    state.ledger.send_back(handle)


def _is_input(request: Request, handle: Handle) -> bool:
    return any(isinstance(tensor.data, tuple) and handle in tensor.data for tensor in request.inputs)
