"""HTTP/2 under gRPC.

frames, heads, messages  bytes
codes       how a call ends
protocol    one connection, without a socket
blocks      header blocks, which open and end calls
conduct     floods, and frames for closed streams
stream      one call
life        time, and the end
host        what all connections share, as one of them sees it
seam        what services see
connection  one connection on its socket
door        all connections
limits      what a caller may send, and how long it may take
"""
