"""All comparisons of a ledger at a glance: a table with a line per data set and model, and a figure of the differences.

    python -m benchmarks.study.overview --file docs/reports/runs.csv [--svg FILE] [--metric "ndcg@10 seen masked"]
    python -m benchmarks.study.overview --file docs/reports/runs.csv --all

``--all`` has every arm's metrics and epochs instead, with what others published of the same data beside them
(``published.yaml``, with the source of each).

A comparison is one in which ``bft`` met ``matched`` over two or more seeds. Differences of ``bft`` are paired by seed,
relative to the other arm's mean; p is by paired t-test, not corrected for how many lines there are. The seeds of a line
are those that both have; means over others, and differences over fewer, say which. Beside the test stand differences
on validation, by which each run's epoch was chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from benchmarks.command import finish, parser
from benchmarks.study.choose import difference, percent
from benchmarks.study.ledger import METRICS, arms_of, check_alike, read
from recbft.errors import UserError
from recbft.evaluation.paired import SeedComparison
from recbft.experiments.lists import seeds_text
from recbft.models import MODELS
from recbft.reporting import plots
from recbft.reporting.tables import markdown_table
from recbft.system.files import write_atomic

ARMS = ["published", "matched", "matched+recency", "bft"]
BASELINES = ["matched", "matched+recency"]
ITEMS = ["all items", "seen masked"]
VALIDATION = "validation ndcg@10"  # of the best epoch, all items
SHOWN = ["hr@10", "ndcg@10", "mrr"]
PUBLISHED = Path(__file__).with_name("published.yaml")
Arms = Mapping[str, pd.DataFrame]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    found = comparisons(read(Path(options.file)))
    if not found:
        raise UserError(f"{options.file} has no data set on which `bft` met `matched` with two seeds or more")
    if options.all:
        print(everything(found, yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))))
        return 0
    metric, other = options.metric, _other_items(options.metric)
    head = ["model", "data", "seeds", *(f"`{arm}`" for arm in ARMS), *(f"`bft` from `{name}`" for name in BASELINES)]
    head += [f"on validation from `{name}`" for name in BASELINES]
    rows = []
    for (model, data), arms in found.items():
        seeds = sorted(set(arms["bft"].index) & set(arms["matched"].index))
        means = [_means(arms, arm, (metric, other), seeds) for arm in ARMS]
        leads = [_said(_lead(arms, name, one), len(seeds)) for one in (metric, VALIDATION) for name in BASELINES]
        rows.append([model, data, str(len(seeds)), *means, *leads])
    print(f"{metric} / {other}, means over seeds; differences: {metric}; {VALIDATION}\n\n{markdown_table(head, rows)}")
    if options.svg:
        write_atomic(Path(options.svg), figure(found, metric).encode())
    return 0


def comparisons(table: pd.DataFrame) -> dict[tuple[str, str], Arms]:
    """By model and data set, the lines of the arms by seed, where ``bft`` and ``matched`` share two seeds or more."""
    found = {}
    for (model, data), lines in table.groupby(["model", "dataset"]):
        check_alike(lines, f"{data} ({model})")
        arms = arms_of(lines)[1]
        if _lead(arms, "matched", next(iter(METRICS))) is not None:
            found[str(model), str(data)] = arms
    return dict(sorted(found.items(), key=lambda one: (list(MODELS).index(one[0][0]), one[0][1])))


def everything(found: Mapping[tuple[str, str], Arms], published: Mapping[str, Any]) -> str:
    """Every arm's metrics, all items and seen masked, its epochs, and below the arms what others published."""
    names = " / ".join(metric.upper() for metric in SHOWN)
    metrics = [f"{names}, {items}" for items in ITEMS]
    head = ["model, data", "", "seeds", *metrics, "epochs (best)", "NDCG@10 of ours from it"]
    rows, cited = [], []
    for (model, data), arms in found.items():
        lines = [[f"`{arm}`", *_own(arms[arm])] for arm in ARMS if arm in arms]
        for other in published["figures"]:
            if (other["model"], other["dataset"]) == (model, data):
                lines.append([other["name"], *_others(other, arms)])
                cited.append(other)
        rows += [[f"{model}, {data}" if n == 0 else "", *line] for n, line in enumerate(lines)]
    by_source = {key: sorted({one["name"] for one in cited if one["source"] == key}) for key in published["sources"]}
    told = [f"{', '.join(by)}: {published['sources'][key]}" for key, by in by_source.items() if by]
    said = f"{names}, means over seeds; ours from a published figure: {' / '.join(ITEMS)}"
    return "\n".join([said, "", markdown_table(head, rows), "", *told])


def figure(found: Mapping[tuple[str, str], Arms], metric: str) -> str:
    """Differences of ``bft`` from each baseline with their intervals, as an SVG file."""
    names = {number: f"from {name}" for number, name in enumerate(BASELINES)}
    rows = [
        (
            f"{model}, {data}",
            [(n, d) for n, name in enumerate(BASELINES) if (d := _lead(arms, name, metric)) is not None],
        )
        for (model, data), arms in found.items()
    ]
    name, items = metric.split(" ", 1)
    said = f"{name.upper()} of bft, {items}"
    title = f"{said}: relative differences with 95 % intervals"
    drawn = plots.standalone(plots.intervals(rows, f"{said}: difference in % (95 % interval)", title, names))
    return drawn.replace('style="', 'style="background: #ffffff; ', 1)  # black on white, on a dark page too


def _own(lines: pd.DataFrame) -> list[str]:
    means = [" / ".join(f"{lines[f'{metric} {items}'].mean():.4f}" for metric in SHOWN) for items in ITEMS]
    epochs = f"{lines['epochs'].mean():.0f} ({lines['best_epoch'].mean():.0f})"
    return [seeds_text(sorted(lines.index)), *means, epochs, ""]


def _others(other: Mapping[str, Any], arms: Arms) -> list[str]:
    """A published figure in the column of its items, and how far our arm lies from it, there and in the other."""
    values = " / ".join("-" if value is None else f"{value:.4f}" for value in other["values"])
    ours = [arms[other["beside"]][f"ndcg@10 {items}"].mean() for items in ITEMS]
    apart = " / ".join(f"{100 * (mean / other['values'][1] - 1):+.1f}" for mean in ours)
    return ["", *(values if items == other["items"] else "" for items in ITEMS), "", f"`{other['beside']}` {apart} %"]


def _lead(arms: Arms, baseline: str, metric: str) -> SeedComparison | None:
    """``bft`` against a baseline; None where one of them is missing, or they share fewer than two seeds."""
    if "bft" not in arms or baseline not in arms:
        return None
    return difference(arms["bft"][metric].to_dict(), arms[baseline][metric].to_dict())


def _means(arms: Arms, arm: str, metrics: Sequence[str], seeds: Sequence[int]) -> str:
    """An arm's means over its own seeds, which are named where they are not those of the line."""
    if arm not in arms:
        return ""
    own = sorted(arms[arm].index)
    apart = "" if own == list(seeds) else f" (seeds {seeds_text(own)})"
    return " / ".join(f"{arms[arm][metric].mean():.4f}" for metric in metrics) + apart


def _said(lead: SeedComparison | None, num_seeds: int) -> str:
    """A difference over the seeds of both arms, whose number is said where it is not that of the line."""
    if lead is None:
        return ""
    seeds = "" if lead.num_seeds == num_seeds else f", {lead.num_seeds} seeds"
    return f"{percent(lead)} ({_p(lead.p_t)}{seeds})"


def _p(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p {value:.2g}"


def _other_items(metric: str) -> str:
    """The same metric in the other setting."""
    name, items = metric.split(" ", 1)
    return next(other for other in METRICS if other.startswith(f"{name} ") and not other.endswith(items))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser("study.overview", "A ledger at a glance.")
    options.add_argument("--file", required=True, metavar="CSV", help="what `benchmarks.study.ledger add` wrote")
    options.add_argument("--metric", default="ndcg@10 all items", choices=list(METRICS))
    options.add_argument("--all", action="store_true", help="every arm's metrics, beside what others published")
    options.add_argument("--svg", metavar="FILE", help="write the figure of the differences here")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
