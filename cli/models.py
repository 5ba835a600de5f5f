"""``recbft models``: what can be trained, and every setting of it."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """Example: recbft models sasrec --arm bft --mixer rfa"""


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show every setting of this model, with its default.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="Show the settings of this arm.")] = None,
    mixer: Annotated[str | None, typer.Option(help="Show the settings with this mixer.")] = None,
) -> None:
    """List models, arms and mixers, or the settings of one model as a YAML file for --config."""
    from recbft.errors import UserError
    from recbft.mixers import MIXERS
    from recbft.models import MODELS
    from recbft.reporting.tables import table
    from recbft.training.run_config import load_run_config

    if name is not None:
        config = load_run_config(model=name, arm=arm, mixer=mixer)
        if config.core is not None and MIXERS[str(config.mixer)].precision == "none":
            # The default, kalman, is refused there; a file that is printed for --config is one that trains.
            config = load_run_config(None, ["core.update=residual"], model=name, arm=arm, mixer=mixer)
        typer.echo(config.to_yaml(), nl=False)
        return
    for option, value in (("--arm", arm), ("--mixer", mixer)):
        if value is not None:
            raise UserError(f"{option} needs a model; write for example: recbft models sasrec {option} {value}")
    rows = []
    for model, spec in MODELS.items():
        rows.append([model, "", spec.summary])
        rows += [["", key, spec.arm_summaries.get(key, "")] for key in spec.arms]
    typer.echo(table(["model", "arm", "what it is"], rows))
    mixers = [
        [mixer, ", ".join(model for model, spec in MODELS.items() if mixer in spec.mixers), spec.summary]
        for mixer, spec in MIXERS.items()
    ]
    typer.echo("\n" + table(["mixer", "in", "what it is"], mixers))
