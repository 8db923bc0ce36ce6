"""All scheduling decisions of the server, without I/O or a clock: events in, effects out.

`core.Core` dispatches each event to a handler: client messages to `requests`, worker messages to `batching`, `models`
and `calls`. The handlers change `state.State` and its `records`. A request is validated and queued (`requests`), put
into a batch and sent to a worker (`batching`), and completed when the worker's result arrives (`requests.completion`).
Sequences and ensembles have their own schedulers on top of this. Everything that needs I/O is appended to the effects
of the turn, which the broker executes.

The packages are divided by subject and refer to each other: a record contains its queue, and the end of a batch
completes requests. Their modules import in one direction only (the contract `core-layers` in setup.cfg): records at the
bottom, then `state`, then the parts that act on it. A part is a set of functions over `State`, or an object if it owns
tables.
"""
