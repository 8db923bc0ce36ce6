"""ZeroMQ over tcp, with CURVE.

start     the options, and how the door is made
listener  all clients
peer      one client
requests  requests that are with the broker
keys      who is let in
"""
