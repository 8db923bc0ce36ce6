"""HTTP/1.1: KServe v2, generate, the repository and shared-memory endpoints, and Prometheus metrics.

A listener creates an `HttpConnection` per socket. The connection parses the head of each request (`heads`, `routes`)
and reads the body: chunked and compressed bodies through `bodies`, large tensors straight into shared memory.
`requests` handles the complete request, an `HttpExchange`: it answers locally, or queries the broker and encodes the
reply, which the exchange sends as the HTTP response. `openapi` describes the table in `routes`. `limits` has size
limits and timeouts.
"""
