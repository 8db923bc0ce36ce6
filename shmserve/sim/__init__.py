"""The simulator: runs the core in simulated time, to predict how a server with given models behaves under a given load.

    result = simulate(Plan((model,), (load,), seconds=10, seed=1))

The core is the same code as in the server; clients, links, workers and the clock are simulated. `plan` and `load`
describe what to simulate; `run` executes the core's effects, `world` holds the clock and the links, the clients and
workers in `processes` react to messages, and `results` collects the numbers. `command` is `python -m shmserve.sim`.

Invariant: the result depends only on the plan and its seed, so a failure can be reproduced from its seed.
"""

from shmserve.sim.faults import Faults
from shmserve.sim.first_come import first_come
from shmserve.sim.load import Bursts, Closed, Load, Poisson, Regular, Replay, read_recording
from shmserve.sim.plan import Plan, SimModel
from shmserve.sim.results import ModelResult, Result
from shmserve.sim.run import simulate
from shmserve.sim.service import Affine, Constant, Lognormal, Measured, Service, Table

__all__ = [
    "Affine",
    "Bursts",
    "Closed",
    "Constant",
    "Faults",
    "Load",
    "Lognormal",
    "Measured",
    "ModelResult",
    "Plan",
    "Poisson",
    "Regular",
    "Replay",
    "Result",
    "Service",
    "SimModel",
    "Table",
    "first_come",
    "read_recording",
    "simulate",
]
