"""Listening sockets of HTTP and gRPC.

`callers` opens the sockets of an endpoint and keeps its connections: their limit, eviction of idle ones, the slow clock
for timeouts, and shutdown. With TLS, `handshakes` accepts clients and limits the number of concurrent handshakes. The
protocols of connections are in `http` and `http2`.
"""
