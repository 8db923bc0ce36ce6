"""The settings of the server's processes: one table of flags, one parser.

`table` has the flags of `shmserve serve`, of which `shmserve gateway` has those of the network endpoints; `limits` what
`--limit` sets. `values` reads the kinds of values that both know, and `parser` makes argparse arguments of the flags.
The process that a setting belongs to adds the readers of its own kinds. docs/settings.md is generated from the table.
"""
