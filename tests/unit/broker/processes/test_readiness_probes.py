"""Readiness probes of workers: one answer to each query, whatever the workers do."""

from __future__ import annotations

from shmserve.broker.admin.readiness_probes import LIMIT_S, Probes
from shmserve.protocol.worker_messages import Probe, Probed
from tests.support.manual_loop import ManualLoop


def made() -> tuple[ManualLoop, Probes, list[tuple[int, Probe]], list[bool]]:
    loop, sent, answers = ManualLoop(), list[tuple[int, Probe]](), list[bool]()
    probes = Probes(loop, lambda peer, message: sent.append((peer, message)))
    for peer in (1, 2):
        probes.probed(peer, Probed(0, True))
    return loop, probes, sent, answers


def test_readiness_requires_all_probes() -> None:
    loop, probes, sent, answers = made()
    assert probes.probe([1, 2, 3], answers.append)
    assert sent == [(1, Probe(1)), (2, Probe(1))]
    probes.probed(1, Probed(1, True))
    probes.probed(1, Probed(1, False))  # reported twice
    probes.probed(3, Probed(1, False))  # was not asked
    assert not answers
    probes.probed(2, Probed(1, True))
    assert answers == [True]
    assert not loop.timers
    probes.probe([1, 2], answers.append)
    probes.probed(2, Probed(2, False))
    probes.probed(1, Probed(2, True))
    assert answers == [True, False], "one failed probe decides"
    sent.clear()
    assert not probes.probe([7], answers.append), "no probe is supported"
    assert (sent, answers, loop.timers) == ([], [True, False], [])


def test_a_probe_that_does_not_answer_is_not_ready() -> None:
    loop, probes, _, answers = made()
    probes.probe([1], answers.append)
    assert loop.fire() == LIMIT_S
    probes.probed(1, Probed(1, True))
    assert answers == [False]
    probes.probe([1, 2], answers.append)
    probes.worker_exited(2)
    assert answers == [False, False]
    assert not probes.probe([2], answers.append)
    probes.probe([1], answers.append)
    probes.close()
    assert answers == [False] * 3
