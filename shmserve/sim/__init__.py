"""The core, run over simulated time: what a server with these models would do with this load.

    result = simulate(Plan((model,), (load,), seconds=10, seed=1))

Everything that decides is the very core that serves; clients, links, workers and the clock are simulated. The rule of
the package: what happens depends on the plan and its seed alone, so a failure is a seed that somebody can run again.
"""

from shmserve.sim.faults import Faults
from shmserve.sim.first_come import first_come
from shmserve.sim.load import Bursts, Closed, Load, Poisson, Regular, Replay, read_recording
from shmserve.sim.plan import Plan, SimModel
from shmserve.sim.results import Histogram, ModelResult, Result
from shmserve.sim.run import simulate
from shmserve.sim.service import Affine, Constant, Lognormal, Service, Table

__all__ = [
    "Affine",
    "Bursts",
    "Closed",
    "Constant",
    "Faults",
    "Histogram",
    "Load",
    "Lognormal",
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
