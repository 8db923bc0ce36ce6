"""Benchmarks: the server compared with baselines on the same machine without it. `python -m bench.run --list`.

A measure is a function in `measures` (or a module of `suites`, `hostile` or `soak`) that takes a `Setting` and returns
rows for `table`. It starts servers and client processes (`lib.child`), which take turns (`lib.clock.alternate`).
`endpoints` compares the network endpoints with Triton's. Other modules with a `main` are individual benchmarks.
"""
