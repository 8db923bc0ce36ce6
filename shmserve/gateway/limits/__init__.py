"""Limits on the resources that clients use, so that a few clients cannot block the others.

`caller_shares` limits requests, queries and input bytes in flight at the broker, per connection, address and token; a
call is charged before it is sent. `body_budget` limits the bytes of bodies and unsent responses that the gateway holds,
and `bounded_cache` limits what is cached of requests. `proxies` finds out for whom a proxy speaks. `turns` splits long
work on the event loop into slices, and bounds reads of large bodies; `backlog` bounds the work for small input.
"""
