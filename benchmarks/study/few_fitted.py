"""What is the prior of a list's probabilities worth where they are fitted on few users?

    recbft compare -m sasrec -d amazon-instruments --arms matched,bft --seeds 0-9 --out OUT
    python -m benchmarks.study.few_fitted OUT --arm bft --data-root DIR --json FILE

Temperature and lapse rate (``evaluation.probability``) are fitted on the validation targets of so many users drawn from
every second one, with the prior and by likelihood alone, and judged by NLL, the mean of -ln p of the target in nats, on
users drawn from the others. Means over draws, then over seeds; the test is not read.

Shapes: U users, V items.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.command import count, finish, parse
from benchmarks.study.calibrated import LISTS, Asked, asked, nll
from benchmarks.study.worth import over_seeds, runs_parser
from recbft.datasets import Dataset
from recbft.evaluation.paired import compare_seeds
from recbft.evaluation.probability import AS_TRAINED, IntArray, fit
from recbft.evaluation.views import evaluation_mode, events_of
from recbft.experiments.lists import counted, split_list
from recbft.models.contract import SequenceModel
from recbft.reporting.tables import markdown_table

NAME = "study.few_fitted"
JUDGES = 1000  # at most so many users judge
WAYS = {"by likelihood alone": False, "with the prior": True}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    numbers = [int(number) for number in split_list(options.users)]

    def measure(model: SequenceModel, dataset: Dataset) -> dict[str, Any]:
        return {name: judged(model, dataset, unseen, numbers, options.draws) for name, unseen in LISTS.items()}

    return over_seeds(NAME, arguments, options, measure, table)


def judged(
    model: SequenceModel, dataset: Dataset, unseen: bool, numbers: Sequence[int], draws: int
) -> dict[str, dict[str, float]]:
    """NLL by the number of users fitted on, or "as trained", and by way."""
    rng = np.random.default_rng(0)
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        fitting, judging = (rng.permutation(np.arange(first, dataset.num_users, 2)) for first in (0, 1))
        known = asked(model, dataset, "validation", fitting, unseen)
        others = asked(model, dataset, "validation", np.sort(judging[:JUDGES]), unseen)
        found = {"as trained": dict.fromkeys(WAYS, nll(others, table, [AS_TRAINED])[0])}
        for number in numbers:
            samples = [_some(known, dataset, rng.permutation(len(known.view.target))[:number]) for _ in range(draws)]
            found[str(number)] = {
                name: float(np.mean(nll(others, table, [
                    fit(one.states, table, one.view.target, seen=one.seen, prior=prior) for one in samples
                ])))
                for name, prior in WAYS.items()
            }  # fmt: skip
    return found


def _some(known: Asked, dataset: Dataset, rows: IntArray) -> Asked:
    view = known.view.rows(rows)
    return Asked(view, known.states[rows], known.seen and events_of(view.items, view.start, view.stop))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per kind of list and number of users."""
    head = ["lists of", f"users fitted on, {counted(len(rows), 'seed')}", *WAYS, "difference", "p", "lower"]
    lines = []
    for name in LISTS:
        for number in rows[0][name]:
            alone, prior = ([row[name][number][way] for row in rows] for way in WAYS)
            cells = [name, number, f"{np.mean(alone):.3f}", f"{np.mean(prior):.3f}"]
            if number != "as trained" and len(rows) > 1:
                paired = compare_seeds(alone, prior)
                below = sum(b < a for a, b in zip(alone, prior, strict=True))
                cells += [f"{paired.difference:+.3f}", f"{paired.p_t:.2g}", f"{below} of {len(rows)}"]
            lines.append([*cells, *[""] * (len(head) - len(cells))])
    return markdown_table(head, lines)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = runs_parser(NAME, "What is the prior worth?")
    options.add_argument("--users", default="3,10,30,100,300", metavar="N,N", help="how many users to fit on")
    options.add_argument("--draws", type=count, default=20, metavar="N", help="samples of users per number")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
