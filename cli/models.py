"""``recbft models``: what can be trained, and every setting of it."""

from __future__ import annotations

from typing import Annotated

import typer

from recbft_cli.tables import table

EXAMPLES = """Example: recbft models sasrec --arm published"""


def models(
    name: Annotated[str | None, typer.Argument(help="Show every setting of this model, with its default.")] = None,
    arm: Annotated[str | None, typer.Option(help="Show the settings of this arm.")] = None,
) -> None:
    """List models and arms, or the settings of one model as a YAML file for --config."""
    from recbft.errors import UserError
    from recbft.models import MODELS
    from recbft.run_config import load_run_config

    if name is not None:
        typer.echo(load_run_config(model=name, arm=arm).to_yaml(), nl=False)
        return
    if arm is not None:
        raise UserError("--arm needs a model; write for example: recbft models sasrec --arm published")
    rows = []
    for model, spec in MODELS.items():
        rows.append([model, "", spec.summary])
        rows += [["", key, spec.arm_summaries.get(key, "")] for key in spec.arms]
    typer.echo(table(["model", "arm", "what it is"], rows))
