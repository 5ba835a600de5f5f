"""Time RecBole's SASRec against recbft's on the same events: seconds per epoch, and to the same validation NDCG@10.

    python -m benchmarks.recbole_speed --json FILE
    python -m benchmarks.recbole_speed --arms bft --epochs 2 --shipped-epochs 1        a trial
    python -m benchmarks.recbole_speed --dataset ml-1m --data-root DIR --steps 60      where an epoch takes too long

One process, one after the other: RecBole as shipped (its import switches autograd's anomaly mode on), RecBole with that
mode off, then each arm of recbft. All have the same width, depth, dropout, window, rate, seed and targets per step, and
read one time-sorted atomic file. Anomaly mode changes no number: the shipped RecBole is trained for a few epochs only,
its losses must equal those of the other, and its time to the target is its seconds per epoch times the other's epochs.
Times are of training; validation is timed apart. The target is the best validation NDCG@10 of RecBole's SASRec, within
``--recbole-epochs`` where that is given. With ``--steps`` nothing is trained to an end: so many of RecBole's steps are
timed, with and without anomaly mode in turns, and an epoch is as many of them as it has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import recbft.recbole  # noqa: F401  RecBole on this Python
from benchmarks import machine
from benchmarks.command import count, finish, parse, recorded, training_parser
from recbft.datasets import Dataset
from recbft.datasets.atomic import save_atomic
from recbft.errors import RunError, UserError
from recbft.experiments.lists import split_list
from recbft.recbole import compat
from recbft.reporting.tables import text_table
from recbft.system.files import write_json
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config

NAME = "recbole_speed"
EXPORTED = "exported"
ROUNDS = 3  # of single steps, with and without anomaly mode
SHARED = {"hidden_size": 64, "n_layers": 2, "n_heads": 2, "inner_size": 256, "learning_rate": 1e-3, "seed": 2020}


@dataclass(kw_only=True)
class Course:
    """A training: what every epoch took and where it stood."""

    name: str
    seconds: list[float] = field(default_factory=list)  # training, per epoch
    losses: list[float] = field(default_factory=list)
    ndcg: list[float] = field(default_factory=list)  # validation NDCG@10 after each epoch
    validations: list[float] = field(default_factory=list)  # seconds

    @property
    def per_epoch(self) -> float:
        return statistics.median(self.seconds)

    def epochs_to(self, target: float) -> int | None:
        """Epochs until validation reached ``target``; None if it never did."""
        return next((epoch for epoch, value in enumerate(self.ndcg, start=1) if value >= target), None)


def recbole_training(folder: Path, *, epochs: int) -> tuple[Any, Any, Any]:
    """The trainer of RecBole's SASRec, and the data that it trains and validates on."""
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    given = {
        **SHARED, "data_path": str(folder), "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "train_neg_sample_args": None, "train_batch_size": 2048, "valid_metric": "NDCG@10", "metrics": ["NDCG"],
        "metric_decimal_place": 8, "show_progress": False, "epochs": epochs, "gpu_id": "",
    }  # fmt: skip
    config = Config(model="SASRec", dataset=EXPORTED, config_dict=given)
    init_seed(config["seed"], config["reproducibility"])
    train_data, valid_data, _ = data_preparation(config, create_dataset(config))
    init_seed(config["seed"], config["reproducibility"])
    model = get_model("SASRec")(config, train_data._dataset).to(config["device"])
    return get_trainer(config["MODEL_TYPE"], "SASRec")(config, model), train_data, valid_data


def train_recbole(folder: Path, *, anomaly: bool, epochs: int, patience: int) -> Course:
    """Train RecBole's SASRec until validation stops improving."""
    trainer, train_data, valid_data = recbole_training(folder, epochs=epochs)
    course = Course(name=f"RecBole SASRec, {'as shipped' if anomaly else 'anomaly mode off'}")
    with torch.autograd.set_detect_anomaly(anomaly):
        while len(course.seconds) < epochs and _improved_lately(course.ndcg, patience):
            began = time.perf_counter()
            course.losses.append(trainer._train_epoch(train_data, len(course.seconds)))
            trained = time.perf_counter()
            course.ndcg.append(float(trainer._valid_epoch(valid_data)[0]))
            course.seconds.append(trained - began)
            course.validations.append(time.perf_counter() - trained)
            _say(course)
    return course


class _Some:
    """Some of a loader's batches, another few at every pass."""

    def __init__(self, loader: Any, num: int) -> None:
        self._loader, self._num, self._batches = loader, num, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._num)

    def __len__(self) -> int:
        return self._num

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def time_steps(folder: Path, steps: int) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Seconds of RecBole's steps as shipped and with anomaly mode off, in turns, after a few of each."""
    trainer, train_data, _ = recbole_training(folder, epochs=1)
    each = -(-steps // ROUNDS)
    some, found = _Some(train_data, each), {name: list[float]() for name in ("as shipped", "anomaly mode off")}
    if len(train_data) < 2 * ROUNDS * each + 2:
        raise UserError(f"--steps is {steps}, but an epoch has {len(train_data)} steps; leave it out")
    trainer._train_epoch(_Some(train_data, 2), 0)
    for _ in range(ROUNDS):
        for name, seconds in found.items():
            with torch.autograd.set_detect_anomaly(name == "as shipped"):
                began = time.perf_counter()
                trainer._train_epoch(some, 0)
                seconds.append((time.perf_counter() - began) / each)
    results = [
        {"name": f"RecBole SASRec, {name}", "seconds_per_step": seconds, "steps_per_epoch": len(train_data),
         "seconds_per_epoch": round(statistics.median(seconds) * len(train_data), 1)}
        for name, seconds in found.items()
    ]  # fmt: skip
    rows = [
        [
            r["name"],
            ", ".join(f"{x:.2f}" for x in r["seconds_per_step"]),
            str(len(train_data)),
            f"{r['seconds_per_epoch']:.0f}",
        ]
        for r in results
    ]
    return rows, results


def train_ours(dataset: Dataset, out: Path, arm: str, *, epochs: int, patience: int, settings: Sequence[str]) -> Course:
    """Train an arm of recbft with the same settings."""
    named: dict[str, Any] = {**SHARED, "arm": arm, "epochs": epochs, "patience": patience, "batch_targets": 2048}
    run = train(load_run_config(None, settings, device="cpu", **named), out, dataset=dataset)
    rows = run.read_history()
    course = Course(name=f"recbft SASRec, {arm}")
    course.seconds = [float(row["seconds"] or 0) for row in rows]
    course.losses = [float(row["loss"] or 0) for row in rows]
    course.ndcg = [float(row["valid_ndcg@10"] or 0) for row in rows]
    _say(course)
    return course


def compare(shipped: Course, quiet: Course, ours: Sequence[Course]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """A row per training, and the same as plain values."""
    target = max(quiet.ndcg)
    needed = quiet.epochs_to(target)
    assert needed is not None
    results: list[dict[str, Any]] = []
    for course in (shipped, quiet, *ours):
        epochs = needed if course is shipped else course.epochs_to(target)
        to_target = course.per_epoch * needed if course is shipped else sum(course.seconds[: epochs or 0])
        results.append(
            {
                "name": course.name,
                "seconds_per_epoch": round(course.per_epoch, 3),
                "epochs_to_target": epochs,
                "seconds_to_target": round(to_target, 1) if epochs else None,
                "best_valid_ndcg@10": max(quiet.ndcg if course is shipped else course.ndcg),
                "target": target,
                "course": {"seconds": course.seconds, "ndcg@10": course.ndcg, "loss": course.losses},
            }
        )
    first = results[0]["seconds_to_target"]
    rows = []
    for made in results:
        reached = made["seconds_to_target"]
        times = "" if reached is None else f"{first / reached:.1f}"
        rows.append(
            [
                made["name"],
                f"{made['seconds_per_epoch']:.2f}",
                str(made["epochs_to_target"] or "not reached"),
                "" if reached is None else f"{reached:.1f}",
                times,
                f"{made['best_valid_ndcg@10']:.4f}",
            ]
        )
    return rows, results


def main(arguments: Sequence[str]) -> int:
    options = training_parser(NAME, __doc__.split("\n", 1)[0], dataset="ml-100k")
    options.add_argument("--arms", default="published,matched,bft", help="of recbft's SASRec")
    options.add_argument("--epochs", type=count, default=300, help="most epochs of each")
    options.add_argument("--recbole-epochs", type=count, help="most epochs of RecBole, where it shall have fewer")
    options.add_argument("--shipped-epochs", type=count, default=2, help="epochs of RecBole as shipped")
    options.add_argument(
        "--patience", type=count, default=10, help="validations without improvement that end a training"
    )
    options.add_argument("--steps", type=count, help="time so many steps of RecBole's, and nothing else")
    given = parse(options, arguments)
    compat.require_recbole()
    if given.model != "sasrec":
        raise UserError(f"--model is {given.model!r}; RecBole's SASRec is compared with sasrec")
    dataset = load_run_config(None, (), dataset=given.dataset, data_root=given.data_root).data.load()
    head = machine.header(recorded(NAME, arguments), dataset)
    sys.argv = sys.argv[:1]  # RecBole's Config reads the command line as well
    # Beside the times, nothing: RecBole writes logs and checkpoints where it runs, and prints.
    with tempfile.TemporaryDirectory() as made, _inside(made), redirect_stdout(sys.stderr):
        folder = Path(made)
        save_atomic(dataset, folder, EXPORTED)
        if given.steps:
            columns = ["training", "s/step, each round", "steps an epoch", "s/epoch"]
            rows, results = time_steps(folder, given.steps)
        else:
            columns = ["training", "s/epoch", "epochs to target", "s to target", "times faster", "best valid NDCG@10"]
            rows, results = compare(*_trained(dataset, folder, given))
    head = machine.close(head)
    print("\n".join(machine.lines(head)))
    print(text_table(columns, rows))
    if given.json:
        write_json(given.json, {"header": head, "results": results})
    return 0


def _trained(dataset: Dataset, folder: Path, given: argparse.Namespace) -> tuple[Course, Course, list[Course]]:
    """RecBole as shipped, RecBole with anomaly mode off, and each arm of ours."""
    shipped = train_recbole(folder, anomaly=True, epochs=given.shipped_epochs, patience=given.patience)
    most = given.epochs if given.recbole_epochs is None else given.recbole_epochs
    quiet = train_recbole(folder, anomaly=False, epochs=most, patience=given.patience)
    _check_same_course(shipped, quiet)
    ours = [
        train_ours(dataset, folder / arm, arm, epochs=given.epochs, patience=given.patience, settings=given.settings)
        for arm in split_list(given.arms)
    ]
    return shipped, quiet, ours


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _check_same_course(shipped: Course, quiet: Course) -> None:
    """Anomaly mode only looks: the losses of equal epochs are equal."""
    for epoch, (one, other) in enumerate(zip(shipped.losses, quiet.losses, strict=False), start=1):
        if abs(one - other) > 1e-4 * abs(other):
            raise RunError(f"RecBole's loss of epoch {epoch} is {one} with anomaly mode and {other} without it")


def _improved_lately(values: Sequence[float], patience: int) -> bool:
    return not values or len(values) - 1 - max(range(len(values)), key=values.__getitem__) < patience


def _say(course: Course) -> None:
    print(
        f"{course.name}: epoch {len(course.seconds)}, {course.seconds[-1]:.1f} s, valid NDCG@10 {course.ndcg[-1]:.4f}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    finish(main)
