"""Limits on what clients may use, so that a few of them cannot block the others.

`caller_shares` limits requests, queries and input bytes in flight at the broker, per connection, address and token; it
is charged before a request is sent. `body_budget` limits the bytes of bodies and unsent responses that the gateway
holds, `bounded_cache` what is remembered of requests. `turns` splits long work on the event loop into slices, and
bounds reads of large bodies.
"""
