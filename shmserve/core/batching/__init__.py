"""Request queues of model versions, and the batches formed from them.

A request enters the version's `queue`, which orders requests by priority, user and client. When an instance is idle or
can take a batch ahead, `dispatch` chooses the next batch by `service.form` or `service.padding`, and sends it to the
worker. `reports` processes the worker's results, and `recall` takes back requests that it has not started. `leases`
lends idle instances to clients, which then send their requests to the worker directly.
"""
