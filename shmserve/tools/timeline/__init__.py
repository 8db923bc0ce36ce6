"""The timeline of `shmserve trace`: what ran when, for Perfetto.

`collected` reads a recording from the server, up to a limit. `tracks` assigns rows to requests so that those in a row
do not overlap, `trace_events` writes the file, and `summary` computes the numbers that the command prints.
"""
