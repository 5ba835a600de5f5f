"""Finished runs as a comparison reads them: their ranks and their protocol, checked, and the arms they belong to.

Runs belong to one arm if they have one trainer and one configuration, but for the seed, the data's place and what a
machine decides (threads, device, memory). Where each began from an older run of its own seed, the folders of those may
differ in that seed. An arm is called as the model calls it. Where several share the name, the settings in which they
differ are added in the form of ``arms``: ``matched+recency``, ``bft[core.lam_max=10]``. A setting as the model, the arm
or the mixer has it by itself is not among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from recbft.config.fields import by_setting, to_dict
from recbft.errors import UserError
from recbft.evaluation.metrics import SETTINGS, config_hash, metrics_from_ranks, owner_of
from recbft.runs.checkpoint import best_digest
from recbft.runs.folder import RunFolder
from recbft.training.run_config import load_run_config

# Decided by the machine a run was made on, not by the arm.
OF_MACHINE = (
    "training.threads", "training.device", "training.tensorboard", "training.trackers", "training.project",
    "evaluation.memory_mb",
)  # fmt: skip
# What must be equal for numbers to be comparable.
_SAME = (
    "content_hash", "target_hash", "users", "items", "split", "part", "ranking", "ties", "filter_seen", "recbft_version"
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run."""

    path: Path
    seed: int
    protocol: dict[str, Any]
    metrics: dict[str, Any]
    per_user: pd.DataFrame
    history: list[dict[str, Any]]

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration."""
        found: dict[str, Any] = self.protocol["config"]
        return found

    @property
    def trained_by(self) -> str | None:
        """Whose trainer made it, "recbole"; None for our own."""
        return self.metrics.get("trained_by")

    @property
    def of_users(self) -> dict[str, NDArray[Any]]:
        """(N,) each: raw id of the test target, its training events, and the training events of the user."""
        length = self.per_user.get("training_length")
        if length is None:  # of leave-one-out: the test is ranked from training and the validation event
            length = self.per_user["history_length"] - 1
        return {
            "target": self.per_user["target"].to_numpy(),
            "target_frequency": self.per_user["target_count"].to_numpy(np.int64),
            "training_length": length.to_numpy(np.int64),
        }

    @property
    def owner(self) -> NDArray[np.int64] | None:
        """Each target's user, (N,), as ``over_users`` takes it."""
        return owner_of(self.per_user["user"].to_numpy())

    def ranks(self, setting: str) -> NDArray[np.int64]:
        """Of the test targets, (N,)."""
        return self.per_user[f"rank_{setting}"].to_numpy(np.int64)


def read_run(path: str | Path) -> Run:
    """Read a run folder and check that its ranks belong to its metrics.

    Raises:
        UserError: the run is not finished, a file is missing or damaged, or the ranks are not those of the metrics.
    """
    run = RunFolder.open(path)
    metrics, protocol, per_user = run.metrics, run.protocol, read_per_user(run)
    made = Run(run.path, protocol["seed"], protocol, metrics, per_user, list(run.read_history()))
    for setting in SETTINGS:
        figures = metrics["test"][setting]
        cutoffs = [int(k) for name in figures if (k := name.partition("@")[2]).isdecimal()]
        of_lists = any(name.startswith("recall@") for name in figures)
        for name, found in metrics_from_ranks(made.ranks(setting), cutoffs, made.owner, of_lists=of_lists).items():
            if abs(found - figures[name]) > 1e-9:
                raise UserError(
                    f"{run.per_user_file} gives {name.upper()} {found:.6f} ({setting}) and {run.metrics_file.name} "
                    f"says {figures[name]}; they are not of one run: restore them, or train again"
                )
    return made


def check_same(runs: Sequence[Run]) -> None:
    """Refuse runs whose numbers cannot be compared.

    Raises:
        UserError: naming the field in which two runs differ, and both values.
    """
    first = runs[0]
    for run in runs[1:]:
        for field in _SAME:
            here, there = first.protocol[field], run.protocol[field]
            if here != there:
                raise UserError(
                    f"the runs differ in {field}: {_short(here)} in {first.path}, {_short(there)} in {run.path}; "
                    "compare runs with the same data, split, vocabulary, ranking and version"
                )
        for column in ("user", "target"):
            if not np.array_equal(_column(first, column), _column(run, column)):
                raise UserError(
                    f"{run.path / 'per_user.parquet'} lists other values of {column!r} than {first.path}; "
                    "restore the file, or train again"
                )


def by_seed(name: str, runs: Sequence[Run]) -> dict[int, Run]:
    """The runs of an arm by seed.

    Raises:
        UserError: two of them have one seed.
    """
    found: dict[int, Run] = {}
    for run in runs:
        if run.seed in found:
            raise UserError(
                f"arm {name} has two runs of seed {run.seed}: {found[run.seed].path} and {run.path}; give one of them"
            )
        found[run.seed] = run
    return found


def read_per_user(run: RunFolder) -> pd.DataFrame:
    """The ranks of a run's users.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = run.per_user_file
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} is missing, which holds every user's rank; restore it, or train again")
    try:
        with open(path, "rb") as file:  # the path itself need not be UTF-8
            return pd.read_parquet(file)
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}); restore it, or train again") from None


def weights_of(path: Path) -> str | None:
    """SHA-256 of a run's best weights; None where they are not there, as in a copy without its checkpoint."""
    try:
        return best_digest(RunFolder(path).checkpoint)
    except UserError:
        return None


def label_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by arm, in the order in which the arms come."""
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
    assert len(set(names)) == len(names), "settings that differ are in the names"
    return dict(zip(names, groups, strict=True))


def config_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The configuration of an arm's runs: that of the first, and SEED for the seed in what each began from."""
    return _under_any_seed(runs[0].config) if _began_apart(runs) else runs[0].config


def own_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """The settings of an arm's runs that are not its defaults, by their full names."""
    return _own(_of_arm(runs))


def arm_name(name: str, settings: Mapping[str, Any]) -> str:
    """An arm with settings of its own, in the form of ``arms``."""
    own = dict(settings)
    if own.get("backbone.recency_decay") is True:
        del own["backbone.recency_decay"]
        name += "+recency"
    listed = ",".join(f"{key}={_written(value)}" for key, value in own.items())
    return f"{name}[{listed}]" if listed else name


def beyond_mixer(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings but for those that the name of the configuration's mixer says by itself.

    All of them, if this process does not know the mixer.
    """
    try:
        usual = load_run_config(model=config["model"], arm=config["arm"], mixer=config.get("mixer"))
    except UserError:
        return dict(settings)
    said = list(by_setting({"mixing": to_dict(usual.mixing)}).items())
    return {key: value for key, value in settings.items() if (key, value) not in said}


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that are not those of its model and arm."""
    default = by_setting(_identifying(to_dict(load_run_config(model=config["model"], arm=config["arm"]))))
    return {key: value for key, value in by_setting(dict(config)).items() if default.get(key) != value}


def _written(value: Any) -> str:
    """A setting's value in a name; a model that is joined by its own name."""
    if isinstance(value, Mapping) and "model" in value:
        return arm_name(f"{value['model']}/{value['arm']}", beyond_mixer(_own(value), value))
    return value if isinstance(value, str) else json.dumps(value)


def _column(run: Run, column: str) -> NDArray[Any]:
    return run.per_user[column].to_numpy().astype(str)  # ids are equal by text, whatever file they came from


def _short(value: object) -> str:
    """A value for a message; of a hash the part that is printed elsewhere too."""
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text


def _name(group: Sequence[Run], groups: Sequence[Sequence[Run]], with_model: bool) -> str:
    config = group[0].config
    alike = [by_setting(_of_arm(o)) for o in groups if all(o[0].config[k] == config[k] for k in ("model", "arm"))]
    # The decay is always said: a plain layer with it is another baseline than one without.
    own = {
        key: value
        for key, value in beyond_mixer(own_settings(group), config).items()
        if key == "backbone.recency_decay" or any(other.get(key) != value for other in alike)
    }
    return arm_name(f"{config['model']}/{config['arm']}" if with_model else str(config["arm"]), own)


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
