"""The tables of new items: what they get, what that costs known ones, and what a mere constant would do.

As other tables of probes: of one probe in a terminal, of several arms and seeds on a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recbft.evaluation.metrics import SETTINGS, headline_setting
from recbft.evaluation.strata import MIN_USERS
from recbft.experiments.lists import counted
from recbft.reporting.probe_tables import (
    Parts,
    by_arm,
    each_probe,
    in_a_terminal,
    interval_of,
    interval_words,
    mean_of,
    means_of,
    over_seeds,
    probe_table,
)
from recbft.reporting.tables import Cell, Column, Table


def new_items_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What one probe says of new items, for a terminal; nothing where there are none."""
    if found is None:
        return []
    parts = {"": {0: found}}
    lines = [
        f"NEW ITEMS: {found['targets']['new']:,} of {found['targets']['all']:,} targets are of the "
        f"{found['num_new_items']:,} items without a training event"
    ]
    if found["users"]["new"] < MIN_USERS:
        few = counted(found["users"]["new"], "user")
        lines.append(f"{few} have these targets, too few to say anything of others; {MIN_USERS} are the fewest")
    return [*lines, *in_a_terminal(new_items_tables(parts)), *new_items_words(parts), ""]


def new_items_tables(parts: Parts) -> list[Table]:
    """What new and known items get as the model is and with new ones never listed, and the sweep of a constant."""
    return [_cost_table(parts), _among_new_table(parts), _sweep_table(parts)]


def new_items_words(parts: Parts) -> list[str]:
    """Whether a constant does as well, a line per arm."""
    lines = []
    for arm, each in parts.items():
        ones = list(each.values())
        key = f"hr@{ones[0]['k']}"
        known = mean_of([(one["as_is"]["known"] or {}).get(key) for one in ones])
        new = mean_of([one["as_is"]["new"][key] for one in ones])
        if known is None or new is None:
            continue
        swept = [_means_of_sweep(ones, at, key) for at in range(len(ones[0]["sweep"]))]
        level = [row for row in swept if row[1] is not None and row[1] >= known and row[2] is not None]
        best = max(level, key=lambda row: row[2] or 0.0, default=None)
        said = "no constant of the sweep leaves known targets as much"
        if best is not None:
            said = f"a constant of {best[0]:.4g} on all new items leaves known targets as much and gives {best[2]:.4f}"
        of = f"{arm}: " if arm else ""
        lines.append(f"{of}{key.upper()} of new targets {new:.4f} at {known:.4f} of known ones; {said}.")
    return lines


def sweep_curves(parts: Parts) -> dict[str, tuple[list[float], list[float]]]:
    """For a plot: hits of known and of new targets along each arm's sweep, means over its probed seeds."""
    curves = {}
    for arm, ones in by_arm(parts):
        key = f"hr@{ones[0]['k']}"
        rows = [_means_of_sweep(ones, at, key) for at in range(len(ones[0]["sweep"]))]
        kept = [(row[1], row[2]) for row in rows if row[1] is not None and row[2] is not None]
        curves[f"{arm}, constant"] = ([x for x, _ in kept], [y for _, y in kept])
        known, new = (mean_of([(one["as_is"][of] or {}).get(key) for one in ones]) for of in ("known", "new"))
        if known is not None and new is not None:
            curves[f"{arm}, as it is"] = ([known] * 3, [new] * 3)  # a point: three of one place are drawn with a marker
    return curves


def _cost_table(parts: Parts) -> Table:
    first = next(each_probe(parts))[2]
    keys = (f"hr@{first['k']}", f"ndcg@{first['k']}")
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        for targets in ("all", "known", "new"):
            said = "all_gain" if targets == "all" else "known_loss" if targets == "known" else None
            for key in keys:
                levels = [[(one[how][targets] or {}).get(key) for one in ones] for how in ("never_listed", "as_is")]
                before, after = map(mean_of, levels)
                changes = [None if a is None or b is None else b - a for a, b in zip(*levels, strict=True)]
                tested = [one[said][key] for one in ones if said is not None and one[said] is not None]
                inside = interval_of(tested, "difference", "interval") if tested else None
                p = tested[0]["p_sign_flip"] if len(tested) == 1 else None
                rows.append([arm, targets, ones[0]["users"][targets], key.upper(), before, after, mean_of(changes),
                             inside, p])  # fmt: skip
    return probe_table(
        parts,
        name="new-items",
        title="What new items get, and what it costs known ones",
        caption=f"{_protocol(parts)} Never listed: new items come after all known ones, as with a model that knows "
        "none of them. Difference: what listing them as the model does brings or costs, paired by user; interval: "
        f"bootstrap over users, p: sign flips over users.{interval_words(parts)}",
        columns=[Column("targets"), Column("users", "count", "terminal"), Column("metric"),
                 Column("never listed", "value"), Column("as it is", "value"), Column("difference", "signed"),
                 Column("95 % interval", "interval", "terminal"), Column("p", "p", "terminal")],
        rows=rows,
    )  # fmt: skip


def _among_new_table(parts: Parts) -> Table:
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        found = [one["among_new"] for one in ones]
        rows.append([arm, *means_of(found, "auc"), interval_of(found, "auc", "auc_interval"), *means_of(found, "hr"),
                     interval_of(found, "hr", "hr_interval"), *means_of(found, "hr_by_chance")])  # fmt: skip
    k = next(each_probe(parts))[2]["k"]
    return probe_table(
        parts,
        name="among-new-items",
        title="Does it know one new item from another?",
        caption="New targets ranked among new items alone, where a constant on all of them changes nothing. AUC: the "
        "share of the other new items that score less than the target, equal ones counted half; 0.5 is no better than "
        f"guessing.{interval_words(parts)}",
        columns=[Column("AUC", "value"), Column("95 % interval", "range"), Column(f"HR@{k}", "value"),
                 Column("its interval", "range", "terminal"), Column("by chance", "value")],
        rows=rows,
    )  # fmt: skip


def _sweep_table(parts: Parts) -> Table:
    first = next(each_probe(parts))[2]
    key = f"hr@{first['k']}"
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        for at, step in enumerate(first["sweep"]):
            constant, known, new, every = _means_of_sweep(ones, at, key)
            rows.append([arm, f"{step['share']:.0%}", constant, known, new, every])
    return probe_table(
        parts,
        name="new-items-sweep",
        title=f"The control: {key.upper()} with a constant added to the scores of all new items",
        caption=f"{_protocol(parts)} Listed: the share of all users' first {first['k']} places that new "
        "items hold with this constant. A model that knows nothing of new items gets this much; what it is worth "
        "more must lie above: more hits of new targets for equal hits of known ones. The constant is swept on these "
        f"very targets, and not fitted{over_seeds(parts)}.",
        columns=[Column("listed"), Column("constant", "short"), Column("known", "value"), Column("new", "value"),
                 Column("all", "value")],
        rows=rows,
    )  # fmt: skip


def _means_of_sweep(ones: Sequence[Mapping[str, Any]], at: int, key: str) -> tuple[float | None, ...]:
    """The constant of one step, and a metric of known, new and all targets, means over seeds."""
    steps = [one["sweep"][at] for one in ones]
    levels = (mean_of([(step[of] or {}).get(key) for step in steps]) for of in ("known", "new", "all"))
    return mean_of([step["constant"] for step in steps]), *levels


def _protocol(parts: Parts) -> str:
    one = next(each_probe(parts))[2]
    return (
        f"{one['targets']['all']:,} {one['part']} targets of {one['num_users']:,} users, {one['targets']['new']:,} of "
        f"them of new items, among {one['num_known_items']:,} known and {one['num_new_items']:,} new items, "
        f"{SETTINGS[headline_setting(one['filter_seen'])]}, ties against the target."
    )
