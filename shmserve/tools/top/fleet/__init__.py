"""`shmserve top` of several servers.

A `Poller` reads one server in a separate thread, so that a slow server does not delay the others. `totals` makes tables
of the results: the servers, the models summed over servers, and each version on each server. `fleet_app` shows these on
a terminal, `printed` as text or JSON. One server in detail is the view of one server (`..app`).
"""
