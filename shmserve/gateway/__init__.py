"""The process with the network endpoints. It is only a client of the broker, so bytes from the network are never parsed
in the process that schedules requests.

A request arrives at a listener (`listeners`; `zmq_tcp` has its own). `http`, `grpc` on top of `http2`, or `zmq_tcp`
parses it. `auth` checks access, and `limits` bounds what clients may use of the gateway. HTTP and gRPC share `kserve`,
which turns a request into a plan and a reply into a response; `openai` does so for OpenAI's clients. `upstream` sends
the request over the link to the broker and passes the reply back to the waiting connection. `page` is the web page.
`main` runs the process with its `options`.
"""
