"""The client side: the Python clients and the command line, which run in the callers' processes.

`client` (threads) and `async_client` (asyncio) turn calls into requests and pass them to a link of `transport`, which
owns the session. Answers settle a `future` or a stream (`streams`). Both share their `queries`. `cli` is the command
`shmserve`.
"""
