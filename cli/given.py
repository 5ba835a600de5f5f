"""Options of a command line that another one makes pointless."""

from __future__ import annotations

from collections.abc import Iterable

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
