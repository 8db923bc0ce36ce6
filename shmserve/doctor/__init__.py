"""`shmserve doctor`: checks whether this machine can run a server.

`checks.CHECKS` is the table of all checks. A check reads files below `/proc`, `/sys` and `/dev`, and limits, through a
`Machine`. It returns findings: what was found, what is needed, and the command that provides it. Checks use the same
functions as the server to read the machine, and change nothing.
"""
