"""Where a fit in Python leaves its run: the folder asked for, or a temporary one that goes with its last holder."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recbft.errors import RunInterruptedError


class FittedFolder(NamedTuple):
    """The run's folder and, for a temporary one, what removes it."""

    path: Path
    remove: Callable[[], None] | None

    def go_with(self, run: Any) -> None:
        """Let a temporary folder live as long as this object and its copies in this process."""
        if self.remove is not None:
            kept = _Kept()
            vars(run)["kept"] = kept
            weakref.finalize(kept, self.remove)


@contextmanager
def fitted_folder(out: str | Path | None) -> Iterator[FittedFolder]:
    """The folder of a new run; a temporary one that failed goes at once, after an interruption if it is empty."""
    if out is not None:
        yield FittedFolder(Path(out), None)
        return
    place = tempfile.mkdtemp(prefix="recbft-")
    remove = partial(_remove, place, os.getpid())
    try:
        yield FittedFolder(Path(place) / "run", remove)
    except RunInterruptedError:
        with suppress(OSError):  # it holds something
            Path(place).rmdir()
        raise
    except BaseException:
        remove()
        raise


def _remove(place: str, owner: int) -> None:
    """Remove a folder in the process that made it: one forked from it ends earlier, and holds copies of its objects."""
    if os.getpid() == owner:
        shutil.rmtree(place, ignore_errors=True)


class _Kept:
    """Held by a run in a temporary folder and by its copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
