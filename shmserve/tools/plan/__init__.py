"""The fleet simulator: many servers behind load balancers, for `shmserve plan`.

A request goes from a balancer over the network to a server and back. `arrivals` draws the requests, `balancing` chooses
the servers, and `run` delivers messages and fails and adds servers; `scaling` decides how many servers there are. A
server is either the product's core in its simulator (`core_server`), or a queue that behaves like it and is several
times faster (`queue_server`). Both implement `server.Server`. `results` collects the numbers.

Invariant: the result depends only on the plan and its seed.
"""

from shmserve.tools.plan.plan import Autoscale, FleetPlan, Outage, Surge
from shmserve.tools.plan.results import FleetResult
from shmserve.tools.plan.run import simulate_fleet

__all__ = ["Autoscale", "FleetPlan", "FleetResult", "Outage", "Surge", "simulate_fleet"]
