"""The fleet simulator: many servers behind load balancers, for `shmserve plan`.

A request goes from a balancer over the network to a server and back. `fleet` says what to simulate and draws the
requests, `balancing` chooses the servers, and `run` delivers messages, fails and adds servers, and decides how many
there are. `servers` has the two kinds of servers: the product's core in its simulator, and a queue that behaves like it
and is several times faster. `results` collects the numbers.

Invariant: the result depends only on the plan and its seed.
"""

from shmserve.tools.plan.fleet import Autoscale, FleetPlan, Outage, Surge
from shmserve.tools.plan.results import FleetResult
from shmserve.tools.plan.run import simulate_fleet

__all__ = ["Autoscale", "FleetPlan", "FleetResult", "Outage", "Surge", "simulate_fleet"]
