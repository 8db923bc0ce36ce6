"""Why a candidate was chosen, in sentences with the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, log

from msgspec.structs import replace

from shmserve.tools.load.report.table import rate_text
from shmserve.tools.tune.confirm import Confirmed
from shmserve.tools.tune.fit import Fit
from shmserve.tools.tune.goal import MIB, MS
from shmserve.tools.tune.predict import PRECISION
from shmserve.tools.tune.space import Candidate
from shmserve.tools.tune.tuner import TuningOutcome

TIMED_OUT = "Request timeout expired"
"""The complete error text of the server, which is Triton's."""
HOW_TO_RAISE = "; raise default_timeout_microseconds or add instances"
LATE = 0.3
"""Lateness of the load generator, as a share of the latency target, from which it is reported."""


def reasons(outcome: TuningOutcome) -> list[str]:
    """Sentences about the chosen candidate, or why there is none."""
    chosen = outcome.chosen
    if chosen is None:
        return list(_nothing(outcome))
    results = [
        *_result(outcome, chosen),
        *_against_now(outcome, chosen),
        *_instances(outcome, chosen),
        *_threads(outcome, chosen),
        *_batch(outcome, chosen),
        *_delay(outcome, chosen),
        *_padding(outcome, chosen),
    ]
    return [*results, *(f"Not tried: {text}." for text in outcome.times.skipped)]


def _nothing(outcome: TuningOutcome) -> Iterator[str]:
    goal, times = outcome.goal, outcome.times
    if outcome.interrupted or times.lone is None:
        return
    alone = f"{times.lone.p50_ns / MS:.2f} ms, p99 {times.lone.p99_ns / MS:.2f} ms"
    yield f"No setting holds {goal.target}. A request alone takes {alone}."
    minimum = min(times.memory.values(), default=0)
    if goal.memory and minimum > goal.memory:
        yield f"The smallest setting needs {minimum / MIB:,.0f} MiB, and --memory allows {goal.memory / MIB:,.0f} MiB."
    yield from _throughput(outcome)
    for each in outcome.confirmed:
        yield from _refusals(each)


def _result(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    goal, result, predicted = outcome.goal, outcome.of(chosen), outcome.prediction(chosen)
    limit = f"{goal.p99_ns / MS:g} ms"
    if result is None or not result.points:
        if predicted is not None:
            rate, p99_ms = rate_text(predicted.rate), predicted.p99_ns / MS
            yield f"Predicted, not measured: {rate} requests/s with a p99 of {p99_ms:.1f} ms."
        return
    if goal.rate:
        p99 = result.p99_ns(goal.rate)
        if result.holds_at(goal.rate):
            yield f"At {rate_text(goal.rate)} requests/s the p99 is {p99 / MS:.1f} ms; the limit is {limit}."
        else:
            closest = f"the closest has {p99 / MS:.1f} ms" if p99 < inf else "all are overloaded"
            yield f"No candidate holds {limit} at {rate_text(goal.rate)} requests/s; {closest}."
    elif result.rate:
        above = f"; {rate_text(result.failed_rate)} do not" if result.failed_rate > result.rate else ""
        yield f"{rate_text(result.rate)} requests/s hold a p99 of {limit}{above}."
    else:
        lowest = f"{rate_text(result.failed_rate)} requests/s"
        yield f"No rate that was measured holds a p99 of {limit}; the lowest was {lowest}."
    yield from _refusals(result)
    late = max((point.late_ns for point in result.points if not point.holds), default=0.0)
    if late > LATE * goal.p99_ns:
        yield (
            f"The load generator itself was late by up to {late / MS:.1f} ms where the p99 was exceeded: it needs more "
            "cores, and the server may be able to do more."
        )
    error = prediction_error(outcome, chosen)
    if error is not None:
        what = "p99" if goal.rate else "rate"
        yield f"The prediction of the {what} was off by {error:+.0%}."


def _refusals(result: Confirmed) -> Iterator[str]:
    """States that the queue limits of the model are the bottleneck, at the lowest rate at which they are."""
    refused = [point for point in result.points if point.refused and not point.holds]
    if refused:
        lowest = min(refused, key=lambda point: point.rate)
        how = HOW_TO_RAISE if lowest.refusal == TIMED_OUT else ""
        yield (
            f"At {rate_text(lowest.rate)} requests/s the queue limits of the model rejected {lowest.refused:,} "
            f"requests: {lowest.refusal}{how}."
        )


def prediction_error(outcome: TuningOutcome, candidate: Candidate) -> float | None:
    """The relative error of the predicted rate; with a target rate, of the predicted p99."""
    result = outcome.of(candidate)
    if result is None or result.predicted is None or not result.points:
        return None
    if outcome.goal.rate:
        predicted, seen = result.predicted.p99_ns, result.p99_ns(outcome.goal.rate)
        return predicted / seen - 1 if max(predicted, seen) < inf else None
    return result.predicted.rate / result.rate - 1 if result.rate else None


def _against_now(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    now = outcome.model.current
    if chosen == now:
        if not outcome.holds:
            return
        yield "The present settings are the best; nothing needs to change."
        return
    before, after = outcome.of(now), outcome.of(chosen)
    if before is None or after is None or not before.points or not after.points:
        return
    if before.error:
        yield f"The present settings could not be compared: {before.error}."
        return
    if outcome.goal.rate:
        p99 = before.p99_ns(outcome.goal.rate)
        reached = f"have a p99 of {p99 / MS:.1f} ms" if p99 < inf else "are overloaded"
        yield f"The present settings {reached} at this rate."
    elif before.rate and after.rate:
        gain = after.rate / before.rate
        yield f"The present settings reach {rate_text(before.rate)} requests/s; this is {gain:.2f} x as many."
    else:
        yield "The present settings do not hold the p99 at any rate that was measured."


def _instances(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    for text in _throughput(outcome):
        yield f"Instances: {chosen.instances}. {text}"
    result = outcome.of(chosen)
    maximum = outcome.memory_of(chosen)
    under_load = result.memory if result is not None else 0
    if maximum or under_load:
        low, high = sorted((under_load or maximum, maximum or under_load))
        text = _span(f"{low / MIB:,.0f}", f"{high / MIB:,.0f}")
        limit = f"; the limit is {outcome.goal.memory / MIB:,.0f} MiB" if outcome.goal.memory else ""
        largest = ", depending on the size of the batches" if " " in text else ""
        yield f"Memory: {text} MiB{largest}{limit}."


def _throughput(outcome: TuningOutcome) -> Iterator[str]:
    highest: dict[int, float] = {}
    for (count, _), rate in outcome.times.highest.items():
        highest[count] = max(highest.get(count, 0.0), rate)
    if len(highest) > 1:
        each = ", ".join(f"{count}: {rate_text(rate)}" for count, rate in sorted(highest.items()))
        yield f"Highest throughput in rows/s by number of instances: {each}."


def _threads(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    fits = {pair[1]: fit for pair, fit in outcome.fits.items() if pair[0] == chosen.instances}
    if chosen.threads and len(fits) > 1:
        each = ", ".join(f"{threads}: {fit.ns(chosen.batch) / MS:.2f} ms" for threads, fit in sorted(fits.items()))
        yield f"Threads: {chosen.threads}. A batch of {chosen.batch} rows takes, by number of threads, {each}."


def _batch(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    fit = outcome.fits.get((chosen.instances, chosen.threads))
    if fit is None:
        return
    length = outcome.goal.typical_length
    if outcome.model.max_rows < 2:
        yield f"Batches: none. A request takes {fit.ns(1, length) / MS:.2f} ms."
        return
    sizes = [
        size for size in outcome.model.batches(outcome.goal.rows) if size <= _measured(fit) or size <= chosen.batch
    ]
    each = ", ".join(f"{size}: {fit.ns(size, length) / MS:.2f} ms" for size in sizes)
    allowed = max(outcome.model.config.max_batch_size, chosen.batch)
    limit = f"up to {chosen.batch}"
    if chosen.delay_us and chosen.batch < allowed:
        limit = f"{chosen.batch} preferred, and up to {allowed} once the queue delay has passed"
    yield f"Batches: {limit}. A batch takes, by rows, {each} ({_formula(fit)})."
    largest = outcome.model.max_rows
    if chosen.batch < largest:
        if fit.ns(largest, length) > outcome.goal.p99_ns:
            yield f"A batch of {largest} rows would take longer than the p99 allows."
        else:
            rate = _best_of(outcome, largest)
            if rate:
                yield f"With batches of up to {largest}, the best prediction is {rate_text(rate)} requests/s."


def _measured(fit: Fit) -> int:
    return max(size for size, _ in fit.entries)


def _formula(fit: Fit) -> str:
    if not fit.affine:
        return "interpolated between measured times"
    parts = [f"{fit.batch_ns / MS:.3g} ms"]
    if fit.row_ns:
        parts.append(f"{fit.row_ns / MS:.3g} ms/row")
    if fit.element_ns:
        parts.append(f"{fit.element_ns / 1000:.3g} us/element")
    return f"{' + '.join(parts)}, off by at most {fit.error:.0%}"


def _best_of(outcome: TuningOutcome, batch: int) -> float:
    if outcome.goal.rate:
        return 0.0
    return max((each.rate for each in outcome.ranked if each.candidate.batch == batch), default=0.0)


def _delay(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    if outcome.model.config.max_batch_size < 2:
        return
    rest = replace(chosen, delay_us=0)
    results = {each.candidate.delay_us: each for each in outcome.ranked if replace(each.candidate, delay_us=0) == rest}
    now = f"{chosen.delay_us / 1000:g} ms" if chosen.delay_us else "none"
    if len(results) < 2 or outcome.goal.rate:
        yield f"Queue delay: {now}."
        return
    groups = list(_groups({delay: one.rate for delay, one in sorted(results.items())}))
    if len(groups) == 1:
        delays, rates = groups[0]
        yield f"Queue delay: {now}. Delays of {delays} make no difference: predicted {rates} requests/s."
    else:
        each = ", ".join(f"{delays}: {rates}" for delays, rates in groups)
        yield f"Queue delay: {now}. Predicted requests/s by delay: {each}."


def _groups(rates: Mapping[int, float]) -> Iterator[tuple[str, str]]:
    """Ranges of delays with the range of their rates, which the search cannot distinguish."""
    groups: list[list[int]] = []
    for delay, rate in rates.items():
        if groups and abs(log(rate / rates[groups[-1][0]])) <= PRECISION:
            groups[-1].append(delay)
        else:
            groups.append([delay])
    for group in groups:
        low, high = min(rates[delay] for delay in group), max(rates[delay] for delay in group)
        yield f"{_span(f'{group[0] / 1000:g}', f'{group[-1] / 1000:g}')} ms", _span(rate_text(low), rate_text(high))


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _padding(outcome: TuningOutcome, chosen: Candidate) -> Iterator[str]:
    fit = outcome.fits.get((chosen.instances, chosen.threads))
    if chosen.multiple and fit is not None and fit.element_ns:
        worth = fit.batch_ns / fit.element_ns
        yield (
            f"Padding: a batch costs as much as {worth:,.0f} elements more; padding_batch_cost is {chosen.batch_cost}; "
            f"lengths are padded to multiples of {chosen.multiple}."
        )
