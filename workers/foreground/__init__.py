"""`shmserve run`: one model in the foreground, without a server.

`solo_find` finds the model and reads its configuration. `solo` loads it as a worker does, builds one request from the
command line, runs it and prints the outputs, if necessary in the model's own interpreter. `solo_order` has the messages
that are passed to that process, and `terminal` the output and the debugger.
"""
