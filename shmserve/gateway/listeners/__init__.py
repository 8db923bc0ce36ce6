"""Listening sockets of HTTP and gRPC.

`listen` opens the sockets of an endpoint and accepts clients. With TLS, `handshakes` accepts them and limits how many
handshakes are under way. `callers` keeps the connections of an endpoint: their limit, eviction of idle ones, the slow
clock for timeouts, and shutdown. The protocol of a connection is in `http` or `http2`.
"""
