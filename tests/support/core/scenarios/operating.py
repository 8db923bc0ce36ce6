"""Commands of scenario files that operate on models: deploy, unload, restart, refuse."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.models import resizing
from shmserve.core.policy import InstanceSpec
from tests.support.core.policies import policy_of, scaling_of, step_of
from tests.support.core.world import World

Event = tuple[int, Any]


class Operating(World):
    model = ""

    def scale(self, name: str, text: str) -> None:
        """1-3,up=50ms,down=2s: bounds and delays of autoscaling."""
        bounds, *more = text.split(",")
        options = dict(word.split("=") for word in more)
        self.scalings[name] = scaling_of(name, bounds, **options)

    def do_scale(self, name: str, bounds: str, up: str = "50ms", down: str = "2s") -> None:
        """scale m 1-3 up=50ms down=2s: the number of instances in the next deploy."""
        self.scalings[name] = scaling_of(name, bounds, up, down)

    def do_by_hand(self, name: str) -> None:
        """From now on, the model's workers do not load by themselves."""
        self.loads_itself[name] = False

    def do_gpu(self, number: str, reason: str = "") -> list[Event]:
        """gpu 1 "GPU 1 is broken": no instance may run on it. Without a reason: it is healthy again."""
        return [(0, events.DeviceHealth(int(number), reason))]

    def do_deploy(self, name: str, *versions: str, op: str = "0", present: str = "") -> list[Event]:
        """deploy m 1:7x2 3:8 op=1: version 1 of source 7 with 2 instances, version 3 of source 8 with one. `fresh`:
        also load what is already served. `unloaded`: the workers do not load by themselves. `present=1,3`: the versions
        in the repository, if they are known."""
        flags = [word for word in versions if ":" not in word]
        targets = tuple(self._target(name, word) for word in versions if ":" in word)
        self.loads_itself[name] = "unloaded" not in flags
        known = tuple(map(int, present.split(","))) if present else None
        return [(0, events.Deploy(name, targets, int(op), "fresh" in flags, known))]

    def _target(self, name: str, word: str) -> events.Target:
        number, _, what = word.partition(":")
        source, _, instances = what.partition("x")
        known = next(policy for (model, _), policy in self.policies.items() if model == name)
        policy = self.policies[name, int(number)] = replace(known, version=int(number))
        return self.target(policy, int(source), int(instances or 1))

    def do_ensemble(self, name: str, *words: str, **options: str) -> None:
        """ensemble e inputs=x:[-1] outputs=z m(x:x)->(y:t) n(x:t)->(y:z)/map:t/if:flag"""
        steps = tuple(step_of(word) for word in words if "->" in word)
        flags = ("single", *(word for word in words if "->" not in word))
        self.model = name
        policy = policy_of(name, flags, {"max_batch": "0"} | options)
        self.deploy(replace(policy, steps=steps, ahead=int(options.get("ahead", 0))), 0)

    def do_misfit(self, name: str, problem: str = "") -> None:
        """From now on, the steps of this ensemble do not fit together, for this reason; without a reason, they fit."""
        self.misfits[name] = problem

    def do_unload(self, name: str, *flags: str, op: str = "0") -> list[Event]:
        return [(0, events.Unload(name, int(op), "force" in flags))]

    def do_restart(self, name: str, instance: str = "", version: str = "0", op: str = "0") -> list[Event]:
        return [(0, events.Restart(name, int(version), instance, int(op)))]

    def do_join(self, name: str, instance: str, *flags: str) -> None:
        """join m m_1: as if the core had decided to add this instance to m. `unloaded`: it does not load."""
        self.loads_itself[name] = "unloaded" not in flags
        version = self.core.state.look_up(name, 0)
        self.change(lambda state: resizing.join(state, version, InstanceSpec(instance)))

    def do_leave(self, name: str, instance: str) -> None:
        version = self.core.state.look_up(name, 0)
        found = next(one for one in version.instances if one.spec.name == instance and not one.over)
        self.change(lambda state: resizing.leave(state, version, found))

    def do_traffic(self, name: str, shares: str = "", shadow: str = "", aliases: str = "") -> list[Event]:
        """traffic m shares=1:90,2:10 shadow=2:100 aliases=prod:1,old:0; 0: no alias any more."""
        parts, shadows, names = (
            [pair.split(":") for pair in text.split(",") if pair] for text in (shares, shadow, aliases)
        )
        return [
            (
                0,
                events.SetTraffic(
                    name,
                    {int(version): int(percent) for version, percent in parts},
                    {alias: int(version) or None for alias, version in names},
                    shadow={int(version): int(percent) for version, percent in shadows},
                ),
            )
        ]

    def do_differ(self, name: str, *outputs: str) -> None:
        """differ m_0~ y: from now on, this shadow reports the output as different."""
        self.worker(name).differs = set(outputs)

    def do_service(self, *flags: str) -> list[Event]:
        """service out: the server is taken out of service; `service`: it is put back."""
        return [(0, events.SetService("out" in flags))]

    def do_refuse(self, name: str, version: str, reason: str) -> list[Event]:
        return [(0, events.Refuse(name, int(version), reason))]
