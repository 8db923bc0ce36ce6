"""Connections to a server, for clients and gateways: addresses, and links that carry packets.

`address` parses the server's URL, and `link` opens a link to it: `lane` or `zmq`. `loop_link` owns a session and its
link on an event loop. `keys` reads and writes CURVE keys. `http_link` is a connection to the HTTP endpoint.
"""
