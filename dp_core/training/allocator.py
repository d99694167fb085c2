"""Keep freed memory for the next step.

By default glibc fetches every large block from the operating system and gives it back when freed;
a training step frees and fetches the same gigabytes each time, and the zeroing of fresh pages
took a tenth of a step at 4 layers of 256. With this the process keeps what it once had.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # <malloc.h>
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the C library; return whether it understood. Elsewhere than on glibc: False."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _MMAP_THRESHOLD: _NEVER,
        _TRIM_THRESHOLD: _NEVER,
        _TOP_PAD: 1 << 26,
        _ARENA_MAX: 1,  # other arenas cannot hold blocks above 64 MiB
    }
    return all(mallopt(option, value) == 1 for option, value in settings.items())
