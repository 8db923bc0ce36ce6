"""Access control of the HTTP, gRPC and Prometheus endpoints. The keys of ZeroMQ clients determine their roles
(`zmq_tcp.keys`).

`gate` builds everything from the options: a Guard for each endpoint, with its TLS context and its EndpointAccess,
reloaded on SIGHUP. Each request is one of the `actions`; `access` compares the client's roles with those that the
action requires. `tokens` has the roles of bearer tokens, `restricted_apis` the groups of actions that require a header,
and `browsers` the rules for requests of web pages. `header_forwarding` selects the headers that are passed on to
models, and `tls` loads certificates.
"""
