"""Train arms over seeds and compare them, paired by seed.

    python -m benchmarks.compare_arms --dataset amazon-instruments --data-root DIR \\
        --arms matched,matched+recency,published,bft --seeds 0-9 --out OUT --jobs 2

Every run is a folder under OUT, trained on one thread; finished ones are used again and unfinished ones resumed, so the
command can be broken off and given again. Test metrics are those of the weights that were best in validation. The table
is printed and written to OUT/compare_arms.md, everything behind it to OUT/compare_arms.json.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.command import finish, parser, recorded
from benchmarks.runs import Job, plan, train_all, unfinished
from recbft.errors import RunError, UserError
from recbft.evaluation.paired import SeedComparison, compare_seeds
from recbft.experiments.arms import ArmSpec, check_distinct, parse_arms
from recbft.experiments.lists import parse_seeds
from recbft.experiments.tables import markdown_table, text_table
from recbft.files import write_atomic, write_json
from recbft.models import MODELS
from recbft.run_config import RunConfig
from recbft.training.run_folder import RunFolder

NAME = "compare_arms"
METRICS = ("hr@10", "ndcg@10", "mrr")
SETTINGS = {"unfiltered": "all items", "filtered": "seen masked"}
BASELINES = ("matched", "matched+recency")

Values = dict[str, dict[str, dict[str, list[float]]]]  # arm -> setting -> metric -> a value per seed


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    arms, seeds, out = parse_arms(options.arms), parse_seeds(options.seeds), Path(options.out)
    if len(seeds) < 2:
        raise UserError(f"--seeds {options.seeds!r} names one seed; a comparison needs at least 2, such as 0-9")
    if options.jobs < 1:
        raise UserError(f"--jobs is {options.jobs}; give a whole number of at least 1")
    jobs = plan(arms, seeds, out, lambda arm, seed: _config(arm, seed, options))
    check_distinct(arms, [job.config for job in jobs[: len(arms)]])
    dataset = jobs[0].config.data.load()
    header = machine.header(recorded(NAME, arguments), dataset, device=machine.device_of(jobs[0].config))
    header["threads"] = 1
    todo = unfinished(jobs, dataset)
    reused = [job.path.name for job in jobs if job not in todo]
    out.mkdir(parents=True, exist_ok=True)
    _train(todo, jobs, options.jobs)

    header = machine.close(header)
    runs = {job: RunFolder.open(job.path) for job in jobs}
    values = _values(arms, runs)
    result = {
        "benchmark": NAME,
        **header,
        "seeds": seeds,
        "epochs_at_most": jobs[0].config.training.epochs,
        "reused_runs": reused,
        "environments": _environments(runs),
        "arms": _arms(arms, runs, values),
        "comparisons": _comparisons(arms, values),
    }
    write_json(out / f"{NAME}.json", result)
    write_atomic(out / f"{NAME}.md", _document(result, markdown=True).encode())
    print(_document(result, markdown=False), end="")
    return 0


def _train(todo: Sequence[Job], jobs: Sequence[Job], workers: int) -> None:
    """Train what is missing, a line for each run."""
    number, began = itertools.count(len(jobs) - len(todo) + 1), time.perf_counter()
    if len(todo) < len(jobs):
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already", file=sys.stderr)

    def report(job: Job, seconds: float) -> None:
        metrics = RunFolder.open(job.path).metrics
        print(
            f"[{next(number)}/{len(jobs)}] {job.name}: {metrics['epochs']} epochs, best {metrics['best_epoch']}, "
            f"test NDCG@10 {metrics['test']['unfiltered']['ndcg@10']:.4f}, {seconds:.1f} s "
            f"({time.perf_counter() - began:.0f} s in all)",
            file=sys.stderr,
        )

    try:
        failed = train_all(todo, workers, report)
    except KeyboardInterrupt:
        done = sum(RunFolder(job.path).is_finished for job in jobs)
        raise RunError(f"interrupted; {done} of {len(jobs)} runs are finished, the same command goes on") from None
    if failed:
        names = ", ".join(job.name for job in failed)
        raise RunError(f"{len(failed)} of {len(jobs)} runs failed ({names}); mend the cause and give the command again")


def _values(arms: Sequence[ArmSpec], runs: dict[Job, RunFolder]) -> Values:
    return {
        arm.label: {
            setting: {
                metric: [run.metrics["test"][setting][metric] for job, run in runs.items() if job.arm == arm]
                for metric in METRICS
            }
            for setting in SETTINGS
        }
        for arm in arms
    }


def _arms(arms: Sequence[ArmSpec], runs: dict[Job, RunFolder], values: Values) -> dict[str, Any]:
    """Mean and standard deviation per metric, and how long each arm trained."""
    made: dict[str, Any] = {}
    for arm in arms:
        metrics = [run.metrics for job, run in runs.items() if job.arm == arm]
        made[arm.label] = {
            "metrics": {
                setting: {
                    metric: {"mean": statistics.mean(each), "sd": statistics.stdev(each), "values": each}
                    for metric, each in of_setting.items()
                }
                for setting, of_setting in values[arm.label].items()
            },
            "epochs": [m["epochs"] for m in metrics],
            "best_epochs": [m["best_epoch"] for m in metrics],
            "training_seconds": [m["training_seconds"] for m in metrics],
            "config": next(run.config for job, run in runs.items() if job.arm == arm) | {"seed": "each of the seeds"},
        }
    return made


def _comparisons(arms: Sequence[ArmSpec], values: Values) -> dict[str, Any]:
    """Every arm against each baseline that takes part (the first arm where none does)."""
    labels = [arm.label for arm in arms]
    baselines = [label for label in BASELINES if label in labels] or labels[:1]
    return {
        baseline: {
            label: {
                setting: {
                    metric: asdict(compare_seeds(values[baseline][setting][metric], values[label][setting][metric]))
                    for metric in METRICS
                }
                for setting in SETTINGS
            }
            for label in labels
            if label not in baselines[: n + 1]  # a pair of baselines is compared once
        }
        for n, baseline in enumerate(baselines)
        if len(labels) > 1
    }


def _environments(runs: dict[Job, RunFolder]) -> list[dict[str, Any]]:
    """The environments that the runs were made in, each once."""
    seen: list[dict[str, Any]] = []
    for run in runs.values():
        one = json.loads(run.environment_file.read_bytes())
        if one not in seen:
            seen.append(one)
    return seen


def _document(result: dict[str, Any], *, markdown: bool) -> str:
    """The result for readers: what was done, a table of the arms, a table for each baseline."""
    table, line_end = (markdown_table, "  \n") if markdown else (text_table, "\n")
    parts = [
        line_end.join(machine.lines(result)),
        f"Seeds {', '.join(map(str, result['seeds']))}; early stopping within {result['epochs_at_most']} epochs; test "
        "targets ranked among all items, ties against the target; mean and standard deviation over seeds.",
    ]
    if len(result["environments"]) > 1:
        parts.append(f"Note: the runs come from {len(result['environments'])} different environments.")
    parts.append(table(*_arm_cells(result["arms"])))
    for baseline, against in result["comparisons"].items():
        parts.append(f"Difference from {baseline}, paired by seed (two-sided paired t-test):")
        parts.append(table(*_comparison_cells(against)))
    return "\n\n".join(parts) + "\n"


def _arm_cells(arms: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["arm", *(f"{m.upper()} {SETTINGS[s]}" for s in SETTINGS for m in METRICS), "epochs (best)", "s/run"]
    rows = [
        [
            label,
            *(_mean_sd(arm["metrics"][setting][metric]) for setting in SETTINGS for metric in METRICS),
            f"{statistics.mean(arm['epochs']):.0f} ({statistics.mean(arm['best_epochs']):.0f})",
            f"{statistics.mean(arm['training_seconds']):.1f}",
        ]
        for label, arm in arms.items()
    ]
    return head, rows


def _comparison_cells(against: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["arm", "metric", "items", "difference", "relative", "95 % interval", "p", "wins"]
    rows = [
        [label, metric.upper(), SETTINGS[setting], *_difference_cells(SeedComparison(**of_setting[metric]))]
        for label, settings in against.items()
        for setting, of_setting in settings.items()
        for metric in METRICS
    ]
    return head, rows


def _difference_cells(d: SeedComparison) -> list[str]:
    return [
        f"{d.difference:+.4f}",
        "" if d.relative is None else f"{100 * d.relative:+.1f} %",
        f"{d.interval[0]:+.4f} to {d.interval[1]:+.4f}",
        f"{d.p_t:.3f}" if d.p_t >= 0.001 else "< 0.001",
        f"{d.wins} of {d.num_seeds}",
    ]


def _mean_sd(of_metric: dict[str, Any]) -> str:
    return f"{of_metric['mean']:.4f} ± {of_metric['sd']:.4f}"


def _config(arm: ArmSpec, seed: int, options: Any) -> RunConfig:
    config = arm.config(
        options.settings,
        model=options.model,
        dataset=options.dataset,
        data_root=options.data_root,
        seed=seed,
        threads=1,
    )
    if not MODELS[config.model].trainable:
        raise UserError(f"model {config.model!r} is not trained: its seeds are all alike; choose another")
    if 10 not in config.evaluation.ks:
        raise UserError(f"evaluation.ks is {list(config.evaluation.ks)}; the table needs 10 among them")
    return config


def _options(arguments: Sequence[str]) -> Any:
    options = parser(NAME, "Train arms over seeds and compare them, paired by seed.")
    options.add_argument(
        "--arms", default="matched,matched+recency,published,bft", help="NAME, NAME+recency, NAME[key=value,...]"
    )
    options.add_argument("--seeds", default="0-9", help="such as 0-9 or 0,1,5-7")
    options.add_argument("--out", required=True, metavar="OUT", help="folder for the run folders and the table")
    options.add_argument("--jobs", type=int, default=2, metavar="N", help="runs trained at a time, one thread each")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
