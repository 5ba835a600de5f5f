"""Does the posterior precision say something of a list that the scores do not say already?

    recbft compare -m sasrec -d amazon-instruments --arms matched,bft --seeds 0-4 --out OUT
    python -m benchmarks.study.worth OUT --arm bft --data-root DIR --json FILE

Each signal says, user by user, how sure a model is; AUROC is the chance that a user whose target is in the first ten
gets a higher value than one whose target is not. Signals are joined by a logistic regression that is fitted on the
validation targets, with a penalty, and judged on the test targets. What `all and precision` has beyond `all` is what
precision adds; mean, and 95 % interval over seeds by Student's t.

Shapes: U users, P signals.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize, special

from benchmarks import machine
from benchmarks.command import finish, parse, parser, recorded
from benchmarks.study.choose import finished_runs
from recbft.comparing.finished_runs import by_seed, check_same, label_runs, read_run
from recbft.datasets import Dataset
from recbft.errors import UserError, did_you_mean
from recbft.evaluation.confidence import Ranking
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.paired import seed_interval
from recbft.evaluation.probability import AS_TRAINED, predicted
from recbft.evaluation.views import Part, evaluation_mode, states_of_view, view_of
from recbft.models.contract import SequenceModel
from recbft.reporting.tables import markdown_table
from recbft.system.files import write_json
from recbft.training.bundle import load_trained
from recbft.training.run_config import load_run_config

NAME = "study.worth"
K = 10
SCORES = ("entropy", "probability of the ten best")
KNOWN = (*SCORES, "history length", "count of the last item")
JOINED = {
    "both of the scores": SCORES,
    "both and precision": (*SCORES, "precision"),
    "all": KNOWN,
    "all and precision": (*KNOWN, "precision"),
}
FloatArray = NDArray[np.float64]


def main(arguments: Sequence[str]) -> int:
    return over_seeds(NAME, arguments, parse(runs_parser(NAME, "What precision adds."), arguments), worth, table)


def runs_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that say whose trained models are measured."""
    made = parser(name, description)
    made.add_argument("out", nargs="+", metavar="OUT", help="folders that `recbft compare` wrote")
    made.add_argument("--arm", default="bft")
    made.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    return made


def over_seeds(
    name: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    measure: Callable[[SequenceModel, Dataset], dict[str, Any]],
    table: Callable[[Sequence[dict[str, Any]]], str],
) -> int:
    """Measure every run of an arm and print the table of them, under the header of the command; the exit code.

    Args:
        name: of the command, whose last part is the key of the rows in its JSON file.
        options: the arguments as parsed, of ``runs_parser``.
    """
    rows, dataset = [], None
    for seed, model, dataset in models_of_arm(options.out, options.arm, options.data_root):
        rows.append({"seed": seed} | measure(model, dataset))
    said = ["OUT" if argument in options.out else argument for argument in arguments]
    made = machine.header(recorded(name, said), dataset)
    print("\n".join(machine.lines(made)), end="\n\n")
    print(table(rows))
    if options.json is not None:
        write_json(options.json, machine.close(made) | {name.rpartition(".")[2]: rows})
    return 0


def models_of_arm(outs: Sequence[str], arm: str, data_root: str | None) -> Iterator[tuple[int, Any, Dataset]]:
    """Seed, trained model and data of every finished run of an arm, in the order of their seeds.

    Raises:
        UserError: there is no such arm, or the data are not those of the runs.
    """
    runs = [read_run(path) for out in outs for path in finished_runs(Path(out))]
    if runs:
        check_same(runs)
    arms = label_runs(runs)
    if arm not in arms:
        raise UserError(f"unknown arm {arm!r}; {did_you_mean(arm, arms)}")
    dataset = None
    for _, run in sorted(by_seed(arm, arms[arm]).items()):
        config = load_run_config(run.path / "config.yaml", data_root=data_root)
        dataset = config.data.load() if dataset is None else dataset
        if dataset.content_hash != run.protocol["content_hash"]:
            raise UserError(
                f"{dataset.name} as loaded has content {dataset.content_hash[:12]}, {run.path} was made on "
                f"{run.protocol['content_hash'][:12]}; name the folder of its data with --data-root"
            )
        *_, model = load_trained(run.path)
        yield config.seed, model, dataset


def worth(model: SequenceModel, dataset: Dataset) -> dict[str, float]:
    """AUROC of every signal of a model on the test targets, and of signals joined on the validation targets."""
    (values, hit), (test_values, test_hit) = signals(model, dataset, "validation"), signals(model, dataset, "test")
    found = {name: Ranking(test_values[name], test_hit).area for name in (*KNOWN, "precision")}
    for label, names in JOINED.items():
        sample, test = (np.stack([part[name] for name in names], axis=1) for part in (values, test_values))
        found[label] = joined(sample, hit, test, test_hit)
    return found


def joined(sample: FloatArray, hit: NDArray[np.bool_], test: FloatArray, test_hit: NDArray[np.bool_]) -> float:
    """AUROC on the test of the regression fitted on the sample, (U, P) each; a signal that is one value there is out.

    What rounding leaves of such a signal (a precision at its cap for all users) would be a weight of its own.
    """
    varies = np.ptp(sample, axis=0) > 0
    mean, deviation = sample.mean(axis=0), np.where(varies, sample.std(axis=0) + 1e-12, np.inf)
    weights = logistic((sample - mean) / deviation, hit)
    return Ranking((test - mean) / deviation @ weights, test_hit).area


def signals(model: SequenceModel, dataset: Dataset, part: Part) -> tuple[dict[str, FloatArray], NDArray[np.bool_]]:
    """What is known of each user before the target is seen, (U,) each, and whether it is in the first ten.

    Raises:
        UserError: the model has no precision.
    """
    ranked, view = evaluate(model, dataset, part), view_of(dataset, part)
    if ranked.precision is None:
        raise UserError("these runs have no precision; name an arm such as bft")
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        states, _ = states_of_view(model, dataset, view, table.weight.device)
        (scores,) = predicted(states, table, view.target, calibrations=(AS_TRAINED,), ks=(K,), memory_mb=256.0)
    return {
        "entropy": -scores.entropy,
        "probability of the ten best": np.log(scores.top[K]),
        "history length": np.log(ranked.per_user["history_length"].to_numpy()),
        "count of the last item": np.log1p(dataset.training_counts[view.items[view.stop - 1]]),
        "precision": np.log(ranked.precision.astype(np.float64)),
    }, ranked.per_user["rank_unfiltered"].to_numpy() <= K


def logistic(x: FloatArray, hit: NDArray[np.bool_]) -> FloatArray:
    """Weights (P,) of the logistic regression of hits on standardised signals (U, P), without its constant.

    The penalty is half of the squared weights, the constant's left out.
    """
    ones = np.column_stack([np.ones(len(x)), x])
    penalised = np.r_[0.0, np.ones(x.shape[1])]

    def loss(w: FloatArray) -> tuple[float, FloatArray]:
        z = ones @ w
        value = np.logaddexp(0, z).sum() - z[hit].sum() + 0.5 * penalised @ w**2
        return float(value), ones.T @ (special.expit(z) - hit) + penalised * w

    weights: FloatArray = optimize.minimize(loss, np.zeros(ones.shape[1]), jac=True, method="L-BFGS-B").x[1:]
    return weights


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means and intervals over seeds, and what precision adds."""
    columns = {name: np.array([row[name] for row in rows]) for name in (*KNOWN, "precision", *JOINED)}
    columns["precision adds to both"] = columns["both and precision"] - columns["both of the scores"]
    columns["precision adds to all"] = columns["all and precision"] - columns["all"]
    lines = [[name, *_interval(values)] for name, values in columns.items()]
    return markdown_table(["signal", f"AUROC of hit@{K}, {len(rows)} seeds", "95 % interval"], lines)


def _interval(values: FloatArray) -> tuple[str, str]:
    inside = seed_interval(values)
    return f"{values.mean():.4f}", "" if inside is None else f"{inside[0]:.4f} to {inside[1]:.4f}"


if __name__ == "__main__":
    finish(main)
