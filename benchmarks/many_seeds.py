"""Time many seeds trained together against one seed trained alone.

    python -m benchmarks.many_seeds --dataset amazon-instruments --data-root DIR --seeds 20 --json FILE

Three kinds of run take turns, so that whatever else the machine does falls on all of them: one seed as ``recbft train``
trains it, the same on one thread, and all seeds together; folders, validations and checkpoints are part of each. Twenty
runs of one thread, as many processes at a time as there are threads, are what training together has to beat. Before
any time is taken, seeds trained together must equal seeds trained alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.command import count, finish, parse, recorded, training_parser
from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.errors import RunError
from recbft.experiments.plan import check_distinct, parse_arms
from recbft.reporting.tables import text_table
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.system.files import write_json
from recbft.training.many_seeds import train_seeds
from recbft.training.one_run import train
from recbft.training.run_config import RunConfig

NAME = "many_seeds"
# Losses relative, weights absolute, after two epochs. Left out are weights whose step says nothing about a gradient:
# the bias of the keys, which softmax does not see, and the precision parameters, whose steps are 100 times as long.
TOLERANCE = 1e-5
_NOT_COMPARED = ("key.bias", "precision", "decay_logit")
KINDS = ("one", "one_thread", "together")


def check_equality(config: RunConfig, dataset: Dataset) -> float:
    """The largest difference between two seeds trained together and each trained alone, for two epochs."""
    short = with_training(config, epochs=2)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        apart = _train_apart(short, dataset, Path(folder) / "apart", 2)
        for run, other in zip(_train_together(short, dataset, Path(folder) / "together", 2), apart, strict=True):
            for name, difference in _differences(run, other).items():
                if not difference <= TOLERANCE:  # NaN fails too
                    raise RunError(
                        f"{name} of {run.path.name} differs by {difference:.1e} between seeds trained together and "
                        f"alone (at most {TOLERANCE:.0e}); no time is taken before they agree"
                    )
                worst = max(worst, difference)
    return worst


def measure(config: RunConfig, dataset: Dataset, *, seeds: int, repeats: int) -> dict[str, Any]:
    """Seconds of each kind of run, whole and of training alone, as many times as asked."""
    ways: dict[str, Callable[[Path], list[RunFolder]]] = {
        "one": lambda folder: _train_apart(config, dataset, folder, 1),
        "one_thread": lambda folder: _train_apart(with_training(config, threads=1), dataset, folder, 1),
        "together": lambda folder: _train_together(config, dataset, folder, seeds),
    }
    assert config.training.threads is not None
    threads = {"one": 1, "one_thread": 1, "together": min(seeds, config.training.threads)}  # that train at once
    times: dict[str, dict[str, list[float]]] = {kind: {"training": [], "whole": [], "cpu": []} for kind in KINDS}
    for repeat in range(repeats + 1):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                began, cpu = time.perf_counter(), time.process_time()
                runs = ways[kind](Path(folder) / "runs")
                whole, cpu = time.perf_counter() - began, time.process_time() - cpu
                training = sum(run.metrics["training_seconds"] for run in runs) / threads[kind]
            if repeat:  # the first round warms up
                for name, value in (("training", training), ("whole", whole), ("cpu", cpu)):
                    times[kind][name].append(value)
    return {"times": times, "ratio": {name: _ratio(times, name, seeds, config) for name in ("training", "whole")}}


def _ratio(times: dict[str, Any], name: str, seeds: int, config: RunConfig) -> dict[str, float]:
    """Together over one seed, round by round, and over all seeds on a thread each, one thread per core."""
    rounds = [many / one for many, one in zip(times["together"][name], times["one"][name], strict=True)]
    processes = min(seeds, config.training.threads or 1)
    apart = [one * seeds / processes for one in times["one_thread"][name]]
    beside = [many / other for many, other in zip(times["together"][name], apart, strict=True)]
    return {
        "median": statistics.median(rounds),
        "min": min(rounds),
        "max": max(rounds),
        "to_processes": statistics.median(beside),
    }


def table(results: dict[str, dict[str, Any]], seeds: int) -> str:
    """The results as text."""
    head = ["arm", "", "one seed s", "1 thread s", f"{seeds} together s", "x one seed", "(min to max)", "x processes"]
    rows = []
    for label, result in results.items():
        for name in ("training", "whole"):
            seconds = [statistics.median(result["times"][kind][name]) for kind in KINDS]
            ratio = result["ratio"][name]
            rows.append(
                [
                    label,
                    name,
                    *(f"{value:.2f}" for value in seconds),
                    f"{ratio['median']:.2f}",
                    f"({ratio['min']:.1f} to {ratio['max']:.1f})",
                    f"{ratio['to_processes']:.2f}",
                ]
            )
    return text_table(head, rows)


def with_training(config: RunConfig, **settings: Any) -> RunConfig:
    """The same run with other settings of its training."""
    return replace(config, training=replace(config.training, **settings))


def _train_apart(config: RunConfig, dataset: Dataset, folder: Path, seeds: int) -> list[RunFolder]:
    return [train(replace(config, seed=seed), folder / f"seed{seed}", dataset=dataset) for seed in range(seeds)]


def _train_together(config: RunConfig, dataset: Dataset, folder: Path, seeds: int) -> list[RunFolder]:
    paths = [folder / f"seed{seed}" for seed in range(seeds)]
    return train_seeds([replace(config, seed=seed) for seed in range(seeds)], paths, dataset=dataset)


def _differences(run: RunFolder, other: RunFolder) -> dict[str, float]:
    losses, others = ([float(row["loss"] or 0) for row in each.read_history()] for each in (run, other))
    found = {f"the loss of epoch {n + 1}": abs(a - b) / b for n, (a, b) in enumerate(zip(losses, others, strict=True))}
    weights, expected = (checkpoint.load(each.checkpoint).model_state for each in (run, other))
    for name, value in expected.items():
        if value.is_floating_point() and not any(part in name for part in _NOT_COMPARED):
            found[name] = float((weights[name] - value).abs().max())
    return found


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    arms = parse_arms(options.arms)
    configs = [
        arm.config(
            options.settings,
            model=options.model,
            dataset=options.dataset,
            data_root=options.data_root,
            epochs=options.epochs,
            threads=options.threads,
            device="cpu",
        )
        for arm in arms
    ]
    check_distinct(arms, configs)
    dataset = configs[0].data.load()
    header = machine.header(recorded(NAME, arguments), dataset)
    equality = {arm.label: check_equality(config, dataset) for arm, config in zip(arms, configs, strict=True)}
    results = {
        arm.label: measure(config, dataset, seeds=options.seeds, repeats=options.repeats) | {"config": to_dict(config)}
        for arm, config in zip(arms, configs, strict=True)
    }
    header, memory = machine.close(header), machine.peak_rss_mb()
    print("\n".join([*machine.lines(header), ""]))
    print(table(results, options.seeds))
    print(
        f"runs of {options.epochs} epochs, median of {options.repeats}; training: steps alone, whole: with validation, "
        f"checkpoints and the final evaluation\nx processes: over {options.seeds} runs of one thread each, "
        f"{min(options.seeds, options.threads)} at a time\npeak RSS of the process: {memory:,} MB"
    )
    for label, value in equality.items():
        print(f"{label}: seeds trained together equal seeds trained alone to {value:.0e} after two epochs")
    if options.json:
        content = {"benchmark": NAME, **header, "seeds": options.seeds, "peak_rss_mb": memory, "equality": equality}
        write_json(options.json, content | {"arms": results})
    return 0


def _options(arguments: Sequence[str]) -> Any:
    options = training_parser(NAME, "Time many seeds trained together against one.", dataset="amazon-instruments")
    options.add_argument("--arms", default="matched,bft", help="NAME, NAME+recency, NAME[key=value,...]")
    options.add_argument("--seeds", type=count, default=20, metavar="N", help="seeds trained together")
    options.add_argument("--epochs", type=count, default=5, metavar="N", help="epochs of every run")
    options.add_argument("--repeats", type=count, default=3, metavar="N", help="rounds that are timed")
    options.add_argument("--threads", type=count, default=2, metavar="N")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
