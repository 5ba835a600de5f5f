"""The space of a search: the settings that vary, and what values each can take."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recbft.config.fields import by_setting, is_whole
from recbft.config.yaml_text import parse_setting, place
from recbft.errors import UserError
from recbft.experiments.arms import check_varies
from recbft.experiments.lists import split_list
from recbft.training.run_config import RunConfig, sections_of

_RANGE = re.compile(r"(log:)?([^.,][^,]*?)\.\.([^,]+)")
_MOST_POINTS = 1_000  # of a space whose points are counted: in a larger one hardly any is drawn twice


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
