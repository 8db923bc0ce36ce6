"""The counts of what an engine for language models does."""

from __future__ import annotations

from shmserve.shm.counters import Subject
from shmserve.workers.backends.language.engine import Limits
from shmserve.workers.backends.language.metrics import LanguageMetrics


def test_each_token_but_the_first_has_a_time_since_the_one_before() -> None:
    """Also if an engine reports it together with the first one."""
    numbers: dict[str, memoryview[float]] = {}

    def count(subject: Subject) -> memoryview[float]:
        numbers[subject.name] = memoryview(bytearray(8 * (3 + len(subject.edges or ())))).cast("d")
        return numbers[subject.name]

    text = LanguageMetrics(count, "m", 1, "m_0", Limits(slots=4, context=50, cache=100)).began()
    for tokens in (3, 2):
        text.generated(tokens)
    observed = [sum(numbers[f"llm_{name}_seconds"][2:]) for name in ("time_to_first_token", "inter_token_latency")]
    assert observed == [1, 4]
