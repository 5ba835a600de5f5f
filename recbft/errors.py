"""The two ways a command ends badly, and the sentence that suggests the right name.

``UserError`` is something the user can mend (bad usage, bad data: exit code 2); ``RunError`` is a run that failed
(exit code 1). Every message is one line: what was wrong, which value, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

MOST_CHOICES = 100  # that a message lists
LONGEST = 2000  # characters of a message; a value that a file holds may have any length


def shortened(message: str) -> str:
    """A message without the middle of a very long one."""
    return f"{message[: LONGEST // 2]} [...] {message[-LONGEST // 4 :]}" if len(message) > LONGEST else message


def shown(value: object) -> str:
    """A value of any kind as a message shows it: on one line, and its beginning if it is long.

    >>> shown({"histories": "a"})
    "{'histories': 'a'}"
    """
    return " ".join(repr(value).split())[:60]


def visible(text: str) -> str:
    """A text whose signs for a terminal, as the data of somebody else may hold, are spelt out; lines stay lines.

    >>> visible("\\x1b[31mred")
    '\\\\x1b[31mred'
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


class UserError(ValueError):
    """Wrong usage or wrong data; the message says what to change."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class MissingColumnError(UserError):
    """A table lacks a column."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


class ColdStartError(UserError):
    """No history holds an item that the model knows: a service answers these users with a list of its own."""


class RunError(RuntimeError):
    """A run that failed or cannot be continued; the message says why and what is left."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class OneProcessError(RunError):
    """A run that failed in this process; others that train it with this one may not have met the same."""


class RunInterruptedError(RunError):
    """A run that its user stopped; its last whole epoch is saved, and the message says how to go on."""


def permission_denied(error: PermissionError) -> str:
    """What to say of a file that this user may not open."""
    return f"{error.filename} cannot be opened: permission denied; ask for the right to it, or name another"


@contextmanager
def permissions_explained() -> Iterator[None]:
    """Let what the user may not open be a ``UserError``."""
    try:
        yield
    except PermissionError as error:
        raise UserError(permission_denied(error)) from None


def closest(name: str, choices: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The choice that an unknown ``name`` was likely meant to be, if there is one; ``alike`` is how sure, up to 1."""
    known = sorted(choices)
    near = [choice for choice in known if choice.casefold() == name.casefold()]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=alike)
    return near[0] if near else None


def did_you_mean(
    name: str, choices: Iterable[str], *, listed_as: str | None = None, listed_by: str | None = None
) -> str:
    """Close a message about an unknown ``name``: the nearest choice if there is one, else the whole list.

    Args:
        listed_as: what the choices are, such as "columns", to list them behind the nearest one too.
        listed_by: what lists all of many choices, in whose place the message names a few.

    >>> did_you_mean("User_ID", ["item_id", "user_id"]), did_you_mean("rating", ["item_id", "user_id"])
    ("did you mean 'user_id'?", 'choose one of item_id, user_id')
    >>> did_you_mean("stars", ["rating", "", ""])
    'choose one of rating'
    """
    choices = [choice for choice in choices if choice.strip()]  # a file's header may end in separators
    if not choices:
        return "there is none here; leave it out"
    if (near := closest(name, choices)) is None and listed_by is not None:
        few = difflib.get_close_matches(name, sorted(choices), n=3, cutoff=0.3)
        return f"{listed_by} lists all" + (f"; the nearest are {', '.join(few)}" if few else "")
    if near is None:
        return f"choose one of {_first(sorted(choices))}"
    return f"did you mean {near!r}?" + (f" ({listed_as}: {_first(choices)})" if listed_as else "")


def _first(names: Sequence[str]) -> str:
    """The names side by side, of very many the first."""
    more = f" and {len(names) - MOST_CHOICES:,} more" if len(names) > MOST_CHOICES else ""
    return f"{', '.join(names[:MOST_CHOICES])}{more}"
