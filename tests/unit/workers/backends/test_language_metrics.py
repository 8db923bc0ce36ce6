"""The counts of what an engine for language models does."""

from __future__ import annotations

from shmserve.shm.counters import Subject
from shmserve.workers.backends.language.engine import EngineLimits, Step
from shmserve.workers.backends.language.metrics import LanguageMetrics
from shmserve.workers.backends.language.replies import GenerationReply
from shmserve.workers.backends.language.requests import GenerationRequest
from shmserve.workers.backends.language.sampling import SamplingParameters


def measured() -> tuple[LanguageMetrics, dict[str, memoryview[float]]]:
    """Metrics, and their numbers by name, followed by the reason for which texts have ended."""
    numbers: dict[str, memoryview[float]] = {}

    def count(subject: Subject) -> memoryview[float]:
        reason = dict(subject.labels).get("finished_reason")
        name = subject.name if reason is None else f"{subject.name} {reason}"
        numbers[name] = memoryview(bytearray(8 * (3 + len(subject.edges or ())))).cast("d")
        return numbers[name]

    return LanguageMetrics(count, "m", 1, "m_0", EngineLimits(slots=4, context=50, cache=100)), numbers


def test_each_token_but_the_first_has_a_time_since_the_one_before() -> None:
    """Also if an engine reports it together with the first one."""
    metrics, numbers = measured()
    text = metrics.began()
    for tokens in (3, 2):
        text.generated(tokens)
    observed = [sum(numbers[f"llm_{name}_seconds"][2:]) for name in ("time_to_first_token", "inter_token_latency")]
    assert observed == [1, 4]


def test_a_text_keeps_its_reason_if_the_others_are_cancelled() -> None:
    metrics, numbers = measured()
    reply = GenerationReply(GenerationRequest(SamplingParameters(), 2, True, ()), [metrics.began(), metrics.began()])
    reply.add(Step(1, "a", finish="length"))
    reply.ended("cancelled")
    ended = {name.rpartition(" ")[2]: counts[1] for name, counts in numbers.items() if "request_success" in name}
    assert ended == {"length": 1, "cancelled": 1}
