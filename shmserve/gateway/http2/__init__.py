"""HTTP/2 as the transport of gRPC.

`listener` accepts sockets and keeps the state that their connections share. A `connection` feeds received bytes to
`protocol`, which does no I/O: it parses frames, and `heads` decodes the header blocks that open and end calls. Each
call is a `stream`, which has a state of RFC 9113, assembles messages and passes them to a service through `interface`;
its sender queues the responses in the `output` of the connection, under flow control. `life` has keepalive, idle
timeouts and shutdown; `abuse` protects against floods of frames; `limits` has size limits and timeouts.
"""
