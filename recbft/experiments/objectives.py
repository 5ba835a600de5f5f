"""What a search ranks its trials by: one number of a finished run, from its validation alone.

``best`` is the validation metric of the weights that the run kept. ``tail`` adds a share of what that metric gained in
the last epochs: a run that still improves at the end is worth more than its best.

    paper, lower is better     score = CE_final - alpha max(0, CE_{e*-W} - CE_{e*})                                (a)
    here, higher is better     value = M_E + alpha max(0, M_E - M_{E-W})                                        (10.9)

M_t is the validation metric of the weights that a run has kept after epoch t, its best so far. E is the last epoch that
the run may have (``training.epochs``), W the window and alpha what a gain within it is worth, in the metric's own unit.

Source: Fuzzy-Gated Training for Transformers, section 5 (W in 5..10, alpha about 0.2).
**choice**: a metric, its sign turned, takes the cross-entropy's place, and the paper does not say what e* is. With the
best epoch, (a) would pay most to a run that peaks soon after its start, and its maximum would have no effect. With the
last epoch it pays for progress near the end of a fixed amount of work, which is what the paper says it is for. A run
that stopped early is held at what it kept: it earns something only if it was still improving within the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recbft.errors import UserError
from recbft.evaluation.protocol import headline_setting
from recbft.experiments.plan import Job
from recbft.runs.folder import RunFolder
from recbft.training.config import TrainingConfig

WINDOW, ALPHA = 5, 0.2


def best_validation(job: Job) -> float:
    """The validation metric of the weights that the run kept."""
    setting = headline_setting(job.config.evaluation.filter_seen)
    value: float = RunFolder(job.path).metrics["validation"][setting][job.config.training.valid_metric]
    return value


def best_and_tail(job: Job) -> float:
    """Equation (10.9) for a finished run."""
    training, run = job.config.training, RunFolder(job.path)
    history, metric = run.read_history(), training.valid_metric
    if all(row.get(f"valid_{metric}") is None for row in history):
        raise UserError(
            f"{run.history_file} has no {metric}, which --objective tail needs; remove that run to repeat it"
        )
    return tail_value(history, metric, best_validation(job), epochs=training.epochs)


def tail_value(
    history: Sequence[Mapping[str, Any]],
    metric: str,
    final: float,
    *,
    epochs: int,
    window: int = WINDOW,
    alpha: float = ALPHA,
) -> float:
    """Equation (10.9); M_E alone where nothing was validated up to epoch E - W.

    Args:
        history: rows of ``history.csv``; an epoch without validation has no value, and keeps what the one before kept.
        metric: what is validated, such as ``"ndcg@10"``; higher is better.
        final: M_E, the metric of the weights that the run kept; those of SWA are in no row.
        epochs: E; the run may have stopped earlier.
        window: W, in epochs.
        alpha: what late progress is worth, >= 0.

    >>> rows = [{"epoch": 1, "valid_mrr": 0.1}, {"epoch": 2, "valid_mrr": 0.3}, {"epoch": 3, "valid_mrr": 0.4}]
    >>> round(tail_value(rows, "mrr", 0.4, epochs=3, window=1), 3)
    0.42
    """
    validated = {row["epoch"]: float(row[name]) for row in history if row.get(name := f"valid_{metric}") is not None}
    early = [value for epoch, value in validated.items() if epoch <= epochs - window]
    return final + alpha * max(0.0, final - max(early)) if early else final


OBJECTIVES: dict[str, Callable[[Job], float]] = {"best": best_validation, "tail": best_and_tail}


def check_reach(objective: str, training: TrainingConfig) -> None:
    """Refuse runs too short for the tail objective to differ from the best validation."""
    needed = WINDOW + training.eval_every
    if objective == "tail" and training.epochs < needed:
        raise UserError(
            f"--objective tail asks what the last {WINDOW} epochs gained, but with training.epochs {training.epochs} "
            f"and training.eval_every {training.eval_every} nothing is validated before them; raise training.epochs "
            f"to {needed} or more, or leave --objective out"
        )
