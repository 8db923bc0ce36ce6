"""Workers and gateways as processes, and their share of CPUs, memory and GPUs."""
