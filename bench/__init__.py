"""Benchmarks: the server compared with what this machine can do without it. `python -m bench.run --list`.

A measure is a function in `measures` (or a module that it imports) that takes a `Setting` and returns rows for `table`.
It starts servers and client processes (`child`), which take turns (`clock.in_turn`). `doors` and its modules compare
the network endpoints with Triton. The other modules with a `main` are single benchmarks.
"""
