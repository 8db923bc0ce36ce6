"""The doors to the network. A gateway is a process of its own and only a client of the broker: bytes from the network
are never parsed where requests are scheduled.

    kserve/   the protocol of all doors but ZeroMQ
    http/     the HTTP door, and that of Prometheus
    http2/    the gRPC door: the transport
    grpc/     the gRPC door: the services
    zmqtcp/   the ZeroMQ door
    guards/   what stands before the doors: roles, tokens, certificates
    link      the lane to the broker, for tensors that stay bytes
    regions   shared memory that callers have registered; device_regions, on a GPU
    listen    sockets that callers connect to
    callers   all connections of one, of HTTP and of gRPC
    metrics   what Prometheus is told of doors
    flags     the options
    child     what is different if a server has started it
    service   what is different if a service manager has
    main      the process
"""
