"""The header of every result, ``recbft.comparing.provenance``, as a command; and this process's memory.

python -m benchmarks.machine
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

from benchmarks.command import finish, parser
from recbft.comparing.provenance import close, device_of, header, lines
from recbft.system.files import json_text

__all__ = ["close", "device_of", "header", "lines", "peak_rss_mb"]


def peak_rss_mb() -> int:
    """The largest resident memory this process has had, in MB (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def main(arguments: Sequence[str]) -> int:
    parser("machine", "The header that stands above every result, alone.").parse_args(arguments)
    made = close(header("python -m benchmarks.machine"))
    print("\n".join(lines(made)))
    print(json_text(made), end="")
    return 0


if __name__ == "__main__":
    finish(main)
