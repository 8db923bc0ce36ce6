"""`shmserve run`: one model in the foreground, without a server.

`run` finds the model, loads it as a worker does, builds one request from the command line, runs it and prints the
outputs, if necessary in the model's own interpreter. `terminal` handles output and the debugger.

Why not start a temporary server, as `check --load` does? A run takes 0.45 s this way and 1.30 s with a server, and
users repeat it after each change to a model. `--pdb` and `breakpoint()` need the model in the process that has the
terminal, so this package would still have to load and run it. A server could replace only the printing of results,
which is already shared with `shmserve infer`. The worker pays with one special case: a model that is loaded without a
link to a broker. Tests also load models this way.
"""
