"""The CPU time of threads over time, and a process that uses the same amount."""

from __future__ import annotations

import os
from time import process_time

from bench.lib.cpu_courses import beyond, burner, together, watcher


def test_courses_are_added_and_subtracted() -> None:
    one, other = [(0.0, 0.0), (1.0, 0.5), (3.0, 0.6)], [(0.0, 0.0), (2.0, 1.0), (3.0, 1.0)]
    total = together([one, other])
    assert [at for at, _ in total] == [0, 1, 2, 3]
    assert total == sorted(total)
    assert total[-1][1] == 1.6
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
