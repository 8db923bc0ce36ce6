"""The suite for engines that are too large for the environment of `make test`: `make test-engines`.

Each engine of the `catalog` is installed in an environment of its own, in build/engines, because engines ask for
different versions of the same packages. There the conformance suite of the backends runs for it, and its own tests.
"""
