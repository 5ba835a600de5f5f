"""Do the probabilities that stand beside a list come true?

    recbft compare -m sasrec -d amazon-instruments --arms bft --seeds 0-9 --out OUT
    python -m benchmarks.study.calibrated OUT --arm bft --data-root DIR --json FILE

Lists of the k best items for the test's users, of all items and of those not seen: what the probabilities of a list sum
to, how often the target is on it, and ECE@k between the two (``evaluation.calibration``, which floor too is from).
Probabilities are made three ways: of the scores as trained, at a temperature, and at a temperature and a lapse rate, as
a run has them. What is fitted is fitted on validation; mean and standard deviation over seeds.

Shapes: U users, V items, k items per list.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.command import check_folder_of, finish, recorded
from benchmarks.study.worth import models_of_arm
from recbft.datasets import Dataset
from recbft.datasets.split import View
from recbft.evaluation.calibration import calibration
from recbft.evaluation.evaluate import evaluation_mode, events_of, states_of_view, view_of
from recbft.evaluation.probability import Calibration, fit, rows_of_new_targets
from recbft.evaluation.top_k import top_k
from recbft.experiments.lists import counted
from recbft.experiments.tables import markdown_table
from recbft.files import write_json
from recbft.models.contract import SequenceModel

NAME = "study.calibrated"
KS = (1, 10, 100)
AS_TRAINED = Calibration(1.0, 0.0)
WAYS = ("as trained", "temperature", "temperature and lapse rate")
LISTS = {"all items": False, "items not seen": True}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    check_folder_of(options.json)
    rows, dataset = [], None
    for seed, model, dataset in models_of_arm(options.out, options.arm, options.data_root):
        rows.append({"seed": seed} | {name: judged(model, dataset, unseen) for name, unseen in LISTS.items()})
    said = ["OUT" if argument in options.out else argument for argument in arguments]
    made = machine.header(recorded(NAME, said), dataset)
    print("\n".join(machine.lines(made)), end="\n\n")
    print(table(rows))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {"calibrated": rows})
    return 0


def judged(model: SequenceModel, dataset: Dataset, unseen: bool) -> dict[str, Any]:
    """For each way the fitted numbers, and by k what lists claim and what comes true."""
    validation, test = (view_of(dataset, part) for part in ("validation", "test"))
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, _ = states_of_view(model, dataset, test, table.weight.device)
        known = validation
        if unseen:
            known = View(*(each[rows_of_new_targets(dataset, validation)] for each in validation))
        own, _ = states_of_view(model, dataset, known, table.weight.device)
        seen = events_of(dataset.items, known.start, known.stop) if unseen else None
        ways = (
            AS_TRAINED,
            *(fit(own, table, known.target, seen=seen, lapses=lapses) for lapses in (False, True)),
        )
        items, offsets = events_of(dataset.items, test.start, test.stop) if unseen else (None, None)
        found: dict[str, Any] = {}
        for name, way in zip(WAYS, ways, strict=True):
            best = top_k(states, table, max(KS), exclude_items=items, exclude_offsets=offsets, calibration=way)
            claimed = np.nan_to_num(best.probabilities).cumsum(axis=1)
            hit = (best.items == test.target[:, None]).cumsum(axis=1) > 0
            by_k = {k: calibration(np.minimum(claimed[:, k - 1], 1), hit[:, k - 1], samples=1) for k in KS}
            numbers = ("mean_probability", "hit_rate", "ece", "floor")
            found[name] = way._asdict() | {f"@{k}": {n: one[n] for n in numbers} for k, one in by_k.items()}
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per kind of list and way."""
    head = ["lists of", f"probabilities, {counted(len(rows), 'seed')}", "T, u"]
    head += [f"{column} @{k}" for k in KS for column in ("claimed / true", "ECE (floor)")]
    lines = []
    for name in LISTS:
        for way in WAYS:
            ones = [row[name][way] for row in rows]
            cells = [name, way, f"{_mean(ones, 'temperature'):.2f}, {_mean(ones, 'lapse'):.2f}"]
            for k in KS:
                at = [one[f"@{k}"] for one in ones]
                cells.append(f"{_mean(at, 'mean_probability'):.3f} / {_mean(at, 'hit_rate'):.3f}")
                cells.append(f"{_mean(at, 'ece'):.3f}{_spread(at, 'ece')} ({_mean(at, 'floor'):.3f})")
            lines.append(cells)
    return markdown_table(head, lines)


def _mean(ones: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([one[name] for one in ones]))


def _spread(ones: Sequence[dict[str, Any]], name: str) -> str:
    return f" ± {np.std([one[name] for one in ones], ddof=1):.3f}" if len(ones) > 1 else ""


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description="Do probabilities come true?")
    options.add_argument("out", nargs="+", metavar="OUT", help="folders that `recbft compare` wrote")
    options.add_argument("--arm", default="bft")
    options.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    options.add_argument("--json", metavar="FILE", help="write the results here")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
