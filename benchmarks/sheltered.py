"""Units of work in a process beside this one, which is replaced where it dies, hangs or is spoilt.

After an illegal access to memory nothing that a process asks of its GPU succeeds, and a kernel may never end: neither
may take with it what has not been measured yet. The process is started anew only then, since that takes seconds.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Row = dict[str, Any]
PARTING = 10.0  # seconds that the end of a process may take


class Unit(NamedTuple):
    """Work that gives rows, and what stands before each of them."""

    part: str
    labels: Row
    run: Callable[[], Iterator[Row]]


class Inline:
    """The units that ``make`` gives, in this process."""

    def __init__(self, make: Callable[..., Sequence[Unit]], *arguments: Any) -> None:
        self.units = list(make(*arguments))

    def rows(self, number: int) -> Iterator[Row]:
        """What a unit gives; where it fails, a row that says so."""
        yield from rows_of(self.units[number])

    def close(self) -> None:
        """Nothing is left."""


class Sheltered:
    """Units in a process beside this one.

    Args:
        make: gives the units, here and there; a function of a module.
        arguments: what it is given.
        patience: seconds that a row may take, the start of the process included.
        last: the monotonic time at which nothing is waited for any more.
        healthy: raises where the process can do no more work; a function of a module.
    """

    def __init__(
        self,
        make: Callable[..., Sequence[Unit]],
        *arguments: Any,
        patience: float = 120.0,
        last: float = math.inf,
        healthy: Callable[[], None],
    ) -> None:
        self.units = list(make(*arguments))
        self._made, self.patience, self.last = (make, arguments, healthy), patience, last
        self._process: Any = None

    def rows(self, number: int) -> Iterator[Row]:
        """What a unit gives; where it fails or ends its process, a row that says so."""
        if self._process is None or not self._process.is_alive():
            self.close()
            self._start()
        self._pipe.send(number)
        works = False
        try:
            while isinstance(said := self._said(), dict):
                yield said
            works = said is None
            if isinstance(said, str):
                yield self.units[number].labels | {"failed": said}
        finally:  # also where nobody wants the rest
            if not works:
                self.close()

    def _said(self) -> Row | str | bool | None:
        """The next row, or what ends a unit: None, False where its process can do no more, or why nothing came."""
        try:
            patience = max(0.0, min(self.patience, self.last - time.monotonic()))
            if not self._pipe.poll(patience):
                return f"nothing came within {patience:.0f} s"
            said: Row | bool | None = self._pipe.recv()
            return said
        except (EOFError, ConnectionResetError):
            self._process.join(PARTING)
            return f"its process ended with code {self._process.exitcode}"

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join(PARTING)  # one that waits for its GPU may not end
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        new = multiprocessing.get_context("spawn")
        self._pipe, theirs = new.Pipe()
        self._process = new.Process(target=_serve, args=(theirs, *self._made), daemon=True)
        self._process.start()
        theirs.close()


def rows_of(unit: Unit) -> Iterator[Row]:
    """What a unit gives, labelled; where it fails, a row that says so."""
    try:
        for row in unit.run():
            yield unit.labels | row
    except Exception as error:  # nothing more comes of this unit
        yield unit.labels | failure(error)


def failure(error: Exception) -> Row:
    """The row of what failed."""
    return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def _serve(
    pipe: Connection, make: Callable[..., Sequence[Unit]], arguments: Sequence[Any], healthy: Callable[[], None]
) -> None:
    """Give the rows of each unit that is asked for, then None, or False where there can be no more."""
    units = list(make(*arguments))
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        for row in rows_of(units[number]):
            pipe.send(row)
        try:
            healthy()
        except Exception:  # as the unit's own row of failure says
            pipe.send(False)
            return
        pipe.send(None)
