"""What the C library does with memory that a step has freed."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of returning it to the system; True if the C library took the order.

    Every step takes and frees the same arrays. glibc maps and unmaps the large ones each time, and the system clears
    every page anew: on Beauty a million page faults per epoch, 7 to 8 % of its time on one Intel machine. The largest
    memory a process takes stays the same. For a process that trains and then ends; elsewhere than in glibc it does
    nothing.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries have a mallopt with other numbers
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return all(kept)
