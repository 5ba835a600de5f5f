"""What a search ranks its trials by: one number of a finished run, from its validation alone."""

from __future__ import annotations

from collections.abc import Callable

from recbft.errors import UserError
from recbft.evaluation.protocol import headline_setting
from recbft.experiments.plan import Job
from recbft.experiments.tail_objective import WINDOW, tail_value
from recbft.runs.folder import RunFolder
from recbft.training.config import TrainingConfig


def best_validation(job: Job) -> float:
    """The validation metric of the weights that the run kept."""
    setting = headline_setting(job.config.evaluation.filter_seen)
    value: float = RunFolder(job.path).metrics["validation"][setting][job.config.training.valid_metric]
    return value


def best_and_tail(job: Job) -> float:
    """The same and a share of what it gained at the end, see ``tail_objective``.

    Raises:
        UserError: the history lacks the validations.
    """
    run, training = RunFolder(job.path), job.config.training
    try:
        return tail_value(run.read_history(), training.valid_metric, best_validation(job), epochs=training.epochs)
    except UserError as error:
        raise UserError(f"{run.history_file}: {error}") from None


OBJECTIVES: dict[str, Callable[[Job], float]] = {"best": best_validation, "tail": best_and_tail}


def check_reach(objective: str, training: TrainingConfig) -> None:
    """Refuse runs too short for the tail objective to differ from the best validation.

    Raises:
        UserError: nothing is validated before the window at their end.
    """
    needed = WINDOW + training.eval_every
    if objective == "tail" and training.epochs < needed:
        raise UserError(
            f"--objective tail asks what the last {WINDOW} epochs gained, but with training.epochs {training.epochs} "
            f"and training.eval_every {training.eval_every} nothing is validated before them; raise training.epochs "
            f"to {needed} or more, or leave --objective out"
        )
