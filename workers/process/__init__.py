"""The worker's process: device, interpreter, log and exit codes.

`device` finds the device of an instance, and `load_priority` lowers the priority of the process while its model loads.
`environment` replaces the interpreter with one that the model brings, which `environment_archive` unpacks if it is an
archive. `log` writes lines to stderr for the operator and prepares error texts for callers, and `exit_codes` tells the
broker how the process ended.
"""
