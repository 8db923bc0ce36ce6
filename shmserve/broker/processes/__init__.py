"""Worker, gateway and helper processes, and the CPUs, memory and GPUs that they use.

The core requests a worker with a Spawn effect. `Workers` forks it from the `zygote`, or starts a fresh interpreter,
reads its link and output (`children`), and reports its exit to the core. `memory_limits` kills workers that exceed
their limits, with `cgroups` or by polling. `Gateways` starts and restarts gateways. `stop_deadline` limits how long the
server takes to stop.
"""
