"""The tables of a comparison: levels, differences over seeds and over users, training; and each test by name.

What a terminal and ``.md`` files say of a comparison, of pooled comparisons and of a sweep is a head and such tables.

    p of the answer = Holm over the arms for the headline metric in the headline setting alone              (a)

Over seeds the users are given and training is repeated; over users the seeds are averaged away and the question is
whether other users would have shown the difference too. The two are different claims and stand in different tables.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recbft.comparing import provenance
from recbft.comparing.comparison import Comparison
from recbft.comparing.results import cells_of, is_constant, user_samples
from recbft.datasets.split import LEAVE_ONE_OUT
from recbft.evaluation.metrics import SETTINGS, headline_setting, meaning
from recbft.evaluation.paired import EXACT_SEEDS, SeedComparison, UserComparison, holm, share_of
from recbft.experiments.lists import counted, seeds_text
from recbft.reporting.tables import (
    DIFFERENCE,
    Cell,
    Column,
    Kind,
    Table,
    digits_for,
    markdown_words,
    p_equals,
    percent,
    slug,
    unsigned_zero,
)
from recbft.reporting.tables import markdown as markdown_of
from recbft.reporting.tables import text as text_of

HEADLINE_METRIC = "ndcg@10"
Result = Mapping[str, Any]  # what ``results_of`` returns, and ``comparison.json`` holds


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One arm against a baseline, one metric, one setting."""

    arm: str
    baseline: str
    metric: str
    setting: str
    seeds: SeedComparison
    users: UserComparison | None
    validation: SeedComparison | None  # of the same runs on validation, where both say it
    holm_p: float  # over the family of its table

    def share(self, difference: float) -> float | None:
        """A difference as a share of the baseline's mean; None where that is 0 and the difference is not."""
        return share_of(difference, self.seeds.mean_baseline)


def findings(result: Result) -> dict[str, list[Finding]]:
    """Every test of a comparison, by baseline."""
    return {
        baseline: [_finding(baseline, *cell) for cell in cells_of(against)]
        for baseline, against in result["comparisons"].items()
    }


def headline_findings(comparison: Comparison, found: Sequence[Finding]) -> list[tuple[Finding, float]]:
    """For each arm the headline metric with (a); in the other setting where an arm lacks the headline one."""
    metrics = [one.metric for one in found]
    metric = HEADLINE_METRIC if HEADLINE_METRIC in metrics else next(iter(metrics), "")
    first = headline_setting(comparison.protocol["filter_seen"])
    chosen: dict[str, Finding] = {}
    for one in sorted(found, key=lambda one: one.setting != first):
        if one.metric == metric:
            chosen.setdefault(one.arm, one)
    ordered = [chosen[arm] for arm in comparison.arms if arm in chosen]
    return list(zip(ordered, holm([one.seeds.p_t for one in ordered]), strict=True))


def level_table(result: Result) -> Table:
    """Mean and standard deviation over seeds of every arm in every setting."""
    rows: list[list[Cell]] = []
    for setting, words in SETTINGS.items():
        for name in _arms(result):
            if setting in result["arms"][name]["metrics"]:
                figures = [result["arms"][name]["metrics"][setting][metric] for metric in result["metrics"]]
                rows.append([name, words, *((one["mean"], one["sd"]) for one in figures)])
    return Table(
        name="levels",
        title="Metrics of every arm",
        caption=f"Mean ± standard deviation over seeds {seeds_text(result['seeds'])} on the test targets of "
        f"{result['protocol']['dataset']}. Each target is ranked among all {result['protocol']['items']:,} items (all "
        "items), or among those that the user has not had yet (seen masked); ties count against the target. "
        + " ".join(f"{meaning(metric)}." for metric in result["metrics"]),
        columns=[Column("arm"), Column("items"), *(Column(metric.upper(), "spread", "phone" if n < 2 else "terminal")
                                                   for n, metric in enumerate(result["metrics"]))],
        rows=rows,
        digits=digits_for(
            (cell["over_seeds"]["difference"], cell["over_seeds"]["p_t"])
            for against in result["comparisons"].values() for *_, cell in cells_of(against)
        ),
    )  # fmt: skip


def seed_table(result: Result, found: Sequence[Finding]) -> Table:
    """Differences from one baseline, paired over seeds."""
    baseline = found[0].baseline
    rows: list[list[Cell]] = []
    for one in found:
        s = one.seeds
        # Without a spread (equal arms have none either) nothing says what so many seeds could show.
        rows.append(
            [one.arm, one.metric.upper(), SETTINGS[one.setting], s.difference, s.relative,
             None if s.is_constant else s.interval, s.p_t, one.holm_p, s.p_sign_flip, f"{s.wins} of {s.num_seeds}",
             s.cohen_d, one.share(s.smallest_effect) if s.smallest_effect else None, on_validation(one) or None]
        )  # fmt: skip
    return Table(
        name=f"seeds-against-{slug(baseline)}",
        title=f"Difference from {baseline}, paired by seed",
        caption="Would training again show the difference? Each arm is compared with the baseline seed by seed "
        f"(seeds {seeds_text(result['seeds'])}). p: two-sided paired t-test; p Holm: the same p, adjusted by Holm over "
        f"the {counted(len(rows), 't-test')} of this table; p flips: sign-flip test, exact up to {EXACT_SEEDS} seeds; "
        "interval: t; wins: seeds in which the arm is better; d: Cohen's d; detectable: the smallest difference that "
        "so many seeds find four times in five (80 % power); on validation: the difference of the same runs on the "
        f"validation targets, by which their epochs were chosen, with its own p."
        f"{without_spread(one.seeds.is_constant for one in found)}",
        columns=[
            Column("arm"), Column("metric"), Column("items"), *DIFFERENCE, Column("p flips", "p", "terminal"),
            Column("wins", "text", "terminal"), Column("d", "effect", "terminal"),
            Column("detectable", "share", "terminal"), Column("on validation", "text", "terminal"),
        ],
        rows=rows,
        digits=digits_for((one.seeds.difference, one.seeds.p_t) for one in found),
    )  # fmt: skip


def user_table(result: Result, found: Sequence[Finding]) -> Table | None:
    """Differences from one baseline over users; None where they were not computed."""
    having = [(one, one.users) for one in found if one.users is not None]
    if not having:
        return None
    adjusted = holm([users.p_sign_flip for _, users in having])
    rows: list[list[Cell]] = [
        [one.arm, one.metric.upper(), SETTINGS[one.setting], users.difference, one.share(users.difference),
         users.interval, users.p_sign_flip, p]
        for (one, users), p in zip(having, adjusted, strict=True)
    ]  # fmt: skip
    baseline, num_users = found[0].baseline, having[0][1].num_users
    return Table(
        name=f"users-against-{slug(baseline)}",
        title=f"Difference from {baseline} over users, seeds averaged away",
        caption="Another question than over seeds: with these trained models, would other users show the difference? "
        f"Each value is first averaged over seeds, then compared over {num_users:,} users of "
        f"{result['protocol']['dataset']}. Interval: bootstrap over users; p flips: sign-flip test of the users' "
        f"differences; p Holm: the same p, adjusted by Holm over the {counted(len(rows), 'test')} of this table."
        f"{out_of_reach(len(rows), user_samples(num_users))}",
        columns=[
            Column("arm"), Column("metric"), Column("items"), Column("difference", "signed", "terminal"),
            Column("relative", "percent"), Column("95 % interval", "interval", "terminal"),
            Column("p flips", "p", "terminal"), Column("p Holm", "p"),
        ],
        rows=rows,
        digits=digits_for((users.difference, users.p_sign_flip) for _, users in having),
    )  # fmt: skip


def training_table(result: Result) -> Table | None:
    """Epochs and seconds of every arm; None where no arm was trained here."""
    rows: list[list[Cell]] = []
    for name in _arms(result):
        arm = result["arms"][name]
        best = [epoch for epoch in arm["best_epochs"] if epoch is not None]
        if arm["epochs"]:
            numbers = (arm["epochs"], best, arm["training_seconds"])
            rows.append([name, len(arm["epochs"]), *(statistics.mean(each) if each else None for each in numbers)])
    if not rows:
        return None
    return Table(
        name="training",
        title="Epochs and time of a run",
        caption="Means over seeds. Training stops early when the validation metric no longer improves; the weights of "
        "the best epoch are tested. Seconds are those of the machine on which a run was made.",
        columns=[Column("arm"), Column("runs", "count"), Column("epochs", "number"), Column("best epoch", "number"),
                 Column("seconds", "number")],
        rows=rows,
    )  # fmt: skip


def on_validation(one: Finding) -> str:
    """The difference of the same runs on validation with its p, such as "+1.7 % (p = 0.033)"; "" if not known."""
    d = one.validation
    if d is None:
        return ""
    said = unsigned_zero(f"{d.difference:+.4f}") if d.relative is None else percent(d.relative)
    return f"{said} (p {p_equals(d.p_t)})"


def out_of_reach(tests: int, samples: int) -> str:
    """What a caption adds where Holm over so many tests by so many drawn sign patterns cannot reach 0.05.

    >>> out_of_reach(100, 2000)
    ''
    """
    if tests / (1 + samples) <= 0.05:
        return ""
    return (
        f" Where more than {EXACT_SEEDS} users differ, p comes from {samples:,} drawn sign patterns and is at least "
        f"{1 / (1 + samples):.2g}: by Holm over {tests:,} tests it cannot reach 0.05, whatever the difference. Test "
        "fewer metrics or arms to reach it."
    )


def without_spread(are_constant: Iterable[bool]) -> str:
    """What a caption adds where one of its differences over seeds is the same in every seed.

    >>> without_spread([False, False])
    ''
    """
    if not any(are_constant):
        return ""
    return " A difference without an interval is the same in every seed; its p is that of the sign flips."


def comparison_document(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The text of ``comparison.md``, or the same for a terminal.

    Args:
        result: what ``write_comparison`` returns.
    """
    tables = [level_table(result), training_table(result)]
    for found in findings(result).values():
        tables += [seed_table(result, found), user_table(result, found)] if found else []
    return _document([head(result, markdown=markdown)], [one for one in tables if one is not None], markdown=markdown)


def pooled_document(pooled: Mapping[str, Any], *, markdown: bool) -> str:
    """The pooled figures as a table, and how each comparison was made."""
    heads = [head(each, markdown=markdown) for each in pooled["made_of"]]
    absent = ", ".join(pooled.get("left_out", []))
    said = [f"Left out, not in every comparison: {absent}"] if absent else []
    return _document([], [_pooled_table(pooled)], [*said, *heads], markdown=markdown)


def sweep_document(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The table of a sweep, and which value validation chooses.

    Args:
        result: what ``sweep_results`` returns, with the header and notes of a comparison.
    """
    default = "the default, " if result["chosen"] == result["default"] else ""
    chosen = (
        f"Chosen by validation: {default}{result['key']}={_value(result['chosen'])}. The test columns played no part "
        "in the choice: report the chosen value on fresh seeds."
    )
    return _document([head(result, markdown=markdown)], [_sweep_table(result)], [chosen], markdown=markdown)


def head(result: Mapping[str, Any], *, markdown: bool) -> str:
    """Command, date, device, versions, data, seeds, protocol and notes."""
    p = result["protocol"]
    lines = ("  \n" if markdown else "\n").join(provenance.lines(result["made"]))
    if p.get("split", LEAVE_ONE_OUT) == LEAVE_ONE_OUT:
        asked = "The last event of each user is the test target; it is ranked"
    else:
        asked = f"Split: {p['split']}. A user's value is the mean over the user's targets. Each target is ranked"
    said = (
        f"Seeds {seeds_text(result['seeds'])}. {asked} among all {p['items']:,} items, and ties count against it. "
        f"Early stopping on {_stopped_by(p)}."
    )
    notes = list(result["notes"])
    if len(result.get("environments", ())) > 1:
        notes.append(f"the runs come from {len(result['environments'])} different environments")
    return "\n\n".join([lines, said, *(["\n".join(f"- note: {note}" for note in notes)] if notes else [])])


def _finding(baseline: str, arm: str, setting: str, metric: str, cell: Mapping[str, Any]) -> Finding:
    seeds = dict(cell["over_seeds"])
    holm_p = seeds.pop("p_holm")
    users, held = cell.get("over_users"), cell.get("on_validation")
    return Finding(
        arm=arm,
        baseline=baseline,
        metric=metric,
        setting=setting,
        seeds=_over_seeds(seeds),
        users=None if users is None else UserComparison(**{**users, "interval": tuple(users["interval"])}),
        validation=None if held is None else _over_seeds(held),
        holm_p=holm_p,
    )


def _over_seeds(d: Mapping[str, Any]) -> SeedComparison:
    return SeedComparison(**{**d, "interval": tuple(d["interval"])})


def _arms(result: Result) -> list[str]:
    """The baseline first."""
    return sorted(result["arms"], key=lambda name: name != result["baseline"])


def _document(before: list[str], tables: list[Table], after: list[str] | None = None, *, markdown: bool) -> str:
    written = [(markdown_of if markdown else text_of)(table).rstrip("\n") for table in tables]
    words = [markdown_words(part) if markdown else part for part in (*before, *(after or []))]
    return "\n\n".join([*words[: len(before)], *written, *words[len(before) :]]) + "\n"


def _pooled_table(pooled: Mapping[str, Any]) -> Table:
    rows: list[list[Cell]] = [
        [one["arm"], one["metric"].upper(), SETTINGS[one["setting"]], *one["relative"], one["mean_relative"],
         f"{one['better_on']} of {len(pooled['data'])}", one["p_fisher"], one["p_holm"]]
        for one in pooled["pooled"]
    ]  # fmt: skip
    constant = ""
    if any(one["constant_on"] for one in pooled["pooled"]):
        constant = " Where a difference is the same in every seed of a data set, its p there is that of the sign flips."
    return Table(
        name="pooled",
        title=f"Relative difference from {pooled['baseline']} per data set, and Fisher's pooled p",
        caption="Fisher's p pools the paired t-tests over seeds of the data sets; p Holm is the same p, adjusted by "
        f"Holm over the {len(rows)} rows. A small p says that there is a difference on some data set; read its "
        f"direction from the columns of the data sets.{constant}",
        columns=[Column("arm"), Column("metric"), Column("items"),
                 *(Column(name, "percent") for name in pooled["data"]), Column("mean", "percent"),
                 Column("better on"), Column("Fisher's p", "p"), Column("p Holm", "p")],
        rows=rows,
    )  # fmt: skip


def _sweep_table(result: Mapping[str, Any]) -> Table:
    parts = ("validation", "test")
    kinds: dict[str, Kind] = {"mean ± sd": "spread", "difference": "signed", "relative": "percent",
                              "95 % interval": "interval", "p": "p", "p Holm": "p"}  # fmt: skip
    rows: list[list[Cell]] = []
    for row in result["rows"]:
        label = f"{_value(row['value'])}{' (default)' if row['is_default'] else ''}"
        rows.append([label, *(cell for part in parts for cell in _part_cells(row[part]))])
    differences = [d for row in result["rows"] for part in parts if (d := row[part]["difference"]) is not None]
    return Table(
        name="sweep",
        title=f"{result['metric'].upper()}, {SETTINGS[result['setting']]}, by {result['key']}",
        caption=f"Differences from the default {_value(result['default'])} are paired by seed; p: paired t-test; p "
        f"Holm: adjusted by Holm over the {counted(len(rows) - 1, 'other value')}."
        f"{without_spread(map(is_constant, differences))}",
        columns=[Column(result["key"]), *(Column(f"{part} {name}", kind) for part in parts
                                          for name, kind in kinds.items())],
        rows=rows,
        digits=digits_for((d["difference"], d["p_t"]) for d in differences),
    )  # fmt: skip


def _part_cells(part: Mapping[str, Any]) -> list[Cell]:
    d, level = part["difference"], (part["mean"], part["sd"])
    if d is None:
        return [level, None, None, None, None, None]
    interval = None if is_constant(d) else tuple(d["interval"])
    return [level, d["difference"], d["relative"], interval, d["p_t"], d["p_holm"]]


def _stopped_by(protocol: Mapping[str, Any]) -> str:
    metric = protocol["config"].get("training.valid_metric")
    judged = "each arm's validation metric" if metric is None else f"validation {metric.upper()}"
    setting = SETTINGS[headline_setting(protocol["filter_seen"])]
    epochs = protocol["config"].get("training.epochs")
    within = f" within {counted(epochs, 'epoch')}" if epochs else ""
    return f"{judged} ({setting}){within}"


def _value(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
