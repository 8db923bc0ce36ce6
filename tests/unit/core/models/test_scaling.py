"""How autoscaled versions are measured, and which state remains after a deployment."""

from __future__ import annotations

from math import factorial

import pytest
from msgspec.structs import replace

from shmserve.core.events import Target
from shmserve.core.models import sizes
from shmserve.core.policy import InstanceSpec, ScaledGroup, ScalingPolicy
from shmserve.core.records import Instance, Version
from shmserve.core.service.scaler import MAX_PATIENCE, WINDOW_NS, Reading, Scaler, expected_wait
from tests.support.core.policies import scaling_of

MS = 10**6
SECOND = 10**9


def erlang(service: float, busy: float, count: int) -> float:
    """The mean queue time of random requests with exponential service times: Erlang's formula."""
    full = busy**count / factorial(count) * count / (count - busy)
    waits = full / (sum(busy**number / factorial(number) for number in range(count)) + full)
    return service * waits / (count - busy)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 0.95])
def test_the_expected_time_in_the_queue(count: int, share: float) -> None:
    exact = erlang(100.0, share * count, count)
    assert expected_wait(100, share * count, count) == pytest.approx(exact, rel=0.15, abs=3.5)


def test_the_expected_wait_is_infinite_if_all_instances_are_overloaded() -> None:
    assert expected_wait(100, 2.0, 2) == float("inf")


class Windows:
    """Windows of a version in which each request takes 10 ms."""

    def __init__(self, down: str = "2s") -> None:
        self.scaler = Scaler(scaling_of("m", "1-4", down=down))
        self.now = Reading(SECOND, 0, 0, 0, 0, 2, True, 0, 10 * MS)
        self.scaler.begin(self.now)

    def pass_(self, busy: float, wait_ms: int, spare: bool, oldest_ms: int = 0, needed: int = 0) -> tuple[bool, bool]:
        """Ends a window in which 10 requests began and `busy` instances were busy. Returns whether the version is too
        small, and whether it is calm."""
        now = self.now
        self.now = replace(
            now, at=now.at + WINDOW_NS, busy_ns=now.busy_ns + round(busy * WINDOW_NS),
            queue_ns=now.queue_ns + 10 * wait_ms * MS, requests=now.requests + 10, spare=spare,
            oldest_ns=oldest_ms * MS, needed=needed,
        )  # fmt: skip
        measured = self.scaler.measure(self.now, 0)
        assert measured.busy == pytest.approx(busy)
        return self.scaler.short > 0, self.scaler.calm_since > 0


def test_requests_wait_too_long_only_if_all_instances_are_busy() -> None:
    windows = Windows()
    assert windows.pass_(2, 60, spare=False) == (True, False)
    assert windows.pass_(2, 60, spare=False) == (True, False)
    assert windows.scaler.short == 2
    assert windows.pass_(2, 60, spare=True) == (False, False), "they wait for something else"
    assert windows.scaler.short == 0
    assert windows.pass_(2, 40, spare=False) == (False, False)
    assert windows.pass_(2, 0, spare=False, oldest_ms=90) == (False, False)
    assert windows.pass_(2, 0, spare=False, oldest_ms=110) == (True, False), "some wait although others are preferred"


def test_a_shrinking_queue_is_reported_as_falling() -> None:
    windows = Windows()
    windows.pass_(2, 200, spare=False)
    windows.now = replace(windows.now, at=windows.now.at + WINDOW_NS, queue_ns=windows.now.queue_ns + 1000 * MS)
    windows.now = replace(windows.now, requests=windows.now.requests + 10)
    assert windows.scaler.measure(windows.now, 0).is_falling


def test_an_instance_is_spare_if_the_others_stay_below_full_load() -> None:
    windows = Windows()
    assert windows.pass_(0.5, 0, spare=False) == (False, True)
    assert windows.pass_(0.9, 0, spare=False) == (False, False), "the other one would be busy nearly always"
    assert windows.pass_(1.0, 0, spare=True) == (False, True), "one caller after the other: one is never used"
    assert windows.pass_(0.1, 30, spare=True) == (False, False), "they wait"
    assert windows.pass_(0.1, 0, spare=True, needed=2) == (False, False), "streams or sequences need both"
    windows.now = replace(windows.now, service_ns=400 * MS)
    assert windows.pass_(0.5, 5, spare=False) == (False, False), "each would wait for the one before it"


def test_scaling_up_soon_after_scaling_down_doubles_the_delay() -> None:
    scaler = Windows(down="2s").scaler
    now = SECOND
    for patience in (2, 4, 8, 16, 16):
        scaler.has_shrunk(now)
        now += scaler.down_ns
        scaler.has_grown(now)
        assert scaler.patience == min(patience, MAX_PATIENCE)
        assert scaler.down_ns == scaler.patience * 2 * SECOND
    scaler.has_grown(now + 100 * SECOND)
    assert scaler.patience == 1, "the load has grown since"


def served(policy: ScalingPolicy, *specs: InstanceSpec) -> Version:
    version = Version("m", 1, [Instance(spec) for spec in specs])
    version.scaler = Scaler(policy)
    return version


def on_gpus(least: int, most: int) -> ScalingPolicy:
    """A group with GPUs 0 and 1, and its names with the maximum number of instances."""
    specs = [InstanceSpec(f"m_{index}", "KIND_GPU", index // most, threads=9) for index in range(2 * most)]
    groups = tuple(ScaledGroup("m", least, most, tuple(specs[gpu * most :][:most])) for gpu in range(2))
    return ScalingPolicy(groups, 1, 1, cores=8)


def test_names_are_unique_and_reused() -> None:
    policy = on_gpus(1, 3)
    version = served(policy, InstanceSpec("m_0", "KIND_GPU", 0), InstanceSpec("m_2", "KIND_GPU", 1))
    spec = sizes.next_spec(version, policy, policy.groups[1])
    assert (spec.name, spec.device, spec.threads) == ("m_1", 1, 8 // 3)
    version.instances.append(Instance(spec))
    assert sizes.next_spec(version, policy, policy.groups[0]).name == "m_3"


def test_added_instances_get_the_cores_of_their_index() -> None:
    specs = tuple(InstanceSpec(f"m_{index}", cpus=((0, 1), (2, 3))[index % 2]) for index in range(4))
    policy = ScalingPolicy((ScaledGroup("m", 1, 4, specs),), 1, 1, cores=4)
    version = served(policy, specs[0])
    spec = sizes.next_spec(version, policy, policy.groups[0])
    assert (spec.cpus, spec.threads) == ((2, 3), 2)
    version.instances.append(Instance(spec))
    assert (sizes.next_spec(version, policy, policy.groups[0]).cpus, spec.threads) == ((0, 1), 2)


def test_a_deployment_keeps_the_number_within_its_bounds() -> None:
    policy = on_gpus(1, 4)
    begun = (InstanceSpec("m_0", "KIND_GPU", 0), InstanceSpec("m_1", "KIND_GPU", 1))
    version = served(policy, *begun, InstanceSpec("m_2", "KIND_GPU", 0), InstanceSpec("m_3", "KIND_GPU", 0))

    def kept(policy: ScalingPolicy | None) -> list[tuple[str, int]]:
        target = sizes.keep_size(Target(1, 7, begun, scaling=policy), version)
        return [(spec.name, spec.device) for spec in target.instances]

    assert kept(policy) == [("m_0", 0), ("m_2", 0), ("m_3", 0), ("m_1", 1)]
    assert kept(on_gpus(1, 2)) == [("m_0", 0), ("m_2", 0), ("m_1", 1)]
    assert kept(on_gpus(2, 3)) == [("m_0", 0), ("m_2", 0), ("m_3", 0), ("m_1", 1), ("m_4", 1)]
    assert kept(None) == [("m_0", 0), ("m_1", 1)], "it is not scaled any more"


def test_the_first_deployment_begins_as_configured() -> None:
    policy = on_gpus(1, 4)
    target = Target(1, 7, (InstanceSpec("m_0", "KIND_GPU", 0),), scaling=policy)
    assert sizes.keep_size(target, None) is target
    assert sizes.keep_size(target, Version("m", 1, [])) is target, "what was served was not scaled"


def test_instances_of_other_groups_stay() -> None:
    policy = scaling_of("m", "1-2")
    other = InstanceSpec("other_0", "KIND_CPU", passive=True)
    version = served(policy, InstanceSpec("m_0"), InstanceSpec("m_1"), other)
    target = sizes.keep_size(Target(1, 7, (InstanceSpec("m_0"), other), scaling=policy), version)
    assert sorted(spec.name for spec in target.instances) == ["m_0", "m_1", "other_0"]
    assert sizes.bounds(version, policy) == (1, 2)
