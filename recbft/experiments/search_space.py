"""What a search varies, and what it ranks its trials by.

The space: the settings that vary, and what values each can take. The objective: one number of a finished run, from its
validation alone. ``best`` is the validation metric of the weights that the run kept. ``tail`` adds a share of what that
metric gained in the last epochs: a run that still improves at the end is worth more than its best.

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

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recbft.config.fields import by_setting, is_whole
from recbft.config.yaml_text import parse_setting, place
from recbft.errors import UserError
from recbft.evaluation.metrics import headline_setting
from recbft.experiments.lists import split_list
from recbft.experiments.plan import Job, check_varies
from recbft.runs.folder import RunFolder
from recbft.training.run_config import RunConfig, TrainingConfig, sections_of

_RANGE = re.compile(r"(log:)?([^.,][^,]*?)\.\.([^,]+)")
_MOST_POINTS = 1_000  # of a space whose points are counted: in a larger one hardly any is drawn twice
WINDOW, ALPHA = 5, 0.2


@dataclass(frozen=True)
class Dimension:
    """One setting's possible values: a list, or a range of numbers (whole ones where both bounds are of type int)."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def first(self) -> Any:
        """The first value, or the lowest."""
        return self.choices[0] if self.choices else self.low

    @property
    def values(self) -> Sequence[Any] | None:
        """All there are; None of real numbers."""
        if self.choices:
            return self.choices
        return range(int(self.low), int(self.high) + 1) if self._is_whole else None

    def suggest(self, trial: Any) -> Any:
        """A value of this trial."""
        if self.choices:
            return trial.suggest_categorical(self.key, list(self.choices))
        if self._is_whole:
            return trial.suggest_int(self.key, self.low, self.high, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    @property
    def _is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


def parse_space(texts: Sequence[str]) -> list[Dimension]:
    """The dimensions that ``key=a,b,c``, ``key=low..high`` and ``key=log:low..high`` name.

    >>> parse_space(["training.learning_rate=log:1e-4..1e-2"])[0]
    Dimension(key='training.learning_rate', choices=(), low=0.0001, high=0.01, log=True)
    """
    space = [_dimension(text) for text in texts]
    for dimension in space:
        check_varies("--space", dimension.key, is_ranked=True)
    return space


def check_each_once(space: Sequence[Dimension], config: RunConfig) -> None:
    """A setting is one dimension, with its section or without."""
    seen: set[str] = set()
    for dimension in space:
        tree: dict[str, Any] = {}
        place(tree, dimension.key, dimension.first, ("mixer",), sections_of(config.model, config.mixer))
        for key in by_setting(tree):
            if key in seen:
                raise UserError(f"--space names {key} twice, with its section or without; name each once")
            seen.add(key)


def of_kind(dimension: Dimension, values: Mapping[str, Any]) -> Dimension:
    """A range with bounds of the kind that its setting takes: ``0..1`` is all between where that is a real number.

    Bounds that are not whole are refused where the setting is: hardly any trial could be run.
    """
    if dimension.choices:
        return dimension
    value = next((value for key, value in values.items() if dimension.key in (key, key.rpartition(".")[2])), None)
    if isinstance(value, float):
        return replace(dimension, low=float(dimension.low), high=float(dimension.high))
    if is_whole(value) and not (is_whole(dimension.low) and is_whole(dimension.high)):
        raise UserError(
            f"--space {dimension.key}={dimension.low}..{dimension.high}: it takes whole numbers; give whole bounds"
        )
    return dimension


def all_points(space: Sequence[Dimension]) -> list[dict[str, Any]] | None:
    """Every point of a space, a value by setting; None where they cannot be counted, or are very many."""
    values = [each for dimension in space if (each := dimension.values) is not None]
    if len(values) < len(space) or math.prod(map(len, values)) > _MOST_POINTS:
        return None
    keys = [dimension.key for dimension in space]
    return [dict(zip(keys, point, strict=True)) for point in itertools.product(*values)]


def _dimension(text: str) -> Dimension:
    key, equals, values = text.partition("=")
    if not (key.strip() and equals and values.strip()):
        raise UserError(f"--space {text!r} is not KEY=VALUES; write a,b,c or low..high or log:low..high")
    found = _RANGE.fullmatch(values.strip())
    if found is None:
        choices = tuple(parse_setting(f"{key}={part}")[1] for part in split_list(values))
        for n, choice in enumerate(choices):
            if choice in choices[:n]:
                raise UserError(f"--space {text!r} names {choice} twice; name each value once")
        return Dimension(key.strip(), choices=choices)
    low, high = (parse_setting(f"{key}={part}")[1] for part in found.group(2, 3))
    numbers = all(type(bound) in (int, float) and math.isfinite(bound) for bound in (low, high))
    if not numbers or low >= high or (found[1] and low <= 0):
        raise UserError(f"--space {text!r}: give numbers low..high with low < high, and low > 0 after log:")
    return Dimension(key.strip(), low=low, high=high, log=bool(found[1]))


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
