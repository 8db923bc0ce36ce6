"""Memory grants: decides which waiting instances get memory to load, and puts other versions to sleep to free it.

Versions with requests come first, before versions that only load. Users take turns (`shares`); the versions of a user
come in the order in which they were woken. The first in line for a place (the host, a GPU) gets its memory before all
others, but not before it can load at once: memory granted earlier would be useless to everyone. Versions that blocked
instances wait for come before all, in any order. To free memory for it, idle versions go to sleep, the least valuable
(`value`) first, within the shares of users. If that is not enough after `Limits.memory_wait_ns`, the busy version that
has been awake for the longest time yields: it starts nothing more, finishes what runs and sleeps. Its queued requests
then wait in line.

Invariant: memory is granted only within the budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from itertools import chain

from msgspec import Struct

from shmserve.core.models import loading, memory, sleep, value
from shmserve.core.models.memory import BytesByPlace, megabytes
from shmserve.core.models.shares import Shares, choose_waker
from shmserve.core.records import Instance, Request, Version
from shmserve.core.state import State, Timer
from shmserve.core.states import InstanceState, RequestState, VersionState
from shmserve.core.termination import kill

_I, _V = InstanceState, VersionState
_LEAVING = (_I.GOING_TO_SLEEP, _I.STOPPING)


class _Claim(Struct, eq=False):
    """Instances of a version that wait for memory."""

    version: Version
    instances: list[Instance]
    since: int
    extra: bool
    """The version can serve without them, or could not load them again. No version makes room for them, except idle
    ones for a version that cannot serve without them."""
    serves: bool
    """Other instances of the version serve or load."""
    user: str = ""
    """The user for whom the version wakes; "": requests do not wait for it."""
    turn: tuple[int, int] = (0, 0)
    """How many of the user's versions come before this one, and when the user's last wake was."""


def make_room(state: State, now: int) -> list[tuple[Version, str]]:
    """Runs at the end of a turn. Returns the versions whose loads can never fit, with the reasons."""
    if not (state.memory.changed or state.memory.yielding or state.memory.short_since):
        return []
    _let_yielding_sleep(state)
    called = _called(state)
    for version in called:
        if version.yielding:
            _end_yielding(state, version)
    used = memory.used(state)
    over = memory.shortage(state, used)
    _settle_shortage(state, over, called, now)
    refused: list[tuple[Version, str]] = []
    waits = in_line = False
    slots = loading.free_slots(state)
    blocked = set(over)
    stays = memory.fixed(state)
    for claim in _claims(state, called):
        claim.instances = [instance for instance in claim.instances if instance.state is _I.WAITING]
        if not claim.instances:  # its version sleeps for another one
            continue
        if slots <= 0:  # the end of a load starts another turn
            in_line = True
            continue
        need = memory.needed(claim.version, claim.instances)
        why = _never_fits(state, claim, need, stays)
        if why and claim.extra and not any(instance.joining for instance in claim.instances):
            continue
        if why:
            if sleeping := [instance for instance in claim.instances if instance.sleeping]:
                sleep.cannot_wake(state, claim.version, sleeping, why, now)
            if len(sleeping) < len(claim.instances):
                refused.append((claim.version, why))
            continue
        slots -= len(claim.instances)
        limited = {place for place, size in need.items() if size and memory.budget_of(state, place)}
        # Blocked instances may wait for several versions, of which only one fits before they go on.
        behind = limited & (over.keys() if claim.version in called else blocked)
        short = _missing(state, used, need)
        if short and not claim.extra and not behind:
            _take_from_lost(state, used, short)
            short = _missing(state, used, need)
        if not short and not behind:
            for instance in claim.instances:
                state.memory.holders[instance] = claim.version
            used.update(need)
            _log_waking(state, claim, need)
        elif not claim.extra:
            if not behind:
                _log_waking(state, claim, need, *_free(state, short, claim, need, called, now))
                state.deadlock_possible = True
            blocked |= limited
            waits = True
        else:
            waits = waits or not claim.serves  # the next request needs it
            if claim.version.recovering and not behind:
                remaining = _remaining_shortage(state, short, now)
                resting = _resting(state, _candidates(state, None))
                if _are_enough(state, remaining, resting):
                    _let_sleep(state, remaining, resting, now)
    if not blocked and not in_line:
        for version in list(state.memory.yielding):  # the memory was found elsewhere
            _end_yielding(state, version)
    loading.start_waiting(state)
    state.memory.changed = waits
    return refused


def _settle_shortage(state: State, over: BytesByPlace, called: Container[Version], now: int) -> None:
    """Handles instances that have grown beyond the budget."""
    if not over:
        state.memory.short_since = 0
        return
    if not state.memory.short_since:
        state.memory.short_since = now
        what = ", ".join(
            f"{megabytes(size + memory.budget_of(state, place))} of {memory.name_of(place)}, and the budget is "
            f"{megabytes(memory.budget_of(state, place))} ({memory.setting_of(place)})"
            for place, size in over.items()
        )
        state.log("warning", f"models use {what}")
    for instance, version in list(state.memory.holders.items()):
        sizes = zip((memory.HOST, instance.spec.device), instance.memory, strict=True)
        large = [(p, size) for p, size in sizes if p in over and size > memory.budget_of(state, p)]
        if instance.state is _I.STARTING and large:
            place, size = large[0]
            instance.load_error = (
                f"it needs more than {megabytes(size)} of {memory.name_of(place)} to load, and the budget is "
                f"{megabytes(memory.budget_of(state, place))} ({memory.setting_of(place)})"
            )
            kill(state, version, instance, instance.load_error)
    _free(state, over, None, BytesByPlace(), called, now)


# ------------------------------------------------------------------------------------ claims


def _claims(state: State, called: Container[Version]) -> list[_Claim]:
    """Collects the instances that wait for memory. A waking version needs only its first instance, a version that loads
    for the first time needs all."""
    claims: dict[object, _Claim] = {}
    for version, instance in list(state.loading.queue):
        if instance.state is not _I.WAITING or instance in state.memory.holders:
            continue
        serves = any((other.usable and not other.waits) or _loads(state, other) for other in version.instances)
        needed = not serves and version.waits > 0
        if instance.sleeping and not (serves or needed or _is_awake(version)):  # nothing waits for it any more
            sleep.back_to_sleep(state, version, instance)
            continue
        extra = (
            instance.joining
            or instance.lost
            or (instance.sleeping and (not needed or instance.spec.passive or (version, False, True) in claims))
        )
        # Each instance that could not load again is tried alone, and a wake does not also wait for memory for new
        # instances.
        key = instance if instance.lost else (version, extra, instance.sleeping)
        claim = claims.get(key)
        if claim is None:
            claim = claims[key] = _Claim(version, [], version.sleep_state.woken or version.began, extra, serves)
        claim.instances.append(instance)
    _take_turns(state, claims.values())
    return sorted(
        claims.values(),
        key=lambda one: (one.extra, one.version not in called, not one.version.waits, *one.turn, one.since),
    )


def _take_turns(state: State, claims: Iterable[_Claim]) -> None:
    counts: Counter[str] = Counter()
    for claim in sorted(claims, key=lambda one: one.since):
        if claim.version.waits:
            last = choose_waker(state, claim.version)
            claim.user = claim.version.sleep_state.waker
            claim.turn = counts[claim.user], last
            counts[claim.user] += 1


def _loads(state: State, instance: Instance) -> bool:
    """True if the instance is loading, or has been granted memory to load."""
    if instance.spec.passive or instance.over:
        return False
    return instance.state is _I.STARTING or (instance.state is _I.WAITING and instance in state.memory.holders)


def _is_awake(version: Version) -> bool:
    """True if the version has an instance that is not asleep. It may be blocked or waiting for a restart."""
    return any(one.loaded and not (one.sleeping or one.over or one.spec.passive) for one in version.instances)


def _called(state: State) -> set[Version]:
    """Versions with queued requests that a blocked instance or a yielding version waits for. They come first and do not
    yield, because no other version may be able to make room before these requests are answered."""
    called: set[Version] = set()
    todo: list[Request] = []
    for instance in chain(state.blocked_instances, *(version.instances for version in state.memory.yielding)):
        if instance.caller is not None:
            todo += instance.caller.requests.values()
    while todo:
        request = todo.pop()
        run = state.runs.get(request.number)
        if run is not None:
            todo += run.in_flight
        elif request.state is RequestState.QUEUED:
            called.update(memory.needed_by(state, request.version))
    return called


def _never_fits(state: State, claim: _Claim, need: BytesByPlace, stays: BytesByPlace) -> str:
    """Why the claim can never fit; "" if it can. If its need is only estimated, it is reduced to what is available.
    `stays`: the memory of versions that stay loaded."""
    version = claim.version
    own = memory.of_version(version, _staying(state, version)) if not claim.extra else BytesByPlace()
    for place, size in need.items():
        budget = memory.budget_of(state, place)
        if not budget or size + stays[place] + own[place] <= budget:
            continue
        stays = memory.fixed(state, version)
        remaining = budget - stays[place] - own[place]
        if size <= remaining:
            continue
        is_guess = not version.sleep_state.host and not version.sleep_state.memory.configured
        if is_guess and remaining > 0:
            need[place] = remaining
            memory.guess_less(version, place, remaining // len(claim.instances))
            continue
        users = (("models that stay loaded", stays[place]), ("its other instances", own[place]))
        taken = " and ".join(f"{who} use {megabytes(used)}" for who, used in users if used)
        return (
            f"it needs {megabytes(size)} of {memory.name_of(place)}, and the budget is {megabytes(budget)}"
            f"{f', of which {taken}' if taken else ''} ({memory.setting_of(place)})"
        )
    return ""


def _staying(state: State, version: Version) -> list[Instance]:
    """The version's instances that keep their memory until the version sleeps."""
    return [one for one in version.instances if one in state.memory.holders and not (one.over or one.asleep_soon)]


def _missing(state: State, used: BytesByPlace, need: BytesByPlace) -> BytesByPlace:
    after = used + need
    return BytesByPlace({place: size for place, size in memory.shortage(state, after).items() if need[place]})


def _log_waking(state: State, claim: _Claim, need: BytesByPlace, sleeping: int = 0, waits: bool = False) -> None:
    version = claim.version
    if not version.sleep_state.woken or version.sleep_state.logged:
        return
    version.sleep_state.logged = True
    size = " and ".join(f"{megabytes(size)} of {memory.name_of(place)}" for place, size in need.items() if size)
    more = f", {sleeping} model{'s go' if sleeping > 1 else ' goes'} to sleep" if sleeping else ""
    more += ", which busy models use" if waits else ""
    state.log_version("info", f"model '{version.model}' is waking for a request (needs {size}{more})", version)


# ------------------------------------------------------------------------------------ making room


def _free(
    state: State, short: BytesByPlace, claim: _Claim | None, need: BytesByPlace, called: Container[Version], now: int
) -> tuple[int, bool]:
    """Puts versions to sleep until these bytes will be free: for a claim, or because models have grown. Returns how
    many, and whether it has to wait for busy versions."""
    wait = state.limits.memory_wait_ns
    since = state.memory.short_since if claim is None else claim.since
    short = _remaining_shortage(state, short, now)
    candidates = _candidates(state, None if claim is None else claim.version)
    shares: Shares | None = None
    if claim is None or (claim.user and claim.version not in called):
        shares = Shares(state, "" if claim is None else claim.user, need)
        last_used = {version: sleep.last_used(version) for version in dict.fromkeys(state.memory.holders.values())}
        kept = shares.kept(last_used, now)
        candidates = [version for version in candidates if version not in kept]
    sleeping = _let_sleep(state, short, _resting(state, candidates), now)
    if max(short.values(), default=0) <= 0:
        return sleeping, False
    busy = [version for version in candidates if sleep.is_busy(state, version) and not version.yielding]
    busy = [version for version in busy if version not in called]
    later = [since + wait, *(since + wait for since in state.memory.yielding.values())]
    at_once = {version for version in busy if shares is not None and shares.comes_before(version)}
    for version in sorted(busy, key=lambda one: (one not in at_once, sleep.ready_since(one))):
        due = now if version in at_once else max(since, sleep.ready_since(version)) + wait
        if due > now:
            later.append(due)
        elif _take(state, version, short):
            _yield(state, version, now)
    _decide_again(state, min((at for at in later if at > now), default=now + wait), now)
    return sleeping, True


def _take_from_lost(state: State, used: BytesByPlace, short: BytesByPlace) -> None:
    """Takes the memory of instances that could not load again and have no process until the next attempt."""
    for instance, version in list(state.memory.holders.items()):
        charge = memory.charge_of(version, instance)
        if instance.state is _I.BACKOFF and instance.lost and any(charge[place] for place in short):
            used.subtract(charge)
            del state.memory.holders[instance]


def _remaining_shortage(state: State, short: BytesByPlace, now: int) -> BytesByPlace:
    """These bytes minus those that will be free soon."""
    wait = state.limits.memory_wait_ns
    remaining = BytesByPlace(short)
    for instance, version in state.memory.holders.items():
        soon = (
            version in state.changes.to_sleep
            or now - state.memory.yielding.get(version, now - wait) < wait
            or _ends(version)
        )
        if instance.state in _LEAVING or instance.asleep_soon or instance.state is _I.KILLED or soon:
            remaining.subtract(memory.charge_of(version, instance))
    return remaining


def _candidates(state: State, keep: Version | None) -> list[Version]:
    return [version for version in dict.fromkeys(state.memory.holders.values()) if _may_sleep(version, keep)]


def _resting(state: State, candidates: list[Version]) -> list[Version]:
    """The versions that can sleep now."""
    return [
        version for version in candidates if not sleep.is_busy(state, version) and version not in state.changes.to_sleep
    ]


def _are_enough(state: State, short: BytesByPlace, resting: list[Version]) -> bool:
    remaining = BytesByPlace(short)
    for version in resting:
        remaining.subtract(memory.of_version(version, state.memory.holders))
    return max(remaining.values(), default=0) <= 0


def _let_sleep(state: State, short: BytesByPlace, resting: list[Version], now: int) -> int:
    """Puts versions to sleep and reduces `short` by their memory. Returns how many go to sleep."""
    leased = {lease.version for lease in state.leases.values()}
    chosen = _choose(state, short, resting, leased, now)
    for version in chosen:
        if version in leased:
            state.changes.to_sleep[version] = True
        else:
            state.log("debug", f"{version.label} goes to sleep: others need its memory", model=version.model)
            sleep.put_to_sleep(state, version)
    if chosen:
        value.has_evicted(state, len(chosen), now)
    return len(chosen)


def _choose(
    state: State, short: BytesByPlace, resting: list[Version], leased: Container[Version], now: int
) -> list[Version]:
    """Chooses versions to sleep and reduces `short` by their memory: next is always the one whose value is the least
    for the part of the shortage that it would end."""
    value.count_uses(state)
    remaining = {
        version: (
            memory.stays_loaded(version),
            version in leased,
            value.of_version(state, version, used, now),
            used,
            memory.of_version(version, state.memory.holders),
        )
        for version, used in ((version, sleep.last_used(version)) for version in resting)
    }
    chosen: list[tuple[Version, BytesByPlace]] = []
    while max(short.values(), default=0) > 0:
        best: Version | None = None
        best_key: tuple[bool, bool, float, int] | None = None
        for version, (stays, lent, worth, used, charge) in remaining.items():
            part = sum(min(charge[place], size) / size for place, size in short.items() if size > 0)
            key = (stays, lent, worth / part, used) if part > 0 else None
            if key is not None and (best_key is None or key < best_key):
                best, best_key = version, key
        if best is None:
            break
        charge = remaining.pop(best)[-1]
        short.subtract(charge)
        chosen.append((best, charge))
    needed = []
    for version, charge in reversed(chosen):  # those chosen later may free enough without it
        if all(size + charge[place] <= 0 for place, size in short.items()):
            short.update(charge)
        else:
            needed.append(version)
    return needed[::-1]


def _decide_again(state: State, at: int, now: int) -> None:
    if not now < state.memory.room_at <= at:
        state.memory.room_at = at
        state.set_timer(at, Timer.ROOM, None)


def _may_sleep(version: Version, keep: Version | None) -> bool:
    if version is keep or version.state not in sleep.STATES or version.asleep or _ends(version):
        return False
    if memory.stays_loaded(version) and not (keep is not None and keep.model == version.model):
        return False
    return any(instance.usable for instance in version.instances)


def _ends(version: Version) -> bool:
    """True if the version's processes will be stopped at the end of the turn."""
    return version.state is _V.UNLOADING and version.finished


def _take(state: State, version: Version, short: BytesByPlace) -> bool:
    """Subtracts the memory of this version from `short`, if that helps."""
    charge = memory.of_version(version, state.memory.holders)
    if not any(size > 0 and charge[place] for place, size in short.items()):
        return False
    short.subtract(charge)
    return True


def _yield(state: State, version: Version, now: int) -> None:
    state.memory.yielding[version] = now
    version.yielding = True
    text = f"{version.label} makes room for others: it finishes what runs, and its queue waits for its turn"
    state.log_version("info", text, version)


def _let_yielding_sleep(state: State) -> None:
    for version in list(state.memory.yielding):
        if version.state not in sleep.STATES or version.asleep:
            _end_yielding(state, version)
        elif not sleep.is_running(state, version):
            sleep.put_to_sleep(state, version)
            _end_yielding(state, version)


def _end_yielding(state: State, version: Version) -> None:
    del state.memory.yielding[version]
    version.yielding = False
    state.to_dispatch[version] = None
