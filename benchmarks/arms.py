"""Arms as they are named on the command line, and the configuration each stands for.

NAME                    an arm of the model, such as matched
NAME+recency            the same with the learned recency decay
NAME[key=value,...]     the same with settings of its own; NAME+recency[...] too
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.command import split_list
from recbft.config import to_dict
from recbft.errors import UserError
from recbft.run_config import RunConfig, load_run_config


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: ``label`` is how it was asked for."""

    label: str
    name: str
    settings: tuple[str, ...] = ()

    def config(self, settings: Sequence[str] = (), **named: Any) -> RunConfig:
        """The run of this arm under settings common to all arms; the arm's own win, named values win over both."""
        made = load_run_config(None, [*settings, *self.settings], arm=self.name, **named)
        return replace(made, data=made.data.resolved())

    @property
    def folder(self) -> str:
        """The label in letters that any file system and shell takes."""
        return re.sub(r"[^\w.+=-]+", "_", self.label).strip("_")


def parse_arms(text: str) -> list[Arm]:
    """The arms of a comma-separated list.

    Raises:
        UserError: the text is not such a list, or names an arm twice.

    >>> parse_arms("matched+recency, bft[lam_max=10,initial=count]")[1].settings
    ('lam_max=10', 'initial=count')
    """
    arms = []
    for part in split_list(text):
        match = re.fullmatch(r"(\w+)(\+recency)?(?:\[(.*)\])?", part)
        if match is None:
            raise UserError(f"arm {part!r} cannot be read; write NAME, NAME+recency or NAME[key=value,...]")
        own = split_list(match[3]) if match[3] else []
        recency = ["recency_decay=true"] if match[2] else []
        arms.append(Arm(label=part, name=match[1], settings=(*recency, *own)))
    for arm in arms:
        if sum(arm.folder == other.folder for other in arms) > 1:
            raise UserError(f"arm {arm.label!r} is named twice; name each once")
    return arms


def check_distinct(arms: Sequence[Arm], configs: Sequence[RunConfig]) -> None:
    """Refuse to compare an arm with itself.

    Raises:
        UserError: two arms have equal configurations.
    """
    seen: dict[str, str] = {}
    for arm, config in zip(arms, configs, strict=True):
        key = repr(to_dict(config))
        if key in seen:
            raise UserError(f"arms {seen[key]} and {arm.label} are the same configuration; leave one out")
        seen[key] = arm.label
