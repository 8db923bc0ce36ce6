"""The kinds of memory that processes can share, with the common interface in `base`.

`memfd` extents are shared by descriptor, `posix` extents by name, and `cuda` extents by an exported handle in the name.
"""
