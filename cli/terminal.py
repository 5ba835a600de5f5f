"""What goes to a terminal: text of anyone's data is shown there, and not followed."""

from __future__ import annotations

import typer


def visible(text: str) -> str:
    """A text whose signs for a terminal, as the data of somebody else may hold, are spelt out; lines stay lines.

    >>> visible("\\x1b[31mred")
    '\\\\x1b[31mred'
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text for people; what programs read (JSON, YAML, CSV) is printed as it is."""
    typer.echo(visible(str(text)), err=err, nl=nl)
