"""ZeroMQ over tcp, with CURVE.

start  the options, and how the door is made
keys   who is let in
asked  what is known of a request that is with the broker
peer   one client
door   all of them
"""
