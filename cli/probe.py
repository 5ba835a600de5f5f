"""``recbft probe``: what the precision channel does, whether it tells when the model is right, and why an item."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft.errors import UserError
from recbft_cli.columns import Columns, DataRoot, Item, Separator, Time, User, of_other_data
from recbft_cli.evaluate import Part, counted_in, say_long, say_unfinished
from recbft_cli.given import refuse_given
from recbft_cli.options import OtherData, Run
from recbft_cli.tables import table

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
    separator: Separator = None,
    columns: Columns = None,
) -> None:
    """Print how precision flows through a trained model, and whether it knows when it is right."""
    if out is not None and no_write:
        raise UserError("--out has no effect with --no-write; give one of them")
    if explain is not None:
        refuse_given(context, ("users", "out", "no_write"), "with --explain, which explains one user; leave it out")
    how = of_other_data(context, dataset, user=user, item=item, time=time, separator=separator, columns=columns)

    from recbft.api import Recommender
    from recbft.files import json_text
    from recbft.training.run_folder import RunFolder

    folder = RunFolder.open(run)
    finished = folder.is_finished  # before its weights are read
    recommender = Recommender.load(run, data_root=data_root)
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
    from recbft.files import write_json
    from recbft.reporting.probe_sections import PROBE_FILE

    if out is None and other is not None:
        why = f"it is of all users of the run's own test, and this is {other}; give --out FILE to keep it"
        typer.echo(f"no {PROBE_FILE}: {why}", err=True)
        return
    path = run / PROBE_FILE if out is None else out
    write_json(path, found)
    typer.echo(f"written: {path}", err=True)


def _show(found: dict[str, Any], counts: str) -> None:
    from recbft.evaluation.protocol import protocol_lines

    for lines in (
        [*_mechanism(found["mechanism"]), *([counts, ""] if counts else [])],
        _uncertainty(found["uncertainty"]),
        protocol_lines(found["protocol"]),
    ):
        typer.echo("\n".join(lines))


def _other_than_the_run_s(users: int | None, part: Part, *, own: bool, finished: bool) -> str | None:
    """What makes a probe another than that which the run's report shows; None if nothing does."""
    if not finished:
        return "of weights that the run may not end with"
    if not own:
        return "of other data"
    if users is not None:
        return f"of {users:,} users"
    return None if part is Part.test else f"of its {part.value}"


def _mechanism(found: dict[str, Any]) -> list[str]:
    """What happens inside, layer by layer."""
    lines = [f"MECHANISM: {found['num_tokens']:,} tokens of {found['num_users']:,} {found['part']} histories"]
    if not found["tracks_precision"]:
        lines += ["", "This model tracks no precision: there is none to probe, only what attention itself says."]
    names = [row["name"] for row in found["bins"]]
    counts = ["training count", *(row["counts"] for row in found["bins"]), "", ""]
    for layer in found["layers"]:
        header = [f"layer {layer['layer']}", *names, "rho", "p"]
        rows = [counts] + [
            [name.replace("_", " "), *map(_short, row["bins"]), _signed(row["rho"]), _p(row["p"])]
            for name, row in layer["quantities"].items()
        ]
        lines += ["", table(header, rows)]
        lines += _layer_words(layer, found["cap"])
    if found["layers"]:
        lines += [
            "",
            "Means over tokens, by how often the token's item occurs in training (Q0 rarest). rho: Spearman's with",
            "that count, over items.",
        ]
    if found["tracks_precision"]:
        lines.append("Gain: the share of what attention found that a position takes up.")
    return [*lines, *_initial_words(found), *_first_position(found["layers"]), ""]


def _layer_words(layer: dict[str, Any], cap: float) -> list[str]:
    lines = []
    if layer["saturated"] is not None:
        shares = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in layer["saturated"].items())
        lines.append(f"coordinates at the cap of {cap:g}: {shares}")
    parts = []
    if layer["process_noise"] is not None:
        parts.append(
            f"process noise {_short(layer['process_noise']['mean'])} (largest {_short(layer['process_noise']['max'])})"
        )
    if "jacobian_used" in layer["quantities"]:
        parts.append(f"Jacobian in use: {layer['jacobian_mode'].replace('_', ' ')}")
    if layer["recency_decay"] is not None:
        parts.append(f"recency decay {layer['recency_decay']:.3f} per position")
    return [*lines, "; ".join(parts)] if parts else lines


def _initial_words(found: dict[str, Any]) -> list[str]:
    initial = found["initial_precision"]
    if initial is None:
        return []
    names = [row["name"] for row in found["bins"] if row["name"] != "mask"]
    means = ["mean over items", *map(_short, initial["bins"]), _signed(initial["rho"]), _p(initial["p"])]
    lines = ["", table(["initial precision of items", *names, "rho", "p"], [means])]
    for end, place in (("at_floor", "floor"), ("at_cap", "cap")):
        if initial[end]:
            lines.append(
                f"{initial[end]:.1%} of the items lie at the {place} of the range, where nothing is learned any more"
            )
    if initial["levels"] is not None:
        rows = [[f"{row['reliability']:g}", row["num_items"], _short(row["mean"])] for row in initial["levels"]]
        lines += ["", table(["planted reliability", "items", "initial precision"], rows)]
        lines.append(
            f"Spearman's rho of an item's initial precision with its planted reliability: "
            f"{_signed(initial['rho_reliability'])} (p {_p(initial['p_reliability'])})"
        )
    by_user = found["user_reliability"]
    if by_user is not None:
        lines.append(
            f"of a user's posterior precision with the user's planted reliability: {_signed(by_user['rho'])} "
            f"(p {_p(by_user['p'])})"
        )
    return lines


def _first_position(layers: list[dict[str, Any]]) -> list[str]:
    rows = [
        [f"{layer['layer']}", f"{row['head']}", _short(row["share"]), _short(row["uniform"]), _short(row["gain"]),
         _signed(row["rho"]), _p(row["p"]), _signed(row["rho_given_keys"]), _p(row["p_given_keys"])]
        for layer in layers for row in layer["first_position"] or ()
    ]  # fmt: skip
    if not rows:
        return []
    header = ["layer", "head", "on first token", "if even", "gain", "rho", "p", "rho at equal length", "p"]
    return [
        "", table(header, rows),
        "Attention of each user's last token on the history's first token, beside an even spread; rho: with the head's",
        "gain, over users. Above the even share, the first token serves as a sink.",
    ]  # fmt: skip


def _uncertainty(found: dict[str, Any]) -> list[str]:
    """Whether confidence goes with being right."""
    k = found["k"]
    lines = [
        f"UNCERTAINTY: right means the target among the first {k} of {found['num_items']:,} items: "
        f"{found['hit_rate']:.1%} of {found['num_users']:,} users",
        "",
    ]
    rows = []
    for name, row in found["confidences"].items():
        above = row.get("reference_above")
        rows.append(
            [name.replace("_", " "), _three(row["auroc"]), _range(row["auroc_interval"]), _three(row["aurc"]),
             _three(row["excess_aurc"]), row["num_distinct"],
             "" if above is None else f"{_signed(above['auroc'])} {_range(above['interval'])}"]
        )  # fmt: skip
    lines.append(table(["confidence", "AUROC", "interval", "AURC", "excess", "values", "precision above it"], rows))
    lines += [f"{name.replace('_', ' ')}: {row['verdict']}" for name, row in found["confidences"].items()]
    lines.append(
        f"AUROC 0.5 says nothing, 1 all. AURC: mean share of misses as ever more users are served, surest first; "
        f"{found['random_aurc']:.4f} if unsorted, {found['optimal_aurc']:.4f} at best."
    )
    if found["saturation"] is None:
        lines.append("This model tracks no precision: there is none to judge by.")
    else:
        s = found["saturation"]
        lines.append(
            f"At the cap of {s['cap']:g}: {s['coordinates']:.1%} of the coordinates, and every coordinate of "
            f"{s['users']:.1%} of the users; {s['num_distinct']:,} distinct precisions."
        )
    return [*lines, "", *_calibration(found["calibration"]), f"Intervals: {found['intervals']}.", ""]


def _calibration(found: dict[str, Any]) -> list[str]:
    ways = {"before": "as trained", "after": "fitted"}
    nll = [[way, f"{found['nll'][when]:.4f}", _range(found["nll"][f"{when}_interval"])] for when, way in ways.items()]
    rows = [
        [way, name, f"{one['ece']:.4f}", _range(one["interval"]), f"{one['floor']:.4f}",
         f"{one['mean_probability']:.4f}", f"{one['hit_rate']:.4f}"]
        for when, way in ways.items() for name, one in found[when].items()
    ]  # fmt: skip
    return [
        table(["probabilities", "NLL of the target", "interval"], nll),
        f"Fitted: at temperature {found['temperature']:.3f} and lapse rate {found['lapse']:.3f}, fitted on the "
        f"{found['fitted_on']} targets of {found['fitted_users']:,} users among all items;",
        "lists that leave seen items out have a fit of their own. "
        f"Equal probabilities have {found['nll']['uniform']:.4f}.",
        "",
        table(["probabilities", "of", "ECE", "interval", "by chance", "claimed", "happened"], rows),
        "claimed: the probability of the first items together. ECE: how far claimed and happened lie apart over ten",
        "groups of users; by chance: what it would be if every claim were true (its interval has that much on top).",
    ]


def _explain(recommender: Recommender, dataset: Dataset, user: str, part: str, as_json: bool) -> None:
    """Print which of a user's events speak for the best items."""
    from recbft.files import json_text

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
    typer.echo(f"user {user}: {len(history):,} events before the {part} target{sure}")
    for item, rows in found.groupby("item", sort=False):
        parts = (rows[name].tolist() for name in ("position", "event", "weight", "change"))
        body = [
            [str(p), str(event), _short(weight), _signed(change)]
            for p, event, weight, change in zip(*parts, strict=True)
        ]
        typer.echo(f"\n{item}, score {rows['score'].iloc[0]:.3f}")
        typer.echo(table(["place", "event", "weight", "change"], body))
    own = found.attrs["own_weight"]
    rest = f"; the mask keeps {own:.3f}" if own else ""
    typer.echo(f"\nweight: share of the last layer's attention at the last token{rest}.")
    typer.echo("change: the score less that of the history without the event; above 0 the event speaks for the item.")


def _history(dataset: Dataset, user: str, part: str) -> pd.DataFrame:
    """What a user's held-out item is ranked from."""
    import pandas as pd

    ids = [str(one) for one in dataset.user_ids.tolist()]
    if user not in ids:
        raise UserError(f"there is no user {user!r} in {dataset.name!r}; its users have ids such as {ids[0]!r}")
    number = ids.index(user)
    events = slice(dataset.offsets[number], dataset.offsets[number + 1] - (1 if part == "test" else 2))
    history: pd.DataFrame = pd.DataFrame({"user_id": user, "item_id": dataset.decode(dataset.items[events])})
    if dataset.times is not None:
        times, unit = dataset.times[events], dataset.preparation.get("time_unit")
        history["timestamp"] = times if unit is None else times.astype(f"datetime64[{unit}]")  # in any model's unit
    return history


def _short(value: float | None) -> str:
    """Three digits that matter, or so; a dash for none."""
    if value is None or value != value:
        return "-"
    size = abs(value)
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}" if size >= 0.1 or size == 0 else f"{value:.2g}"


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:+.3f}"


def _p(value: float | None) -> str:
    from recbft.experiments.document import p_text

    return "-" if value is None else p_text(value)


def _range(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
