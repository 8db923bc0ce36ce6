"""HTTP/2 as the transport of gRPC.

`listener` accepts sockets and keeps the state that their connections share; `host` is the listener's interface for
connections. A `connection` feeds received bytes to `protocol`, which does no I/O: it parses frames, and `blocks` and
`heads` decode the header blocks that open and end calls. Each call is a `stream`, which assembles messages and passes
them to a service through `interface`; `sending` queues the responses under flow control, and `messages` compresses
them. `life` has keepalive, idle timeouts and shutdown; `abuse` protects against floods of frames; `limits` has size
limits and timeouts.
"""
