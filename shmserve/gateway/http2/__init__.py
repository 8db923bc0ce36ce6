"""HTTP/2 under gRPC.

connection  one connection on its socket
listener    what connections share
host        the same, as the protocol sees it
protocol    one connection, without a socket
blocks      header blocks, which open and end calls
life        PING, idle time, and the end of a connection
stream      the calls of a connection; sending: their answers
seam        the interface to services
conduct     floods, and frames for closed streams
backlog     turns between connections
frames, heads, messages, codes  bytes
limits      what a client may send, and how long it may take
"""
