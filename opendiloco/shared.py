"""Memory that the trainer and its network process both see: fp32 vectors in an anonymous file.

An anonymous file (memfd) leaves nothing in /dev/shm, is not bound by a container's small /dev/shm, and goes away
with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping

import torch
from torch import Tensor


def create_shared_memory() -> int:
    """An empty anonymous file; returns its descriptor; pass it to the other process with `pass_fds`."""
    return os.memfd_create("opendiloco", os.MFD_CLOEXEC)


def map_vectors(descriptor: int, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Map one fp32 vector per entry of `sizes` (values each) from the file, which grows to hold them.

    Both processes call this with the same sizes. A vector begins as zeros.

    Raises:
        OSError: there is not that much memory.
    """
    total = sum(_padded(size) for size in sizes.values())
    if os.fstat(descriptor).st_size < total:
        os.ftruncate(descriptor, total)
    memory = mmap.mmap(descriptor, max(total, mmap.PAGESIZE)) if total else mmap.mmap(-1, mmap.PAGESIZE)
    vectors, offset = {}, 0
    for name, size in sizes.items():
        vectors[name] = torch.frombuffer(memory, dtype=torch.float32, count=size, offset=offset) if size else _empty()
        offset += _padded(size)
    return vectors


def _padded(size: int) -> int:
    """Bytes of a vector, filled up to whole pages."""
    return -(-size * 4 // mmap.PAGESIZE) * mmap.PAGESIZE


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.float32)
