"""What comes through a pipe, as a file that can be read more than once."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recbft.errors import UserError

PIPE = Path("-")
BEGINNINGS = {b"PAR1": "parquet", b"{": "jsonl"}  # of the formats that tell; anything else is CSV


@contextmanager
def as_file(path: Path) -> Iterator[Path]:
    """The file itself; for ``-`` (stdin) and other pipes a copy that is gone afterwards.

    Raises:
        UserError: what the block raises, with the pipe's name in place of the copy's.
    """
    if path != PIPE and not path.is_fifo():
        yield path
        return
    from recbft.datasets.formats import BYTE_ORDER_MARK, GZIP, open_bytes, reading

    with tempfile.TemporaryDirectory(prefix="recbft-") as folder:
        copy = Path(folder) / "stdin"
        with copy.open("wb") as kept:
            if path == PIPE:
                shutil.copyfileobj(sys.stdin.buffer, kept)
            else:
                with path.open("rb") as pipe:
                    shutil.copyfileobj(pipe, kept)
        named = copy
        try:
            with copy.open("rb") as kept:
                packed = ".gz" if kept.read(len(GZIP)) == GZIP else ""
            named = copy.rename(copy.with_suffix(packed))
            with reading(named), open_bytes(named) as kept:
                start = kept.read(8).removeprefix(BYTE_ORDER_MARK)
            ending = next((name for begin, name in BEGINNINGS.items() if start.startswith(begin)), "csv")
            named = named.rename(copy.with_suffix(f".{ending}{packed}"))
            yield named
        except UserError as error:
            raise UserError(str(error).replace(str(named), "stdin" if path == PIPE else str(path))) from None
