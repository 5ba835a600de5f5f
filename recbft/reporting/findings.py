"""What a comparison found: the figures of ``experiments.results`` as values with names, and the tables of them.

    p of the answer = Holm over the arms for the headline metric in the headline setting alone              (1)

Over seeds the users are given and training is repeated; over users the seeds are averaged away and the question is
whether other users would have shown the difference too. The two are different claims and stand in different tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recbft.comparing.comparison import Comparison
from recbft.comparing.results import cells_of, user_samples
from recbft.evaluation.paired import EXACT_SEEDS, SeedComparison, UserComparison, holm, share_of
from recbft.evaluation.protocol import SETTINGS
from recbft.experiments.lists import seeds_text
from recbft.reporting.document import on_validation, out_of_reach, without_spread
from recbft.reporting.stratified_arms import headline
from recbft.reporting.tables import Cell, Column, Table, slug

HEADLINE_METRIC = "ndcg@10"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One arm against a baseline, one metric, one setting."""

    arm: str
    baseline: str
    metric: str
    setting: str
    same_ranks: bool  # of every user and seed
    seeds: SeedComparison
    users: UserComparison | None
    validation: str  # what the same runs have there, as ``document.on_validation`` says it
    holm_p: float  # over the family of its table

    def share(self, difference: float) -> float | None:
        """A difference as a share of the baseline's mean; None where that is 0 and the difference is not."""
        return share_of(difference, self.seeds.mean_baseline)


def findings(comparison: Comparison, results: Mapping[str, Any]) -> dict[str, list[Finding]]:
    """Every test of ``results_of`` or ``comparison.json``, by baseline."""
    return {
        baseline: [_finding(comparison, baseline, *cell) for cell in cells_of(against)]
        for baseline, against in results["comparisons"].items()
    }


def headline_findings(comparison: Comparison, found: Sequence[Finding]) -> list[tuple[Finding, float]]:
    """For each arm the headline metric with (1); in the other setting where an arm lacks the headline one."""
    metrics = [one.metric for one in found]
    metric = HEADLINE_METRIC if HEADLINE_METRIC in metrics else next(iter(metrics), "")
    first = headline(comparison.protocol)
    chosen: dict[str, Finding] = {}
    for one in sorted(found, key=lambda one: one.setting != first):
        if one.metric == metric:
            chosen.setdefault(one.arm, one)
    ordered = [chosen[arm] for arm in comparison.arms if arm in chosen]
    return list(zip(ordered, holm([one.seeds.p_t for one in ordered]), strict=True))


def level_table(comparison: Comparison, results: Mapping[str, Any]) -> Table:
    """Mean and standard deviation over seeds of every arm in every setting."""
    rows: list[list[Cell]] = []
    for setting, words in SETTINGS.items():
        for name in sorted(results["arms"], key=lambda name: name != comparison.baseline):
            if setting in results["arms"][name]["metrics"]:
                figures = [results["arms"][name]["metrics"][setting][metric] for metric in results["metrics"]]
                rows.append([name, words, *((one["mean"], one["sd"]) for one in figures)])
    return Table(
        name="levels",
        title="Metrics of every arm",
        caption=f"{_targets(comparison)}, ranked among all items or with seen items masked, ties against the target; "
        f"mean and standard deviation over seeds {seeds_text(comparison.seeds)}.",
        columns=[Column("arm"), Column("items"), *(Column(metric.upper(), "spread") for metric in results["metrics"])],
        rows=rows,
    )


def seed_table(comparison: Comparison, found: Sequence[Finding]) -> Table:
    """Differences from one baseline, paired over seeds."""
    rows: list[list[Cell]] = []
    for one in found:
        s = one.seeds
        # Without a spread (equal arms have none either) nothing says what so many seeds could show.
        rows.append(
            [one.arm, one.metric.upper(), SETTINGS[one.setting], s.difference, s.relative,
             None if s.is_constant else s.interval, s.p_t, one.holm_p, s.p_sign_flip, f"{s.wins} of {s.num_seeds}",
             None if s.cohen_d is None else f"{s.cohen_d:+.2f}",
             one.share(s.smallest_effect) if s.smallest_effect else None,
             one.validation or None]
        )  # fmt: skip
    baseline = found[0].baseline
    constant = without_spread(one.seeds.is_constant for one in found)
    return Table(
        name=f"seeds-against-{slug(baseline)}",
        title=f"Difference from {baseline} over seeds",
        caption=f"{_targets(comparison)}, ties against the target, paired by seed over seeds "
        f"{seeds_text(comparison.seeds)}. p: two-sided paired t-test; interval: t; Holm p: over the {len(rows)} tests "
        f"of this table; sign-flip p: permutation test, exact up to {EXACT_SEEDS} seeds; wins: seeds in which the arm "
        "is strictly better; d: Cohen's; 80 % power: the smallest difference that the t-test would have found with "
        "that chance, given how much the seeds vary; on validation: the same runs on each user's event before the "
        f"tested one, by which their epochs were chosen, p of the t-test by itself.{constant}",
        columns=[
            Column("arm"), Column("metric"), Column("items"), Column("difference", "signed"),
            Column("relative", "percent"), Column("95 % interval", "interval"), Column("p", "p"), Column("Holm p", "p"),
            Column("sign-flip p", "p"), Column("wins"), Column("d"), Column("80 % power", "share"),
            Column("on validation"),
        ],
        rows=rows,
    )  # fmt: skip


def user_table(comparison: Comparison, found: Sequence[Finding]) -> Table | None:
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
    baseline = found[0].baseline
    return Table(
        name=f"users-against-{slug(baseline)}",
        title=f"Difference from {baseline} over users",
        caption="Another claim than over seeds: would other users show the difference, with these trained models and "
        f"the seeds averaged away? {_targets(comparison)}, ties against the target. Bootstrap interval over users; "
        f"sign-flip p: of the users' differences; Holm p: over the {len(rows)} tests of this table."
        f"{out_of_reach(len(rows), user_samples(comparison.users.size))}",
        columns=[
            Column("arm"), Column("metric"), Column("items"), Column("difference", "signed"),
            Column("relative", "percent"), Column("95 % interval", "interval"), Column("sign-flip p", "p"),
            Column("Holm p", "p"),
        ],
        rows=rows,
    )  # fmt: skip


def _finding(
    comparison: Comparison, baseline: str, arm: str, setting: str, metric: str, cell: Mapping[str, Any]
) -> Finding:
    seeds = dict(cell["over_seeds"])
    holm_p = seeds.pop("p_holm")
    users = cell.get("over_users")
    return Finding(
        arm=arm,
        baseline=baseline,
        metric=metric,
        setting=setting,
        same_ranks=np.array_equal(comparison.arms[arm].ranks[setting], comparison.arms[baseline].ranks[setting]),
        seeds=SeedComparison(**{**seeds, "interval": tuple(seeds["interval"])}),
        validation=on_validation(cell.get("on_validation")),
        users=None if users is None else UserComparison(**{**users, "interval": tuple(users["interval"])}),
        holm_p=holm_p,
    )


def _targets(comparison: Comparison) -> str:
    return f"Test targets of the {comparison.users.size:,} users of {comparison.protocol['dataset']}"
