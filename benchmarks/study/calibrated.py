"""Do the probabilities that stand beside a list come true?

    recbft compare -m sasrec -d amazon-instruments --arms matched,bft --seeds 0-9 --out OUT
    python -m benchmarks.study.calibrated OUT --arm bft --data-root DIR --json FILE

Lists of the k best items for the test's users, of all items and, where the target is new, of those not seen: what the
probabilities of a list sum to, how often the target is on it, and ECE@k between the two (``evaluation.confidence``,
which floor too is from); and NLL, the mean of -ln p of the target, in nats. Probabilities are made three ways: of the
scores as trained, at a temperature, and at a temperature and a lapse rate, as a run has them. What is fitted is fitted
on validation; mean and standard deviation over seeds. With `--part validation` the test is not read: what is fitted on
the validation targets of every second user is judged on those of the others.

Shapes: U users, V items, k items per list.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import finish, parse
from benchmarks.study.worth import over_seeds, runs_parser
from recbft.datasets import Dataset
from recbft.datasets.split import View
from recbft.evaluation.confidence import calibration
from recbft.evaluation.probability import (
    AS_TRAINED,
    Calibration,
    fit,
    log_of_mixture,
    log_softmax_of_targets,
    rows_of_new_targets,
)
from recbft.evaluation.score_blocks import Excluded
from recbft.evaluation.top_k import top_k
from recbft.evaluation.views import Part, evaluation_mode, events_of, states_of_view, view_of
from recbft.experiments.lists import counted
from recbft.models.contract import ItemTable, SequenceModel
from recbft.reporting.tables import markdown_table

NAME = "study.calibrated"
IntArray = NDArray[np.int64]
KS = (1, 10, 100)
WAYS = ("as trained", "temperature", "temperature and lapse rate")
LISTS = {"all items": False, "items not seen": True}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)

    def measure(model: SequenceModel, dataset: Dataset) -> dict[str, Any]:
        return {name: judged(model, dataset, unseen, options.part) for name, unseen in LISTS.items()}

    return over_seeds(NAME, arguments, options, measure, table)


class Asked(NamedTuple):
    """Users of a part, what the model knows of them, and what their lists may not hold."""

    view: View
    states: Tensor  # (U, D)
    seen: tuple[IntArray, IntArray] | None  # items and their offsets by user


def judged(model: SequenceModel, dataset: Dataset, unseen: bool, part: Part = "test") -> dict[str, Any]:
    """For each way the fitted numbers, NLL, and by k what lists claim and what comes true."""
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        everyone = np.arange(dataset.num_users)
        one, other = (everyone, everyone) if part == "test" else (everyone[::2], everyone[1::2])
        known, test = asked(model, dataset, "validation", one, unseen), asked(model, dataset, part, other, unseen)
        ways = (
            AS_TRAINED,
            *(fit(known.states, table, known.view.target, seen=known.seen, lapses=lapses) for lapses in (False, True)),
        )
        losses = nll(test, table, ways)
        items, offsets = (None, None) if test.seen is None else test.seen
        found: dict[str, Any] = {}
        for name, way, loss in zip(WAYS, ways, losses, strict=True):
            best = top_k(test.states, table, max(KS), exclude_items=items, exclude_offsets=offsets, calibration=way)
            claimed = np.minimum(np.nan_to_num(best.probabilities).cumsum(axis=1), 1)
            hit = (best.items == test.view.target[:, None]).cumsum(axis=1) > 0
            found[name] = way._asdict() | {"nll": loss}
            for k in KS:
                at_k = calibration(claimed[:, k - 1], hit[:, k - 1], samples=1)
                found[name][f"@{k}"] = {n: at_k[n] for n in ("mean_probability", "hit_rate", "ece", "floor")}
    return found


def asked(model: SequenceModel, dataset: Dataset, part: Part, users: IntArray, unseen: bool) -> Asked:
    """Of some users those whose target their list may hold."""
    view = view_of(dataset, part, users)
    if unseen:
        view = view.rows(rows_of_new_targets(view))
    states, _ = states_of_view(model, dataset, view, model.item_table().weight.device)
    return Asked(view, states, events_of(view.items, view.start, view.stop) if unseen else None)


def nll(users: Asked, table: ItemTable, ways: Sequence[Calibration]) -> list[float]:
    """Mean of -ln p of the target, one for each way."""
    num_items = len(table.weight) - 1
    items, offsets = (None, None) if users.seen is None else users.seen
    excluded = Excluded.of(items, offsets, len(users.states), num_items)
    log_chance = -np.log(excluded.left(num_items))
    temperatures = [way.temperature for way in ways]
    found = log_softmax_of_targets(users.states, table, users.view.target, excluded, temperatures, memory_mb=256.0)
    return [float(-log_of_mixture(log_p, log_chance, way.lapse).mean()) for log_p, way in zip(found, ways, strict=True)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per kind of list and way."""
    head = ["lists of", f"probabilities, {counted(len(rows), 'seed')}", "T, u", "NLL"]
    head += [f"{column} @{k}" for k in KS for column in ("claimed / true", "ECE (floor)")]
    lines = []
    for name in LISTS:
        for way in WAYS:
            ones = [row[name][way] for row in rows]
            cells = [
                name,
                way,
                f"{_mean(ones, 'temperature'):.2f}, {_mean(ones, 'lapse'):.2f}",
                f"{_mean(ones, 'nll'):.3f}",
            ]
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
    options = runs_parser(NAME, "Do probabilities come true?")
    options.add_argument("--part", choices=("test", "validation"), default="test", help="whose targets judge")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
