"""What this machine has, and what it lacks to run a server: `shmserve doctor`.

`checks.CHECKS` is the table of all checks. A check gets a `Machine`, through which it reads files below `/proc`, `/sys`
and `/dev` and limits, and returns findings: what was found, what is needed, and the command that provides it.
Checks use the functions with which the server itself reads the machine, and change nothing.
"""
