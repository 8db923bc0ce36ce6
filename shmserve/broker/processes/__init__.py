"""Workers and gateways as processes, and their share of CPUs, memory and GPUs.

The core requests a worker with a Spawn effect. `Workers` forks it from the `zygote`, or starts a fresh interpreter,
reads its link and output (`children`), and reports its exit to the core. `memory_limits` kills workers over their
limits, with `cgroups` or by polling. `Gateways` starts and restarts gateways. `stop_deadline` bounds a stop of the
server.
"""
