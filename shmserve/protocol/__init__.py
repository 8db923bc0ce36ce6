"""The messages between clients, broker and workers, their encoding, and the roles that allow them.

`messages` defines the messages of clients as typed structs, `worker_messages` those between broker and workers. `codec`
packs messages into packets and decodes packets. A packet is sent over a SEQPACKET socket, with file descriptors
attached (`descriptors`), or over ZeroMQ (`zmq_frames`). Both ends of every link use this package; this package makes no
decisions about requests.
"""
