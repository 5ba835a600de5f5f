"""What the page says of the items that lists show, which no rank of a target tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbft.comparing.comparison import Comparison
from recbft.evaluation.exposure import MEASURES, lists_of, usual_cutoff
from recbft.evaluation.paired import compare_seeds, holm
from recbft.evaluation.protocol import SETTINGS
from recbft.experiments.lists import listed, seeds_text
from recbft.reporting.document import without_spread
from recbft.reporting.sections import Section
from recbft.reporting.tables import Cell, Column, Table

Exposures = Mapping[str, Mapping[str, Mapping[str, Any]]]  # arm -> setting -> measure@k -> mean, sd, values


def exposure_section(comparison: Comparison, results: Mapping[str, Any]) -> Section:
    """How much of the catalogue an arm's lists show, how evenly, and how popular it is."""
    title = "What the lists show"
    found: Exposures = {name: arm["exposure"] for name, arm in results["arms"].items() if arm.get("exposure")}
    absent = [name for name in comparison.arms if name not in found]
    why = "no lists are known, of a file of ranks or of runs of an earlier version"
    words = [f"{listed(absent)}: {why}."] if absent else []
    some = lists_of(comparison.users.size, comparison.protocol["items"])
    words += [f"Lists of {some}, drawn from a fixed seed."] if some and found else []
    if not found:
        return Section(name="exposure", title=title, words=words)
    k = usual_cutoff(next(iter(next(iter(found.values())).values())))
    differences = _difference_table(comparison, found, k) if comparison.baseline in found else None
    return Section(
        name="exposure",
        title=title,
        words=words,
        tables=[_level_table(comparison, found, k)],
        folded=[] if differences is None else [differences],
    )


def _level_table(comparison: Comparison, found: Exposures, k: int) -> Table:
    rows: list[list[Cell]] = []
    for setting, words in SETTINGS.items():
        for arm in sorted(found, key=lambda name: name != comparison.baseline):
            levels = [found[arm].get(setting, {}).get(f"{name}@{k}") for name in MEASURES]
            rows.append([arm, words, *(None if one is None else (one["mean"], one["sd"]) for one in levels)])
    return Table(
        name="exposure",
        title=f"Lists of the {k} best items",
        caption="Coverage: share of the items that are on a list of any user. Gini: 0 where all items are on equally "
        "many lists, near 1 where few items fill all. Popularity: mean number of training events of what is listed; "
        f"of the targets, which users took themselves, {comparison.target_frequency.mean():.4f}. Mean and standard "
        f"deviation over seeds {seeds_text(comparison.seeds)}.",
        columns=[Column("arm"), Column("items"), *(Column(f"{name}@{k}", "spread") for name in MEASURES)],
        rows=rows,
    )


def _difference_table(comparison: Comparison, found: Exposures, k: int) -> Table | None:
    """Paired by seed; None where no other arm has lists."""
    baseline = found[comparison.baseline]
    pairs = [
        (arm, setting, name, compare_seeds(baseline[setting][name]["values"], measures[name]["values"]))
        for arm, settings in found.items() if arm != comparison.baseline
        for setting, measures in settings.items()
        for name in (f"{measure}@{k}" for measure in MEASURES) if name in measures and name in baseline[setting]
    ]  # fmt: skip
    if not pairs:
        return None
    adjusted = holm([one.p_t for *_, one in pairs])
    rows: list[list[Cell]] = [
        [
            arm,
            name,
            SETTINGS[setting],
            one.difference,
            one.relative,
            None if one.is_constant else one.interval,
            one.p_t,
            p,
        ]
        for (arm, setting, name, one), p in zip(pairs, adjusted, strict=True)
    ]
    constant = without_spread(one.is_constant for *_, one in pairs)
    return Table(
        name="exposure-differences",
        title=f"Difference of the lists from {comparison.baseline} over seeds",
        caption=f"Paired by seed; p: two-sided paired t-test; interval: t; Holm p: over the {len(rows)} tests of this "
        f"table. Neither way is better by itself.{constant}",
        columns=[Column("arm"), Column("measure"), Column("items"), Column("difference", "signed"),
                 Column("relative", "percent"), Column("95 % interval", "interval"), Column("p", "p"),
                 Column("Holm p", "p")],
        rows=rows,
    )  # fmt: skip
