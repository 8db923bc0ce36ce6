"""The programs beside the server: `load` (bench), `tune`, `plan`, `top`, `timeline` (trace), `convert` and `describe`;
`charts` draws for their reports.

Each is a library with a command in `shmserve.clients.cli`. They use the public client, as any other program does.
"""
