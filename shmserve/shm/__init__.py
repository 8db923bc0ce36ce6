"""Shared memory: segments, the blocks in them, and numpy arrays over both.

An owner allocates in an `arena`, which grows by segments; each segment is one extent (`extents`: memfd, POSIX, CUDA,
heap), and `blocks` allocates offsets in it. Other processes map the owner's segments, read-only, with `mapped`. `views`
creates arrays over mapped `pages` and reports when the last of them is dropped, so that the owner can free the block.
`strings` is the byte form of string tensors. `counters` is a page that one process writes and another reads.
"""
