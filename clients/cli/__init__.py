"""The command `shmserve`.

`main` runs a command and maps errors to exit codes; `parser` knows every argument. A command's own module, in
`commands`, is imported when it runs, so `--help` is quick. `inputs`, `output` and `tables` read and print tensors.
`temporary_server` starts a server for the time of one command.
"""
