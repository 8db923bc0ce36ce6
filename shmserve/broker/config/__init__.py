"""The settings of `shmserve serve`: flags, environment and configuration file.

A setting is a row of `shmserve.settings.table`, and `values` reads the kinds that only the server knows.
`settings.parse` merges the command line, the SHMSERVE_* variables and the TOML file with the defaults, and reports all
errors together. The other functions of `settings` turn the result into limits, roles, worker settings and the command
line of gateways.
"""
