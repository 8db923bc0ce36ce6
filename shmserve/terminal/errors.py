"""Errors of commands: each is shown as one line, without a traceback."""


class Failed(Exception):
    """The command could not do it: one line for the user, exit code 1."""


class Misuse(Exception):
    """The command was used wrongly: one line for the user, exit code 2."""
