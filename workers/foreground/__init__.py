"""`shmserve run`: one model in the foreground, without a server.

`order` has the arguments, finds the model and reads its configuration. `solo` loads it as a worker does, builds one
request from the command line, runs it and prints the outputs, if necessary in the model's own interpreter. `terminal`
has the output and the debugger.

Why not start a temporary server, as `check --load` does? A run takes 0.45 s here and 1.30 s with one, and it is
repeated after each change of a model. `--pdb` and `breakpoint()` need the model in the process that has the terminal,
so loading and running it here would remain, and a server could replace only the printing of results, which is shared
with `shmserve infer` already. The cost in the worker is one case: a model that is loaded without a link to a broker.
Tests load models in that way too.
"""
