"""Errors of commands, which are shown as one line without a traceback."""


class Failed(Exception):
    """The command failed: one line for the user, exit code 1."""


class Misuse(Exception):
    """Usage error: one line for the user, exit code 2."""
