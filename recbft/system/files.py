"""Write files so that a reader finds the old content or the new, never a part of either; read what others wrote.

Content goes to a hidden temporary file in the same folder, is flushed, and takes its name by one rename. Whatever stops
the writing (a full disk, Ctrl-C, an error of the caller's) removes the temporary file and leaves what was there before.
What a killed process has left goes when the same name is written again: whoever writes holds a lock on the temporary
file, which the system takes from the dead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recbft.errors import RunError, UserError

if TYPE_CHECKING:
    import pandas as pd

try:
    import fcntl
except ModuleNotFoundError:  # on Windows, where ``runs.locks`` refuses to work
    fcntl = None  # type: ignore[assignment]

# Refusals that writing somewhere else would mend.
_ELSEWHERE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


def user_path(path: str | Path) -> Path:
    """A path as its user means it: ``~`` at its beginning is the home folder, also where no shell has read it."""
    return Path(os.path.expanduser(path))


def write_atomic(path: str | Path, content: bytes | Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Replace the file ``path`` by ``content``, or leave it as it was.

    Args:
        path: the file, or a link to it; its folder must exist.
        content: the bytes, or a function that writes them to an open binary file.
        durable: wait until the disk holds the content, so that it outlives a power cut; a killed process needs no wait.

    Raises:
        RunError: the disk is full.
        UserError: the folder is missing or may not be written, or a device or a pipe is in the file's place.
    """
    path = user_path(path)
    file_itself = Path(os.path.realpath(path))
    temporary = file_itself.with_name(f".{file_itself.name}.{secrets.token_hex(4)}.tmp")
    with explained(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is a device or a pipe, and a whole file is written; give the name of a file")
        _sweep(file_itself)
        try:
            with open(temporary, "xb") as file:
                hold(file.fileno())
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, file_itself)
        finally:
            with contextlib.suppress(OSError):  # after the rename there is nothing left to remove
                temporary.unlink()


def write_json(path: str | Path, value: object, *, durable: bool = True) -> None:
    """Write ``value`` as indented JSON."""
    write_atomic(path, json_text(value).encode(), durable=durable)


def json_text(value: object) -> str:
    """Indented JSON; numpy numbers become plain ones."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=plain) + "\n"


_YOUNG = 1.0  # seconds
MOST_JSON = 2**26  # bytes of a file of JSON; the longest that recbft writes are far shorter


def read_json(path: Path) -> Any:
    """What a file of JSON holds. A folder may come from a stranger: a device, a pipe or a huge file is not read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file, too large, nested too deeply, or not JSON.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a file")
    if found.st_size > MOST_JSON:
        raise ValueError(f"{found.st_size:,} bytes, more than {MOST_JSON:,}")
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_parquet(path: str | Path, table: pa.Table | pd.DataFrame) -> None:
    """Write a table as Parquet, without the data frame's index."""
    if not isinstance(table, pa.Table):
        table = pa.Table.from_pandas(table, preserve_index=False)
    write_atomic(path, lambda file: pq.write_table(table, file))


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Build a folder under a hidden name beside ``path``; it gets its name if the block ends well, else is removed.

    Raises:
        UserError: ``path`` exists and is not an empty folder, or its parent may not be written.
        RunError: the disk is full.
    """
    path = user_path(path)
    if not path.name:
        raise UserError(f"'{path}' is not a folder that can be made; give it a name")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        temporary.mkdir()
        held = os.open(temporary, os.O_RDONLY)
        try:
            hold(held)
            yield temporary
            os.replace(temporary, path)  # the system refuses to replace a folder that holds anything
        finally:
            os.close(held)
            shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, as far as it may be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sweep(path: Path) -> None:
    """Remove what killed processes left of writing ``path``."""
    sweep(path.parent, re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.tmp"))


def sweep(folder: Path, leftovers: re.Pattern[str]) -> None:
    """Remove files and folders of such names that no process holds; none where files cannot be locked.

    One as young as a second stays: whoever makes it may be about to hold it.
    """
    with contextlib.suppress(OSError):  # the folder is missing, or may not be read
        for name in filter(leftovers.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                opened = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if time.time() - os.fstat(opened).st_mtime > _YOUNG and hold(opened):
                        remove(folder / name)
                finally:
                    os.close(opened)


def hold(descriptor: int) -> bool:
    """Keep an open file or folder from ``sweep`` until it is closed; False where it cannot be, or another holds it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def make_folder(path: str | Path) -> Path:
    """The folder ``path``, made with those above it unless it is there; it is filled bit by bit."""
    path = user_path(path)
    with explained(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder") from None
    return path


def refuse_input(out: str | Path, source: str | Path) -> None:
    """Refuse to write ``out`` over the file that it is made from."""
    out = user_path(out)
    if os.path.exists(out) and os.path.exists(source) and os.path.samefile(out, source):
        raise UserError(f"--out {out} is the file that is read, and writing would replace it; give another --out")


def plain(value: object) -> Any:
    """What JSON cannot hold, as what it can: numpy numbers and arrays, paths."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the system's refusals into one line that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"no space left while writing {path}; nothing there was changed: free some space and run again"
            ) from error
        if error.errno == errno.ENOENT:
            raise UserError(
                f"cannot write {path}: the folder {path.parent} does not exist; create it or name another"
            ) from error
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"{error.filename2 or error.filename} exists already; name another or remove it") from error
        reason = (error.strerror or str(error)).lower()
        if error.errno in _ELSEWHERE:
            raise UserError(f"cannot write {path}: {reason}; name another place") from error
        raise RunError(f"cannot write {path}: {reason}; nothing there was changed") from error
