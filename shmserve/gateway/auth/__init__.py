"""Access control of the HTTP, gRPC and Prometheus endpoints. ZeroMQ clients have roles by their keys (`zmq_tcp.keys`).

`gate` builds it from the options: a Guard for each endpoint, with its TLS context and its Access, reloaded on SIGHUP.
Each request is one of the `actions`; `access` compares the roles of the client with those that the action needs.
`tokens` has the roles of bearer tokens, and `restricted_apis` are groups of actions that need a header.
`header_forwarding` selects the headers that are passed on to models, and `tls` loads certificates.
"""
