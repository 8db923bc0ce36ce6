"""Listening sockets of HTTP and gRPC.

`callers` opens the sockets of an endpoint and keeps its connections: their limit, eviction of idle ones, the slow clock
for timeouts, and shutdown. With TLS or trusted proxies, `handshakes` accepts clients, reads the header of the PROXY
protocol (`proxy_header`), and limits the number of concurrent TLS handshakes. The protocols of connections are in
`http` and `http2`.
"""
