"""The gateway as a client of the broker.

`link` is the one connection to the broker. `requests` sends requests on behalf of clients of all endpoints and charges
them; an endpoint passes it a Plan, or a Question that `documents` made of a route and its arguments. `receive` has the
buffers that bodies are read into, if possible in shared memory. `regions` and `device_regions` are the shared memory
that clients have registered, on the host and on GPUs.
"""
