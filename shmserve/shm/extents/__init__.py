"""The kinds of memory that processes can share, with the common interface in `base`.

`memfd` is passed by descriptor, `posix` by name, and `cuda` by the name of an export.
"""
