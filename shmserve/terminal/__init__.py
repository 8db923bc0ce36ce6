"""What people type and read in a terminal: inputs for models, outputs, and tables.

The CLI, `shmserve run` and the server's log share it.
"""
