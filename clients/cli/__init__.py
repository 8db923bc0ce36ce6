"""The command `shmserve`.

`main` runs a command and maps errors to exit codes; `parser` defines all arguments. A command's module, in `commands`,
is imported only when it runs, so that `--help` is fast. `inputs`, `output` and `tables` in `shmserve.terminal` read and
print tensors. `temporary_server` starts a server for the duration of one command.
"""
