"""Listening sockets of HTTP and gRPC, TLS handshakes, and the connections of each."""
