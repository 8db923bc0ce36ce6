"""The gateway as a client of the broker.

`link` is the one connection to the broker, shared by all endpoints. HTTP and gRPC send their requests through
`requests`, which charges the client: a plan for an inference, or a BrokerQuery that `documents` has made from a route
and its arguments. `exchange` is a request over HTTP as `openai` and `page` see it. `receive` has the buffers that
bodies are read into, if possible in shared memory. `regions` and `device_regions` are the shared memory that clients
have registered, on the host and on GPUs.
"""
