"""`shmserve top`: a live view of a server, or of several, in the terminal.

A source (`sources`, `http_source`) reads documents: all counters of a server, and what runs now. `view` compares two of
them and computes tables of rates and percentiles; `columns` formats, sorts and filters the tables, and selects columns
for a width; `panels` writes the lines above the tables and those of one model. All of these are functions over plain
data. `plain` prints one view as text or JSON. `app`, on `tables_app`, `screens` and `table_view`, shows it with
textual, an optional package, which only they and `fleet_app` import.

Of several servers, a `Poller` reads each in a thread of its own, so that a slow server does not delay the others.
`fleet_totals` makes tables of the results: the servers, the models summed over servers, and each version on each
server.
"""
