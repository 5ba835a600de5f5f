"""Which arm each run belongs to, and how that arm is called.

Runs belong to one arm if they have one configuration but for the seed, the data's place and what a machine decides
(threads, device, memory), and one trainer; a run of this version that lacks a key of a later commit has its default.
Where each began from an older run of its own seed, the folders of those may differ in that seed. An arm is called as
the model calls it; where several share the name, the settings in which they differ are added in the form of ``arms``:
``matched+recency``, ``bft[core.lam_max=10]``. A setting as the model, the arm or the mixer has it by itself is not
among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from recbft.comparing.finished_runs import Run
from recbft.config.fields import by_setting, to_dict
from recbft.errors import UserError
from recbft.evaluation.protocol import config_hash
from recbft.training.run_config import load_run_config

# Decided by the machine a run was made on, not by the arm.
OF_MACHINE = ("training.threads", "training.device", "training.tensorboard", "evaluation.memory_mb")


def label_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by arm, in the order in which the arms come.

    Raises:
        UserError: two arms have one name, since the runs of one lack a setting.
    """
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(config_hash(_of_arm([run])), []).append(run)
    arms: dict[str, list[Run]] = {}
    for exactly, group in alike.items():
        under_any_seed = {config_hash(_of_arm([run], any_seed=True)) for run in group}
        # Where runs of several seeds began from one older run, its folder is what they share as it is.
        arms.setdefault(under_any_seed.pop() if len(under_any_seed) == 1 else exactly, []).extend(group)
    groups = list(arms.values())
    several_models = len({run.config["model"] for run in runs}) > 1
    names = [_name(group, groups, several_models) for group in groups]
    _check_told_apart(names, groups)
    return dict(zip(names, groups, strict=True))


def config_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The configuration of an arm's runs: that of the first, and SEED for the seed in what each began from."""
    return _under_any_seed(runs[0].config) if _began_apart(runs) else runs[0].config


def own_settings(run: Run) -> dict[str, Any]:
    """The settings of a run that are not its arm's defaults, by their full names."""
    return _own_settings([run])


def arm_name(name: str, settings: Mapping[str, Any]) -> str:
    """An arm with settings of its own, in the form of ``arms``."""
    own = dict(settings)
    if own.get("backbone.recency_decay") is True:
        del own["backbone.recency_decay"]
        name += "+recency"
    listed = ",".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in own.items())
    return f"{name}[{listed}]" if listed else name


def _check_told_apart(names: Sequence[str], groups: Sequence[Sequence[Run]]) -> None:
    """What a later version brought, or a mixer unknown here, is neither in older runs nor in the name of newer ones."""
    for name, group in zip(names, groups, strict=True):
        first = groups[names.index(name)]
        if group is not first:
            here, there = (by_setting(_of_arm(runs)) for runs in (first, group))
            keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
            raise UserError(
                f"{first[0].path} and {group[0].path} are both arm {name}, but {', '.join(keys)} is said by one "
                "alone, as in runs of different commits of another version; compare those of one, or train again"
            )


def _name(group: Sequence[Run], groups: Sequence[Sequence[Run]], with_model: bool) -> str:
    config = group[0].config
    alike = [by_setting(_of_arm(o)) for o in groups if all(o[0].config[k] == config[k] for k in ("model", "arm"))]
    said_by_mixer = _mixer_defaults(config)
    # The decay is always said: a plain layer with it is another baseline than one without.
    own = {
        key: value
        for key, value in _own_settings(group).items()
        if key == "backbone.recency_decay"
        or (any(other.get(key) != value for other in alike) and (key, value) not in said_by_mixer)
    }
    return arm_name(f"{config['model']}/{config['arm']}" if with_model else str(config["arm"]), own)


def _mixer_defaults(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What the name of a run's mixer says of its own options; nothing of a mixer that this process does not know."""
    try:
        usual = load_run_config(model=config["model"], arm=config["arm"], mixer=config.get("mixer"))
    except UserError:
        return []
    return list(by_setting({"mixing": to_dict(usual.mixing)}).items())


def _own_settings(runs: Sequence[Run]) -> dict[str, Any]:
    config = runs[0].config
    default = by_setting(_identifying(to_dict(load_run_config(model=config["model"], arm=config["arm"]))))
    return {key: value for key, value in by_setting(_of_arm(runs)).items() if default.get(key) != value}


def _of_arm(runs: Sequence[Run], *, any_seed: bool = False) -> dict[str, Any]:
    """What runs of one arm share."""
    config = runs[0].config
    shared = _identifying(_under_any_seed(config) if any_seed or _began_apart(runs) else config)
    return shared if runs[0].trained_by is None else shared | {"trained_by": runs[0].trained_by}


def _began_apart(runs: Sequence[Run]) -> bool:
    return len({run.config.get("training", {}).get("warm_start") for run in runs}) > 1


def _under_any_seed(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with SEED for its own seed in the folder of the older run that it began from."""
    training = config.get("training", {})
    older = training.get("warm_start")
    if older is None:
        return config
    said = re.sub(rf"(seed\W?){config['seed']}(?!\d)", r"\1SEED", older)
    return config | {"training": training | {"warm_start": said}}


def _identifying(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {name: v for name, v in value.items() if f"{key}.{name}" not in OF_MACHINE}
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key not in ("seed", "data")
    }
