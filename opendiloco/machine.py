"""What this process may use of its machine; a container may have less than there is."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """CPU cores."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        count = min(count, math.ceil(quota / period))
    return max(1, count)


def available_bytes() -> int:
    """Memory that a new process can have."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - used + _cache_bytes())
    return max(0, available)


def _cache_bytes() -> int:
    """Of files, which the kernel counts as used and lets go of when somebody needs the memory."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(fields["inactive_file"])
    return 0
