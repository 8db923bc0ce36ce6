"""Listeners for local clients: `lane` (SEQPACKET) and `zmq_router` (ZeroMQ over ipc).

`access` maps the user of a connection to roles. Each connection gets a link with a `ClientFlow` or a `ZmqOutbox`, and
its messages are delivered to the broker's loop. `fair_turns` limits what each client delivers per turn.
`output_backlog` limits responses that clients have not read, and disconnects clients over the limit.
"""
