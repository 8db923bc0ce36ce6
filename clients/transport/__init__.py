"""Connections to a server: where it is, how packets reach it, and who reads what it answers.

`address` says which server is meant, `link` opens a link to it: `lane` or `zmq`. For threads `threaded` keeps a session
and its link, and `shared_reader` lets one waiting thread read for all. On asyncio `event_loop` does both. `keys` are
those of CURVE.
"""
