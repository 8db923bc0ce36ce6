"""The process with the network endpoints, which is only a client of the broker: bytes from the network are never parsed
in the process that schedules requests.

A request arrives at a listener (`listeners`, or `zmq_tcp` with its own) and is parsed by `http`, by `grpc` on top of
`http2`, or by `zmq_tcp`. `auth` checks access, and `limits` bounds what clients may use of the gateway. HTTP and gRPC
share `kserve`, which turns a request into a plan and a reply into a response; `openai` does so for OpenAI's clients.
`upstream` sends the request over the link to the broker, and passes the answer back to the waiting connection. `main`
runs the process with its `options`; `service` is for a gateway that a service manager has started.
"""
