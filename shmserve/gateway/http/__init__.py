"""HTTP/1.1: KServe v2, generate, the repository and shared-memory endpoints, and Prometheus metrics.

`start` builds a listener, and the listener creates an `HttpConnection` per socket. It parses the head of each request
(`heads`, `routes`) and reads the body: chunked and compressed bodies through `bodies`, large tensors straight into
shared memory. `requests` handles the complete request: it asks the broker or answers locally, and encodes the broker's
reply, which `exchange` sends as the HTTP response. `openapi` documents the table in `routes`. `limits` has size limits
and timeouts.
"""
