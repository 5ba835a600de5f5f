"""Which settings does validation choose? Arms by the best validation metric of their runs; the test is not read.

    recbft compare -m sasrec -d amazon-instruments --arms 'matched,matched[backbone.dropout=0.3]' --seeds 0-4 --out OUT
    python -m benchmarks.study.choose OUT [--baseline ARM] [--metric ndcg@10]

Finished runs count, so the table may be looked at while others train. Differences from the baseline are over the seeds
that both arms have; p is by paired t-test, not corrected: the table chooses, it does not prove.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.command import finish, parser
from recbft.comparing.finished_runs import Run, by_seed, check_same, label_runs, read_run
from recbft.errors import UserError, did_you_mean
from recbft.evaluation.paired import SeedComparison, compare_seeds
from recbft.reporting.tables import markdown_table, p_text
from recbft.runs.folder import RunFolder

HEAD = ["arm", "seeds", "validation", "difference", "relative", "p", "wins", "epochs (best)", "s/run"]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    runs = [read_run(path) for out in options.out for path in finished_runs(Path(out))]
    if not runs:
        raise UserError(f"no finished run in {', '.join(options.out)}; name folders that `recbft compare` wrote")
    check_same(runs)
    arms = label_runs(runs)
    baseline = options.baseline or next(iter(arms))
    if baseline not in arms:
        raise UserError(f"unknown arm {baseline!r}; {did_you_mean(baseline, arms)}")
    found = {name: validations(name, group, options.metric) for name, group in arms.items()}
    best_first = sorted(arms, key=lambda name: statistics.mean(found[name].values()), reverse=True)
    rows = [row(name, arms[name], found[name], found[baseline]) for name in best_first]
    print(f"validation {options.metric}, all items; differences from {baseline}\n\n{markdown_table(HEAD, rows)}")
    return 0


def finished_runs(out: Path) -> list[Path]:
    """Folders of the finished runs of an experiment, by name."""
    if not (out / "runs").is_dir():
        raise UserError(f"{out} has no folder `runs`; name a folder that `recbft compare` wrote")
    found = sorted(path for path in (out / "runs").iterdir() if path.is_dir() and not path.name.startswith("."))
    return [path for path in found if RunFolder.open(path).is_finished]


def row(name: str, runs: Sequence[Run], own: Mapping[int, float], other: Mapping[int, float]) -> list[str]:
    """The cells of an arm, from its validations by seed and the baseline's."""
    against = ["", "", "", ""]
    if own != other and (d := difference(own, other)) is not None:
        against = [f"{d.difference:+.4f}", percent(d), p_text(d.p_t), f"{d.wins} of {d.num_seeds}"]
    epochs, best, seconds = (
        statistics.mean(run.metrics[key] for run in runs) for key in ("epochs", "best_epoch", "training_seconds")
    )
    return [
        name,
        f"{len(own)}",
        mean_and_spread(own.values()),
        *against,
        f"{epochs:.0f} ({best:.0f})",
        f"{seconds:.0f}",
    ]


def validations(name: str, runs: Sequence[Run], metric: str) -> dict[int, float]:
    """The best validation of each seed of an arm."""
    found: dict[int, float] = {}
    for seed, run in by_seed(name, runs).items():
        values = run.metrics["validation"]["unfiltered"]
        if metric not in values:
            raise UserError(f"unknown metric {metric!r}; {did_you_mean(metric, values)}")
        found[seed] = values[metric]
    return found


def difference(own: Mapping[int, float], baseline: Mapping[int, float]) -> SeedComparison | None:
    """One metric by seed against a baseline's, over the seeds of both; None with fewer than two."""
    seeds = sorted(set(own) & set(baseline))
    return compare_seeds([baseline[seed] for seed in seeds], [own[seed] for seed in seeds]) if len(seeds) > 1 else None


def percent(found: SeedComparison) -> str:
    """A difference relative to the baseline; nothing where the baseline alone is 0."""
    return "" if found.relative is None else f"{100 * found.relative:+.1f} %"


def percent_and_interval(found: SeedComparison) -> str:
    """A difference in percent of the baseline, which is not 0, with its 95 % interval."""
    low, high = (f"{100 * end / found.mean_baseline:+.1f}" for end in found.interval)
    return f"{percent(found)} ({low} to {high})"


def relative_and_p(found: SeedComparison) -> str:
    """A difference relative to the baseline, where there is such a number, and the p of the paired t-test."""
    return ", ".join(part for part in (percent(found), f"p {found.p_t:.3f}") if part)


def mean_and_spread(values: Collection[float]) -> str:
    """Mean ± standard deviation, of one value the value."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser("study.choose", "Arms by validation.")
    options.add_argument("out", nargs="+", metavar="OUT", help="folders that recbft compare wrote")
    options.add_argument("--baseline", metavar="ARM", help="unless given, the first arm")
    options.add_argument("--metric", default="ndcg@10")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
