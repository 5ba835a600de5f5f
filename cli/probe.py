"""``recbft probe``: what the precision channel does, whether it tells when the model is right, and why an item."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft.errors import UserError
from recbft_cli.evaluate import Part, counted_in, say_long, say_unfinished
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
    refuse_given,
)
from recbft_cli.terminal import say

if TYPE_CHECKING:
    import pandas as pd

    from recbft.api import Recommender
    from recbft.datasets.dataset import Dataset

EXAMPLES = """Examples:

recbft probe runs/sasrec-bft-ml-100k-seed0

recbft probe runs/sasrec-bft-ml-100k-seed0 --explain 196
"""


def probe(
    context: typer.Context,
    run: Run,
    part: Annotated[
        Part, typer.Option("--part", "--split", help="Which held-out item is asked for, as in `recbft evaluate`.")
    ] = Part.test,
    users: Annotated[
        int | None, typer.Option(metavar="N", help="So many users, drawn at random; all if left out.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Only explain this user's three best items (a raw id of the data)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The JSON file. If left out a probe of all users on a finished run's own test is written to "
            "RUN/probe.json, where reports find it, and no other.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Write no file.")] = False,
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
    """Print how precision flows through a trained model, and whether it knows when it is right."""
    if out is not None and no_write:
        raise UserError("--out has no effect with --no-write; give one of them")
    if explain is not None:
        refuse_given(context, ("users", "out", "no_write"), "with --explain, which explains one user; leave it out")
    how = of_other_data(context, locals())

    from recbft.api import Recommender
    from recbft.runs.folder import RunFolder
    from recbft.system.files import json_text

    folder = RunFolder.open(run)
    finished = folder.is_finished  # before its weights are read
    recommender = Recommender.load(run, data_root=data_root, unfinished=True)
    say_unfinished(folder, "probed" if explain is None else "explained")
    data = recommender.own_dataset() if dataset is None else recommender.config.data.load_again(dataset, **how)
    if explain is not None:
        _explain(recommender, data, explain, part.value, as_json)
        return
    if users is None:
        say_long(data, part)
    found = recommender.probe(data, part.value, users=users)
    own = found["protocol"]["content_hash"] == folder.protocol["content_hash"]
    other = _other_than_the_run_s(users, part, own=own, finished=finished)
    try:
        if not no_write:
            _write(found, run, out, other)
    finally:  # what was long in the making is shown where it cannot be kept
        if as_json:
            typer.echo(json_text(found), nl=False)
        else:
            _show(found, "" if own else f"training count: {counted_in(data.name)}")


def _write(found: dict[str, Any], run: Path, out: Path | None, other: str | None) -> None:
    from recbft.reporting.probe_sections import PROBE_FILE
    from recbft.system.files import write_json

    if out is None and other is not None:
        why = f"it is of all users of the run's own test, and this is {other}; give --out FILE to keep it"
        say(f"no {PROBE_FILE}: {why}", err=True)
        return
    path = run / PROBE_FILE if out is None else out
    write_json(path, found)
    say(f"written: {path}", err=True)


def _show(found: dict[str, Any], counts: str) -> None:
    from recbft.evaluation.metrics import protocol_lines
    from recbft.reporting.new_items_tables import new_items_lines
    from recbft.reporting.probe_tables import mechanism_lines, uncertainty_lines

    for lines in (
        [*mechanism_lines(found["mechanism"]), *([counts, ""] if counts else [])],
        uncertainty_lines(found["uncertainty"]),
        new_items_lines(found["new_items"]),
        protocol_lines(found["protocol"]),
    ):
        say("\n".join(lines))


def _other_than_the_run_s(users: int | None, part: Part, *, own: bool, finished: bool) -> str | None:
    """What makes a probe another than that which the run's report shows; None if nothing does."""
    if not finished:
        return "of weights that the run may not end with"
    if not own:
        return "of other data"
    if users is not None:
        return f"of {users:,} users"
    return None if part is Part.test else f"of its {part.value}"


def _explain(recommender: Recommender, dataset: Dataset, user: str, part: str, as_json: bool) -> None:
    """Print which of a user's events speak for the best items."""
    from recbft.reporting.tables import short, signed, table
    from recbft.system.files import json_text

    history = _history(dataset, user, part)
    if recommender.recommend(history, k=1).empty:
        raise UserError(
            f"user {user!r} has had every item that the model knows, so none is left to explain; name another"
        )
    found = recommender.explain(history)
    precision = found.attrs["precision"]
    if as_json:
        rows = found.astype(object).where(found.notna(), None).to_dict("records")
        typer.echo(json_text({"user": user, "precision": precision, "events": rows}), nl=False)
        return
    sure = "" if precision is None else f", posterior precision {precision:.2f}"
    say(f"user {user}: {len(history):,} events before the {part} target{sure}")
    for item, rows in found.groupby("item", sort=False):
        parts = (rows[name].tolist() for name in ("position", "event", "weight", "change"))
        body = [
            [str(p), str(event), short(weight), signed(change)] for p, event, weight, change in zip(*parts, strict=True)
        ]
        say(f"\n{item}, score {rows['score'].iloc[0]:.3f}")
        say(table(["place", "event", "weight", "change"], body))
    own = found.attrs["own_weight"]
    rest = f"; the mask keeps {own:.3f}" if own else ""
    say(f"\nweight: share of the last layer's attention at the last token{rest}.")
    say("change: the score less that of the history without the event; above 0 the event speaks for the item.")


def _history(dataset: Dataset, user: str, part: str) -> pd.DataFrame:
    """What a user's held-out item is ranked from."""
    import pandas as pd

    from recbft.evaluation.views import view_of

    view = view_of(dataset, part)
    ids = [str(one) for one in dataset.user_ids[view.user].tolist()]
    if user not in ids:
        raise UserError(f"there is no user {user!r} in {dataset.name!r}; its users have ids such as {ids[0]!r}")
    number = ids.index(user)
    events = slice(view.start[number], view.stop[number])
    history: pd.DataFrame = pd.DataFrame({"user_id": user, "item_id": dataset.decode(view.items[events])})
    if view.times is not None:
        times, unit = view.times[events], dataset.preparation.get("time_unit")
        history["timestamp"] = times if unit is None else times.astype(f"datetime64[{unit}]")  # in any model's unit
    return history
