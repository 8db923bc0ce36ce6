"""The suite for engines that are too large for the environment of `make test`: `make test-engines`.

Each engine of the `catalog` is installed in a separate environment in build/engines, because engines require different
versions of the same packages. The backend conformance suite and the engine's own tests run there.
"""
