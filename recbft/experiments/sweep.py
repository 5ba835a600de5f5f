"""One knob, several values: how much do the results hang on it?

Every value is an arm over the same seeds, compared with the model's default by paired differences. A value is chosen by
validation alone; the test column beside it is for reading, since choosing by it would make it a validation set.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recbft.config.fields import by_setting, to_dict
from recbft.errors import UserError
from recbft.evaluation.metrics import headline_setting
from recbft.evaluation.paired import compare_seeds, holm
from recbft.experiments.lists import split_list
from recbft.experiments.plan import ArmSpec, Job, check_varies
from recbft.runs.folder import RunFolder
from recbft.training.run_config import RunConfig


@dataclass(frozen=True)
class Sweep:
    """The arms of a sweep: the default and each other value."""

    key: str  # with its section
    default: Any
    arms: tuple[ArmSpec, ...]  # the default first
    values: dict[str, Any]  # arm label -> value of the knob


def plan_sweep(vary: str, arm: str, configure: Callable[[ArmSpec], RunConfig]) -> Sweep:
    """The arms that ``key=value,value,...`` asks for; a value that is the default is the default's arm."""
    key, equals, text = vary.partition("=")
    texts = [part for part in split_list(text) if part]
    if not equals or not texts:
        raise UserError(f"--vary {vary!r} is not KEY=VALUE,VALUE,...; write for example core.lam_max=10,20,50")
    check_varies("--vary", key, is_ranked=True)
    base = ArmSpec(arm, arm)
    default = by_setting(to_dict(configure(base)))
    arms, full = [base], ""
    values: dict[str, Any] = {}
    for text in texts:
        spec = ArmSpec(f"{arm}[{key}={text}]", arm, (f"{key}={text}",))
        made = by_setting(to_dict(configure(spec)))
        # Of a mixer's own options, which come and go with it, the mixer is the first.
        changed = next((name for name, value in made.items() if name not in default or value != default[name]), None)
        if changed is None:  # the default, which has an arm already
            continue
        full = full or changed
        if changed != full:
            raise UserError(f"--vary {vary!r} changes {full} and {changed}; vary one setting at a time")
        if made[full] in values.values() or spec.folder in [other.folder for other in arms]:
            raise UserError(f"--vary names {key}={text} twice; name each value once")
        arms.append(spec)
        values[spec.label] = made[full]
    if len(arms) == 1:
        raise UserError(f"--vary {vary!r} names only the default; give at least one other value")
    return Sweep(key=full, default=default[full], arms=tuple(arms), values={**values, arm: default[full]})


def sweep_results(sweep: Sweep, jobs: Sequence[Job]) -> dict[str, Any]:
    """Validation and test per value, and their paired differences from the default."""
    training, evaluation = jobs[0].config.training, jobs[0].config.evaluation
    setting, metric = headline_setting(evaluation.filter_seen), training.valid_metric
    values: dict[str, dict[str, list[float]]] = {}
    for arm in sweep.arms:
        found = [RunFolder(job.path).metrics for job in jobs if job.arm == arm]
        values[arm.label] = {part: [m[part][setting][metric] for m in found] for part in ("validation", "test")}
    base = sweep.arms[0].label
    rows = [_row(sweep.values[label], label == base, values[base], of_arm) for label, of_arm in values.items()]
    for part in ("validation", "test"):
        tested = [row[part]["difference"] for row in rows if not row["is_default"]]
        for difference, p in zip(tested, holm([d["p_t"] for d in tested]), strict=True):
            difference["p_holm"] = p
    best = max(rows, key=lambda row: (row["validation"]["mean"], row["is_default"]))
    return {
        "key": sweep.key,
        "default": sweep.default,
        "metric": metric,
        "setting": setting,
        "rows": sorted(rows, key=lambda row: _order(row["value"])),
        "chosen": best["value"],
    }


def _row(
    value: Any, is_default: bool, base: Mapping[str, list[float]], of_arm: Mapping[str, list[float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"value": value, "is_default": is_default}
    for part, values in of_arm.items():
        row[part] = {
            "mean": statistics.mean(values),
            "sd": statistics.stdev(values),
            "values": values,
            "difference": None if is_default else asdict(compare_seeds(base[part], values)),
        }
    return row


def _order(value: Any) -> tuple[float, str]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (float(value) if number else math.inf, str(value))
