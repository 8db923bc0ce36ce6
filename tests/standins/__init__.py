"""Fakes of libraries that need a GPU. At the front of sys.path, they replace the real ones.

Invariant: names, arguments and the permitted order of calls are those of the real library. Memory operations are
carried out, so a result is correct only if the calls were.
"""
