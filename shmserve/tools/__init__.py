"""The programs beside the server: `load` (bench), `tune`, `plan`, `top` and `timeline`; `charts` draws for all of them.

Each is a library with a command in `shmserve.clients.cli`. They use the public client, as any other program does.
"""
