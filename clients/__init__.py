"""What runs in the callers' processes: the Python clients and the command line.

`client` (threads) and `async_client` (asyncio) make requests of calls and hand them to a link of `transport`, which
has the session. Answers settle a `future`, or a stream of `streams`. `cli` is the command `shmserve`.
"""
