"""Shared memory: segments, the blocks in them, and numpy arrays over both.

An owner allocates in an `arena`, which grows by segments. Each segment is one extent (`extents`: memfd, POSIX, CUDA),
in which `blocks` allocates offsets. Other processes map the owner's segments read-only with `mapped`. `views` creates
arrays over mapped `pages` and reports when the last one is dropped, so that the owner can free the block. `strings`
encodes string tensors. `counters` and `lease_log` are pages that one process writes and another reads.
"""
