"""Memory: keep what a step has freed, and tell an allocator's refusal from other errors."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
_NEVER = 2**31 - 1
# How PyTorch on the CPU, CUDA, Triton, cuBLAS and NCCL say it in errors of a general kind.
_REFUSALS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "'out of memory'",
    "Storage size calculation overflowed",
)


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


def is_shortage(error: BaseException) -> bool:
    """Whether an allocator refused: Python's, numpy's, or PyTorch's for the CPU or a GPU."""
    # By its name, since importing PyTorch takes a second that the command line may not need.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(error) for words in _REFUSALS)
