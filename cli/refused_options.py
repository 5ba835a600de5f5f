"""What a command line gives in vain, since another option decides it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from recbft.errors import UserError


def refuse_given(context: typer.Context, parameters: Iterable[str], why: str) -> None:
    """Refuse the first of these that the command line names; what the environment sets is meant for any command.

    Args:
        parameters: the command's, by their names in Python.
        why: goes on from "OPTION has no effect".
    """
    options = {parameter.name: max(parameter.opts, key=len) for parameter in context.command.params}
    for name in parameters:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"{options[name]} has no effect {why}")


def one_file(given: Sequence[Path] | None) -> Path | None:
    """The file of ``--config``; several would be read as the last of them alone."""
    if given and len(given) > 1:
        names = " and ".join(map(str, given))
        raise UserError(f"--config is given {len(given)} times; put what {names} say into one file")
    return given[0] if given else None


def refuse_set(settings: Sequence[str], options: Iterable[str]) -> None:
    """Refuse a ``--set`` of what these options, which have values of their own, decide for each run.

    Args:
        options: such as ``--seeds``, of the key ``seed``.
    """
    for option in options:
        key = option.removeprefix("--").removesuffix("s")
        if any(text.partition("=")[0].strip() == key for text in settings):
            raise UserError(f"--set {key} has no effect, since {option} decides it for each run; give {option}")
