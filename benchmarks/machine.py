"""The header of every result, ``recbft.comparing.provenance``, and this process's memory."""

from __future__ import annotations

import resource
import sys

from recbft.comparing.provenance import close, header, lines

__all__ = ["close", "header", "lines", "peak_rss_mb"]


def peak_rss_mb() -> int:
    """The largest resident memory this process has had, in MB (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)
