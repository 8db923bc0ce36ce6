"""The settings of `shmserve serve`: flags, environment and configuration file.

A setting is a `Flag`: a row of `flags` or `triton_flags`, or derived from a gateway option, which is a row of
`shmserve.gateway_options`. `settings.parse` merges the command line, the SHMSERVE_* variables and the TOML file with
the defaults, and reports all errors together. The other functions of `settings` turn the result into limits, roles,
worker settings and gateway options. docs/settings.md is generated from the same rows.
"""
