"""Connections to a server: addresses, links that carry packets, and the reading of answers.

`address` parses the server's URL, and `link` opens a link to it: `lane` or `zmq`. For threads, `threaded` owns a
session and its link, and `shared_reader` lets one waiting thread read for all. For asyncio, `event_loop` does both.
`keys` reads and writes CURVE keys.
"""
