"""The doors to the network. A gateway is a process of its own and only a client of the broker: bytes from the network
are never parsed where requests are scheduled.

    limits    what a caller may send, and how long it may take
    status    errors of the server as status codes and texts of the doors
    kserve    a request of the KServe protocol as JSON -> a Plan of what the broker is asked
    elements  tensors as JSON, both ways
    generate  the generate extension
    answers   replies of the broker -> the JSON and the buffers that are sent
    regions   shared memory that callers have registered; device_regions that on GPUs
    documents questions and operations: what is asked, and the document that is answered
    asking    the broker is asked, for whoever came through any door
    routes    methods and paths of HTTP -> what is wanted
    access    who may do what
    tokens    bearer tokens, and their file
    restrict  groups of what can be wanted, behind a header
    headers   headers that go on to models
    tls       certificates
    guards    all of this, as the flags say, for each door
    openapi   the table of paths as a document for programs
    heads     the first lines of an HTTP request -> a Head
    bodies    chunked and compressed bodies
    link      the lane to the broker, for tensors that stay bytes
    http      one connection of HTTP
    http2_*   HTTP/2 under gRPC: one connection (http2), one call (stream), bytes (frames, heads, messages), time and
              the end (life), the socket (connection), all of them (door), options (start), what services see (seam)
    grpc_*    the services of gRPC: codes and messages, the bytes of a request and an answer (wire, plans), the calls
              (rpcs, calls, stream), and which path is which (services)
    zmqtcp*   ZeroMQ over tcp: the options (start), who is let in (keys), one client (peer), and all of them
    listen    sockets that callers connect to
    door      all connections of one listening socket
    child     what is different if a server has started it
    service   what is different if a service manager has
    service   what is different if a service manager has
    main      the process
"""
