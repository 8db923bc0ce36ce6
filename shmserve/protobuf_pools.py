"""Descriptors of protobuf messages, from the files that `make proto` writes, each in a separate pool.

Other packages register files with the same names in the process-wide pool, where duplicates fail at import.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool


def pool_of(path: Path) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
        pool.Add(file)
    return pool
