"""ZeroMQ over TCP, with CURVE encryption and authentication.

`start` has the options and builds the listener. `keys` has the public keys of clients and their roles, and answers
libzmq's ZAP requests during a handshake. `listener` is the ROUTER socket: it receives the messages of all clients and
sends the messages to them. Each client is a `peer`, which turns its messages into requests to the broker.
"""
