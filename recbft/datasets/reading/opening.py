"""Open a file, gzipped or not, and name it in whatever goes wrong while it is read."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from recbft.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"  # begins its files
OTHERWISE_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
SPREADSHEETS = (".xlsx", ".xlsm", ".ods", ".xls")
SPREADSHEET_STARTS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # what else has such a name is text
EMPTY = "the file is empty"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file, and the row where it can be found, in whatever goes wrong."""
    try:
        yield
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: the text {error.object!r} has no UTF-8; replace it") from None
    except csv.Error as error:
        raise UserError(f"{path}: the header cannot be read ({error}); check the separator") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: the gzip file is damaged ({error}); fetch it again") from None
    except pa.ArrowException as error:
        if isinstance(error, pa.ArrowInvalid) and "utf8" in str(error).lower().replace("-", ""):
            raise _not_utf8(path) from None
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from None
    except OSError as error:
        if error.errno is None and is_gzip(path):  # arrow's, of a stream that ends too early
            raise UserError(f"{path}: the gzip file is damaged ({one_line(error)}); fetch it again") from None
        raise UserError(f"{path}: cannot be read: {one_line(error)}; check the file and its permissions") from None


def one_line(error: BaseException) -> str:
    """The beginning of another library's message."""
    return " ".join(str(error).split())[:300]


def is_gzip(path: Path) -> bool:
    """Whether the name says so."""
    return path.suffix.lower() == ".gz"


def open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    """The content, unpacked."""
    return gzip.open(path, "rb") if is_gzip(path) else path.open("rb")


def refuse_packed(path: Path, start: bytes) -> None:
    """UserError where a file begins as a spreadsheet, or as a packer that is not read lets its files begin."""
    if path.suffix.lower() in SPREADSHEETS and start.startswith(SPREADSHEET_STARTS):
        raise UserError(f"{path}: is a spreadsheet, which is not read; save it as CSV in UTF-8")
    for begin, packer in OTHERWISE_PACKED.items():
        if start.startswith(begin):
            raise UserError(f"{path}: is packed by {packer}, which is not read; unpack it, or pack it with gzip")


def _not_utf8(path: Path) -> UserError:
    advice = "save the file as UTF-8"
    with reading(path), open_bytes(path) as file:
        start = file.read(5)
        if start.startswith(GZIP):
            return UserError(f"{path}: is gzipped; let its name end in .gz, or unpack it")
        refuse_packed(path, start)
        file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return UserError(f"{path}: line {number}: byte 0x{line[error.start]:02x} is not UTF-8; {advice}")
    return UserError(f"{path}: the file is not UTF-8; {advice}")
