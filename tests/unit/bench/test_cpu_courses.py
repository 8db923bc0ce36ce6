"""The CPU time of threads over time, and a process that uses the same amount."""

from __future__ import annotations

import os
from time import process_time

from hypothesis import given
from hypothesis import strategies as st

from bench.lib.cpu_courses import Course, beyond, burner, together, watcher

TIMES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20)


def course(steps: list[tuple[int, int]]) -> Course:
    at = taken = 0
    found = [(0.0, 0.0)]
    for later, more in steps:
        at, taken = at + later, taken + more
        found.append((float(at), float(taken)))
    return found


@given(st.lists(TIMES, min_size=1, max_size=4))
def test_the_total_course_is_the_sum_of_the_thread_courses(threads: list[list[tuple[int, int]]]) -> None:
    courses = [course(steps) for steps in threads]
    found = together(courses)
    assert found[-1][1] == sum(one[-1][1] for one in courses)
    assert found == sorted(found)
    assert [at for at, _ in found] == sorted({at for one in courses for at, _ in one})


def test_baseline_cpu_time_is_subtracted() -> None:
    expected = [(0.0, 0.0), (1.0, 0.3), (2.0, 0.3)]
    assert beyond([(0.0, 0.0), (1.0, 0.5), (2.0, 0.6)], [(0.0, 0.0), (4.0, 0.8)]) == expected
    assert beyond([(0.0, 0.0), (1.0, 0.5)], []) == [(0.0, 0.0), (1.0, 0.5)]


def test_the_watcher_records_this_process_and_the_burner_follows_its_course() -> None:
    before = process_time()
    assert burner()(seconds=5.0, course=[(0.0, 0.0), (0.01, 0.02), (0.02, 0.05)]) == {}
    assert process_time() - before >= 0.05
    courses = watcher()(seconds=0.02, pids=[os.getpid()])["courses"]
    assert {int(thread.split()[0]) for thread in courses} == {os.getpid()}
    assert all(one[0] == (0.0, 0.0) and len(one) > 1 for one in courses.values())
