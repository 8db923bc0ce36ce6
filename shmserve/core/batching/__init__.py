"""Request queues of model versions, and the batches formed from them.

A request enters the version's `queue`, which orders requests by priority, user and client. When an instance is idle or
can take a batch ahead, `planning` calls `form` (or `padding`) to choose the next `batch`, and `dispatch` sends it to
the worker. `reports` processes the worker's results; `answers` hands their memory over to the callers. `recall` takes
back requests that a worker has not started, and `rate_limiter` decides which instances have the resources to run a
batch. `leases` lends idle instances to clients, which then send their requests to the worker directly.
"""
