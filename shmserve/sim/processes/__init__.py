"""The simulated processes around the core: clients and workers.

`clients` send the requests of a load and check the responses. A `worker` takes the service time of its model instead of
computing, and may call other models. `sim_lease` connects a client and a worker without the broker. Tensors (`tensors`)
have shapes and sizes, but no data. Messages and time pass through `sim.world`.
"""
