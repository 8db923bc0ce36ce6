"""When a GPU is out of service and when it is back: the rules, and the threads that apply them, with a fake driver."""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shmserve.broker.processes.gpus import monitor, xids
from shmserve.broker.processes.gpus.health import REPEATED_S, SETTLE_S, GpuHealth
from shmserve.broker.processes.gpus.monitor import GpuMonitor
from shmserve.repo.gpu_state import GpuState, read_state
from shmserve.repo.gpus import discover
from tests.support.cases import cases
from tests.support.patience import PATIENCE_S
from tests.support.workers.gpu.harness import standins

PCI = "00000000:3B:00.0"
FALLEN = "Xid 79 (GPU has fallen off the bus); reboot the machine; if that does not help, replace the GPU"
RESET = f"reset it (nvidia-smi --gpu-reset -i {PCI})"
ONE, TWO = {"uuid": "GPU-aa11", "pci": PCI}, {"uuid": "GPU-bb22", "pci": "00000000:AF:00.0"}


def observed(*states: GpuState, xid: int = 0) -> GpuHealth:
    """A GPU with these states, the first before the Xid."""
    health = GpuHealth(PCI, xids.FIXES)
    health.observe(states[0], 100.0)
    if xid:
        health.happened(xid, 100.0)
    for state in states[1:]:
        health.observe(state, 100.0)
    return health


@cases(
    (GpuState(), ""),
    (GpuState("the driver has lost it"), "the driver has lost it; reboot the machine"),
    (GpuState("the driver requires a reset"), f"the driver requires a reset; {RESET}"),
    (GpuState(action=0), ""),
    (GpuState(action=1), f"the driver recommends a reset; {RESET}"),
    (GpuState(action=2), "the driver recommends a reboot; reboot the machine"),
    (GpuState(action=3), "ending all peer-to-peer traffic; end all programs on its NVLink peers, then reset it"),
    (GpuState(action=4), ""),
    (GpuState(action=5), "a reset of its bus (R580) or a recovery of its IMEX domain (from R610 on); reboot"),
    (GpuState(action=6), "the driver recommends a reset of its bus; reboot the machine"),
    (GpuState(action=7), "the driver recommends a reboot; reboot the machine"),
    (GpuState(action=99), ""),
    (GpuState(repair_failed=True), "defective memory could not be remapped; replace the GPU"),
    (GpuState(repair_pending=True), ""),
)
def test_a_state_takes_a_gpu_out_of_service(state: GpuState, reason: str) -> None:
    health = observed(state)
    assert bool(health.reason) == bool(reason) == health.has_failed
    assert reason in health.reason


def test_a_gpu_that_works_may_need_a_reset() -> None:
    assert observed(GpuState(repair_pending=True)).needs_reset == "defective memory is remapped at the next reset"
    assert observed(GpuState(action=4)).needs_reset == "it runs at reduced capacity until it is reset"
    assert not observed(GpuState(action=0)).needs_reset


@pytest.mark.parametrize("xid", sorted(xids.NAMES))
def test_only_fatal_xids_take_a_gpu_out_of_service(xid: int) -> None:
    health = observed(GpuState(), xid=xid)
    assert health.has_failed == (xid in xids.FIXES)
    assert (xids.title(xid) in health.reason) == health.has_failed
    if xid in {13, 31, 43, 45, 63, 68, 69, 74, 92, 94, 109}:  # errors of applications and of neighbours
        assert not health.has_failed
    if xid in {48, 64, 79, 95, 119, 120}:
        assert health.has_failed


def test_a_gpu_that_fails_again_and_again_is_out_for_longer_each_time() -> None:
    health, now = observed(GpuState(action=0)), 1000.0
    for count, quiet in enumerate((10, 20, 40, 80, 160, 320, 600, 600), 1):
        health.happened(95, now)
        assert (f"failure {count} within an hour: it is back after {quiet} s" in health.reason) == (count > 1)
        now += quiet - 1
        health.observe(GpuState(action=0), now)
        assert health.has_failed
        health.happened(119, now)  # the same failure
        health.observe(GpuState(action=0), now + quiet - 1)
        assert health.has_failed
        now += quiet
        health.observe(GpuState(action=0), now)
        assert health.reason == ""
    now += REPEATED_S
    health.happened(95, now)
    assert "within an hour" not in health.reason
    health.observe(GpuState(action=0), now + SETTLE_S)
    assert not health.has_failed
    health = observed(GpuState(energy=90), GpuState(energy=3), xid=95)
    health.happened(95, 200.0)
    assert "failure 2 within an hour; reset it" in health.reason
    health.observe(GpuState(energy=1), 201.0)
    assert not health.has_failed, "a reset counts at once"


def test_rules_change_the_fatal_xids() -> None:
    changed = xids.fixes([xids.rule("74=fatal"), xids.rule("119=ignore"), xids.rule("5=ignore")])
    assert changed.keys() == (xids.FIXES.keys() | {74}) - {119}
    for text in ("74", "74=", "=fatal", "x=fatal", "74=off", "-1=fatal"):
        with pytest.raises(ValueError, match=r"expected NUMBER=fatal or NUMBER=ignore, as in 74=fatal"):
            xids.rule(text)


class Driver:
    """The fake driver, and what the monitor of its GPUs has reported."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._states = folder / "states"
        fifo = folder / "xids"
        os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self._reports: queue.Queue[tuple[int, str]] = queue.Queue()
        patch.setenv("STANDIN_GPU_STATES", str(self._states))
        patch.setenv("STANDIN_XIDS", str(fifo))
        patch.setattr(monitor, "RECHECK", 1e-6)
        self._patch = patch
        self._running: GpuMonitor | None = None

    def watch(self, *gpus: dict[str, Any], interval_s: float = 3600, rules: tuple[str, ...] = ()) -> GpuMonitor:
        self._patch.setenv("STANDIN_GPUS", json.dumps(gpus))
        rows = map(xids.rule, rules)
        self._running = GpuMonitor(
            discover({}).devices, True, interval_s, lambda *report: self._reports.put(report), rows
        )
        self._running.start()
        return self._running

    def set(self, **states: dict[str, Any]) -> None:
        """The states of GPUs, by the end of their UUID."""
        place = self._states.with_suffix(".new")
        place.write_text(json.dumps({f"GPU-{name}": state for name, state in states.items()}))
        place.rename(self._states)

    def xid(self, name: str, *numbers: int) -> None:
        os.write(self._fifo, "".join(f"GPU-{name} {number}\n" for number in numbers).encode())

    def next(self) -> tuple[int, str]:
        return self._reports.get(timeout=PATIENCE_S)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
        os.close(self._fifo)
        assert self._reports.empty(), "a report that the test does not expect"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with standins():
        made = Driver(tmp_path, monkeypatch)
        yield made
        made.close()


def metric(made: GpuMonitor, name: str) -> list[str]:
    return [line.removeprefix(name) for line in made.text().splitlines() if line.startswith(name + "{")]


def test_a_fatal_xid_takes_one_gpu_out_until_it_has_recovered(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmserve.broker.processes.gpus.health.SETTLE_S", 0.0)
    driver.set(bb22={"action": 1})
    made = driver.watch(ONE, TWO | {"action": 0})
    number, reason = driver.next()
    assert (number, reason) == (1, made.out_of_service()[1])
    driver.set()
    assert driver.next() == (1, "")
    driver.set(aa11={"lost": 15})
    driver.xid("aa11", 79)
    assert driver.next() == (0, f"GPU 0 is out of service: {FALLEN}")
    assert metric(made, "shmserve_gpu_out_of_service") == ['{gpu_uuid="GPU-aa11"} 1.0', '{gpu_uuid="GPU-bb22"} 0.0']
    assert metric(made, "shmserve_gpu_xid_errors_total") == ['{gpu_uuid="GPU-aa11",xid="79"} 1']
    assert [one["out_of_service"] for one in made.document()] == [f"GPU 0 is out of service: {FALLEN}", ""]
    assert metric(made, "nv_gpu_utilization")[-1] == '{gpu_uuid="GPU-bb22"} 0.25', "the other GPU is still sampled"
    driver.set()
    assert driver.next() == (0, "")
    assert made.out_of_service() == {}


def test_an_xid_that_arrives_while_the_states_are_read_is_reported(driver: Driver) -> None:
    driver.watch(ONE, TWO)
    driver.set(aa11={"lost": 15})
    driver.xid("aa11", xids.RECOVERY_ACTION_CHANGED, 79)
    assert driver.next()[1].startswith("GPU 0 is out of service: the driver has lost it")
    assert driver.next() == (0, f"GPU 0 is out of service: {FALLEN}")


def test_xids_of_applications_are_logged_and_counted(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    made = driver.watch(ONE, TWO, rules=("74=fatal",))
    with caplog.at_level(logging.WARNING):
        driver.xid("aa11", 31)
        driver.xid("aa11", 31)
        driver.xid("bb22", 74)
        number, reason = driver.next()
    assert (number, "Xid 74 (NVLink error); reset it" in reason) == (1, True)
    assert "Xid 31 (GPU memory page fault) on GPU 0: it affects at most the process that caused it" in caplog.text
    assert metric(made, "shmserve_gpu_xid_errors_total") == [
        '{gpu_uuid="GPU-aa11",xid="31"} 2',
        '{gpu_uuid="GPU-bb22",xid="74"} 1',
    ]


def test_the_library_is_closed_while_a_gpu_waits_for_its_reset(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU can be reset only if no process has it open."""
    monkeypatch.setattr(monitor, "RECHECK", 1)
    driver.set(aa11={"action": 1})
    driver.watch(ONE, TWO)
    driver.next()
    with pytest.raises(AssertionError):
        importlib.import_module("pynvml").nvmlSystemGetDriverVersion()


def test_xids_are_reported_again_after_an_error_of_the_wait(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait is tried again after each interval, not at once."""
    nvml, interval_s, failed = importlib.import_module("pynvml"), 0.02, list[float]()
    wait, free = nvml.nvmlEventSetWait_v2, nvml.nvmlEventSetFree

    def failing(events: Any, timeout_ms: int) -> Any:
        if len(failed) < 3:
            failed.append(time.monotonic())
            raise nvml.NVMLError(999)
        return wait(events, timeout_ms)

    def free_and_fail(events: Any) -> None:
        free(events)
        if len(failed) == 3:
            raise nvml.NVMLError(999)

    monkeypatch.setattr(nvml, "nvmlEventSetWait_v2", failing)
    monkeypatch.setattr(nvml, "nvmlEventSetFree", free_and_fail)
    with caplog.at_level(logging.WARNING):
        driver.watch(ONE, TWO, interval_s=interval_s)
        driver.xid("bb22", 79)
        assert driver.next()[0] == 1
    assert all(later - earlier >= interval_s for earlier, later in pairwise(failed))
    assert caplog.text.count("waiting for Xids of GPUs failed, and is tried again every 0.02 s") == 1


def test_slices_fail_with_their_gpu_and_a_lost_gpu_at_the_next_sample(driver: Driver) -> None:
    driver.set(aa11={"action": 2})
    driver.watch(ONE | {"mig": [{"uuid": "MIG-01"}, {"uuid": "MIG-02"}]}, TWO | {"lost": 0}, interval_s=0.01)
    why = "is out of service: the driver recommends a reboot; reboot the machine"
    found = dict([driver.next(), driver.next()])
    assert [found[number].startswith(f"GPU {number} {why}") for number in (0, 1)] == [True, True]
    driver.set(aa11={"action": 2}, bb22={"lost": 15})
    number, reason = driver.next()
    assert (number, reason.partition(";")[0]) == (2, "GPU 2 is out of service: the driver has lost it")
    driver.set(aa11={"action": 2})
    assert driver.next() == (2, "")


@pytest.mark.parametrize("query", ["read_state", "process_memory"])
def test_a_driver_that_does_not_answer_takes_out_only_the_gpu_it_was_asked_about(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    answers, known = threading.Event(), getattr(monitor, query)

    def asked(nvml: Any, what: Any) -> Any:
        if "GPU-bb22" in str(what):
            answers.wait(PATIENCE_S)
        return known(nvml, what)

    monkeypatch.setattr(monitor, "STUCK_S", 1.0)
    made = driver.watch(ONE, TWO, interval_s=0.01)
    made.used_by(1)
    monkeypatch.setattr(monitor, query, asked)
    assert driver.next()[0] == 1
    assert list(made.out_of_service()) == [1]
    assert "the driver has not answered for 1 s" in made.out_of_service()[1]
    assert not metric(made, "nv_gpu_utilization"), "samples are no longer current"
    answers.set()
    assert driver.next() == (1, "")


@cases(
    ({}, GpuState(action=0, uncorrected=0, energy=1_234_567)),
    ({"action": None}, GpuState(uncorrected=0, energy=1_234_567)),
    ({"missing": ["action", "rows", "pages", "uncorrected", "energy"]}, GpuState()),
    ({"rows": [0, 1, 1, 0]}, GpuState(action=0, repair_pending=True, uncorrected=0, energy=1_234_567)),
    ({"pages": 1}, GpuState(action=0, repair_pending=True, uncorrected=0, energy=1_234_567)),
    ({"rows": [0, 9, 0, 1], "energy": 9}, GpuState(action=0, repair_failed=True, uncorrected=0, energy=9)),
    ({"lost": 15}, GpuState("the driver has lost it")),
    ({"lost": 16}, GpuState("the driver requires a reset")),
    ({"lost": 6}, GpuState("the driver no longer lists it")),
    ({"lost": 999}, GpuState()),
)
def test_the_state_of_a_gpu_is_read(values: dict[str, Any], expected: GpuState, driver: Driver) -> None:
    driver.watch(ONE)
    driver.set(aa11=values)
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        assert read_state(nvml, "GPU-aa11") == expected
    finally:
        nvml.nvmlShutdown()
