"""Kills worker processes that hang, violate the protocol, or are no longer needed; and watches for those that hang."""

from __future__ import annotations

from shmserve.core.effects import Kill
from shmserve.core.records import Instance, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState


def kill(state: State, version: Version, instance: Instance, reason: str) -> None:
    """From now on the worker gets no messages and its messages are ignored. Its requests and memory are released when
    the process has ended. An instance that was stopping is not restarted."""
    if instance.state is InstanceState.KILLED:
        return
    if instance.state is InstanceState.STOPPING:
        instance.retiring = True
    instance.move(InstanceState.KILLED, reason)
    if instance in version.idle:
        version.idle.remove(instance)
    text = f"killing instance '{instance.spec.name}' of {version.label}: {reason}"
    state.log_version("error", text, version, instance)
    state.effects.append(Kill(instance.peer, reason))


def kill_for_protocol_error(state: State, version: Version, instance: Instance, what: str) -> None:
    """Kills the worker, because a protocol error may mean that its memory is corrupted."""
    kill(state, version, instance, f"it violated the protocol: unexpected {what}")


def expect_end(state: State, instance: Instance, after_ns: int) -> None:
    """The process ends within this time, or `handover.overdue` ends it."""
    instance.due = state.now + after_ns
    state.set_timer(instance.due, Timer.OVERDUE, instance)


def watch(state: State, version: Version, instance: Instance, since: int) -> None:
    """Sets the execution limit timer of an instance that has run a request since then. There is at most one."""
    if version.limit_ns and not instance.watched:
        instance.watched = True
        state.set_timer(since + version.limit_ns, Timer.HANG, instance)


def kill_hung(state: State, version: Version, instance: Instance) -> None:
    """Kills the worker, because it has exceeded the execution limit."""
    instance.hung = True
    limit = version.limit_ns / 1e9
    text = f"it has run one batch for more than {limit:g} s (--execution-limit-secs, execution_limit_secs)"
    kill(state, version, instance, text)
