"""GPU memory on the client side: the client's own (`tensors`, by means of `cuda`) and memory exported by others
(`foreign_memory`).

The session's `memory` uses this package; nothing here depends on requests. cupy is imported when the first GPU array is
used.
"""
