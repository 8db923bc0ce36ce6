"""The arguments of the commands, by subject.

`common` adds a command and the options that several commands share; the other modules have one function per command,
which `parser` calls. Invariant: only what `--help` needs is imported here; a command's module is imported when it runs.
"""
