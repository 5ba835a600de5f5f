"""What goes to a terminal: text of anyone's data is shown there, and not followed."""

from __future__ import annotations

import typer

from recbft.errors import visible


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text for people; what programs read (JSON, YAML, CSV) is printed as it is."""
    typer.echo(visible(str(text)), err=err, nl=nl)
