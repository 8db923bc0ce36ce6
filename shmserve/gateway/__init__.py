"""The doors to the network. A gateway is a process of its own and only a client of the broker: bytes from the network
are never parsed where requests are scheduled.

    main        the process
    options     its options
    supervised  what differs if a server has started it; service, if a service manager has
    listeners/  listening sockets, TLS handshakes, connections
    http/       HTTP, and the page for Prometheus
    http2/      the transport of gRPC
    grpc/       its services
    zmq_tcp/    ZeroMQ over tcp
    kserve/     the KServe protocol: requests -> plans, replies -> answers
    auth/       roles, tokens, certificates
    limits/     what clients may use of the gateway
    upstream/   the link to the broker, and requests on behalf of callers
"""
