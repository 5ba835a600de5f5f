"""``recbft evaluate``: rank the held-out items again with a trained model."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from recbft.errors import UserError
from recbft_cli.options import (
    Columns,
    DataRoot,
    Item,
    ItemKinds,
    Items,
    OtherData,
    Run,
    Separator,
    Session,
    Time,
    User,
    of_other_data,
)
from recbft_cli.terminal import say

if TYPE_CHECKING:
    from recbft.datasets import Dataset
    from recbft.runs.folder import RunFolder

MANY_SCORES = 10**9  # users by items: some ten seconds
EXAMPLES = "Example: recbft evaluate runs/sasrec-bft-ml-100k-seed0 --both"


class Part(str, Enum):
    """Which held-out item is ranked."""

    test = "test"
    validation = "validation"


def evaluate(
    context: typer.Context,
    run: Run,
    part: Annotated[Part, typer.Option(help="Which held-out item is ranked.")] = Part.test,
    filter_seen: Annotated[
        bool, typer.Option("--filter-seen", help="Leave out of the ranking what the user has seen.")
    ] = False,
    both: Annotated[
        bool, typer.Option("--both", help="Print both settings: all items ranked, and seen ones left out.")
    ] = False,
    dataset: OtherData = None,
    data_root: DataRoot = None,
    user: User = None,
    item: Item = None,
    time: Time = None,
    session: Session = None,
    separator: Separator = None,
    columns: Columns = None,
    items: Items = None,
    item_kinds: ItemKinds = None,
) -> None:
    """Rank every user's held-out item among all items with a trained model."""
    if filter_seen and both:
        raise UserError("--filter-seen has no effect with --both, which prints both settings; give one of them")
    how = of_other_data(context, locals())

    from recbft.api import Recommender
    from recbft.config.fields import to_dict
    from recbft.evaluation.metrics import headline_setting, protocol
    from recbft.reporting.run_tables import format_exposure, format_metrics
    from recbft.runs.folder import RunFolder

    recommender = Recommender.load(run, data_root=data_root, unfinished=True)
    config = recommender.config
    folder = RunFolder.open(run)
    say_unfinished(folder, "evaluated")
    data = recommender.aligned(None if dataset is None else config.data.load_again(dataset, **how))
    say_long(data, part)
    evaluation = recommender.evaluate(data, part.value)
    filter_seen = filter_seen or config.evaluation.filter_seen
    setting = headline_setting(filter_seen)
    own = folder.protocol
    made = protocol(
        data,
        part=evaluation.part,
        filter_seen=filter_seen,
        max_length=own["max_length"],
        seed=config.seed,
        config=to_dict(config),
        begun_from=own.get("begun_from"),
    )
    shown = tuple(evaluation.metrics) if both else (setting,)
    say(format_metrics({name: evaluation.metrics[name] for name in shown}, made))
    assert evaluation.exposure is not None
    exposure = {name: evaluation.exposure[name] for name in shown}
    say(format_exposure(exposure, float(evaluation.per_user["target_count"].mean()), made))
    if made["content_hash"] != own["content_hash"]:
        say(f"popularity: {counted_in(data.name)}")


def say_unfinished(folder: RunFolder, asked: str) -> None:
    """Warn that not a run's best weights are asked, but the best so far."""
    if not folder.is_finished:
        say(f"warning: {folder.path} is not finished; the best of its epochs so far is {asked}", err=True)


def say_long(data: Dataset, part: Part) -> None:
    """Say what is being worked on where it takes more than a few seconds."""
    if data.num_tested * data.num_items > MANY_SCORES:
        whose = f"the {part.value} items of {data.num_tested:,} users"
        say(f"ranking {whose} among {data.num_items:,} items", err=True)


def counted_in(dataset: str) -> str:
    """Whose training counts stand in a table of other data than the run's."""
    return f"training events in {dataset}, not in what the model was trained on"
