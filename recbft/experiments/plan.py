"""Arms as they are named on the command line, the configuration each stands for, and the runs that they need.

NAME                    an arm of the model, such as matched
NAME+recency            the same with the learned recency decay
NAME[key=value,...]     the same with settings of its own; NAME+recency[...] too

A plan says of each run where it lies, whether it is done, and the command that makes it anywhere. A run is used again
only if its configuration, its data and the version of recbft are those asked for. What stands in its place otherwise is
refused with the field that differs: nothing is trained over it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from recbft.config.fields import NULL_WORDS, by_setting, field_types, to_dict
from recbft.config.yaml_text import parse_setting
from recbft.datasets import Dataset
from recbft.datasets.config import DataConfig
from recbft.errors import UserError
from recbft.evaluation.metrics import EvaluationConfig
from recbft.experiments.lists import split_list
from recbft.mixers import MIXERS
from recbft.models import MODELS
from recbft.runs.folder import RunFolder
from recbft.system import recbft_version
from recbft.system.files import write_atomic
from recbft.training.bundle import refuse_other_data, refuse_other_settings
from recbft.training.run_config import RunConfig, load_run_config

# What other options of a command decide for all of its runs.
_GIVEN_ELSEWHERE = {
    "seed": "every value is trained on the seeds that --seeds gives",
    "model": "its runs are of one model, -m; `recbft compare -m A,B` takes several",
    "arm": "its runs are of one arm, --arm; `recbft compare --arms A,B` takes several",
    "dataset": "its runs are on one data set, -d; take each by itself",
}
_LONGEST_FOLDER = 220  # bytes of the 255 that a name may have: seeds, locks and hidden names add some
_RANKING = {*field_types(EvaluationConfig), *field_types(DataConfig)}
Status = Literal["missing", "unfinished", "finished"]

_REMEDY = "give another --out, or remove that folder"


@dataclass(frozen=True)
class ArmSpec:
    """One side of a comparison: ``label`` is how it was asked for."""

    label: str
    name: str
    settings: tuple[str, ...] = ()

    def config(
        self, settings: Sequence[str] = (), *, file: Path | Sequence[Path] | None = None, **named: Any
    ) -> RunConfig:
        """The run of this arm under a file and settings common to all arms.

        The arm's own settings win over those, and named values over both.
        """
        try:
            made = load_run_config(file, [*settings, *self.settings], arm=self.name, **named)
        except UserError as error:
            raise UserError(f"arm {self.label}: {error}") from None
        return replace(made, data=made.data.resolved())

    @property
    def folder(self) -> str:
        """The label in letters that any file system and shell takes; of a long one the beginning and a hash."""
        name = re.sub(r"[^\w.+=-]+", "_", self.label).strip("_")
        if len(name.encode()) <= _LONGEST_FOLDER:
            return name
        ending = f"-{hashlib.sha256(self.label.encode(errors='surrogateescape')).hexdigest()[:8]}"
        return name.encode()[: _LONGEST_FOLDER - len(ending)].decode(errors="ignore") + ending


def parse_arms(text: str) -> list[ArmSpec]:
    """The arms of a comma-separated list.

    >>> parse_arms("matched+recency, bft[lam_max=10,initial=count]")[1].settings
    ('lam_max=10', 'initial=count')
    """
    arms = []
    for part in split_list(text):
        match = re.fullmatch(r"(\w+)(\+recency)?(?:\[(.*)\])?", part)
        if match is None:
            raise UserError(f"arm {part!r} cannot be read; write NAME, NAME+recency or NAME[key=value,...]")
        own = split_list(match[3]) if match[3] else []
        keys = [setting.partition("=")[0].strip() for setting in own]
        for key in keys:
            check_varies(f"arm {part!r}", key)
            if keys.count(key) > 1:
                raise UserError(f"arm {part!r} sets {key} twice; give one value")
        recency = ["recency_decay=true"] if match[2] else []
        arms.append(ArmSpec(label=part, name=match[1], settings=(*recency, *own)))
    for arm in arms:
        if sum(arm.folder == other.folder for other in arms) > 1:
            raise UserError(f"arm {arm.label!r} is named twice; name each once")
    return arms


def check_distinct(arms: Sequence[ArmSpec], configs: Sequence[RunConfig]) -> None:
    """Refuse to train the same thing twice."""
    seen: dict[str, str] = {}
    for arm, config in zip(arms, configs, strict=True):
        key = repr(to_dict(config))
        if key in seen:
            raise UserError(f"arms {seen[key]} and {arm.label} are the same configuration; leave one out")
        seen[key] = arm.label


def check_varies(option: str, key: str, *, is_ranked: bool = False) -> None:
    """Refuse to vary what another option of the command decides for all of its runs.

    Args:
        is_ranked: the key's values are ranked, so what ranks them is refused, too: the data, how they are evaluated,
            and the metric that is validated.
    """
    section, _, name = key.strip().rpartition(".")
    if section in ("", "data") and name in _GIVEN_ELSEWHERE:
        raise UserError(f"{option} cannot vary {key}: {_GIVEN_ELSEWHERE[name]}")
    ranks = section in ("evaluation", "data") or name == "valid_metric" or (not section and name in _RANKING)
    if is_ranked and ranks:
        raise UserError(f"{option} cannot vary {key}: its values are judged by one metric on one data set")


def settings_of(config: RunConfig) -> list[str]:
    """The ``key=value`` settings that make this run from its model, arm, data set and seed alone."""
    default = by_setting(to_dict(load_run_config(model=config.model, arm=config.arm, seed=config.seed)))
    named = ("model", "arm", "seed", "data.dataset")
    ours = {key: value for key, value in by_setting(to_dict(config)).items() if key not in named}
    return [_setting(key, value) for key, value in ours.items() if value != default.get(key)]


def summary_of(config: Mapping[str, Any]) -> str:
    """What the arm of a run's configuration is, as ``recbft models`` says it; nothing of one that has no words."""
    model = MODELS.get(config["model"])
    return "" if model is None else model.arm_summaries.get(config["arm"], "")


def has_decay(config: Mapping[str, Any]) -> bool:
    """Whether a run's configuration asks for the recency decay and its mixer has a place for it."""
    mixer = MIXERS.get(config["mixer"])
    return mixer is not None and "recency_decay" in mixer.hears and bool(config["backbone"].get("recency_decay"))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping by dotted key.

    >>> leaves({"seed": 1, "training": {"epochs": 3}})
    {'seed': 1, 'training.epochs': 3}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _setting(key: str, value: Any) -> str:
    """``key=value`` that ``parse_setting`` reads back, without quotes where it can do without."""
    text = f"{key}={value}"
    bare = isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).lower() not in NULL_WORDS
    if bare and parse_setting(text) == (key, value):
        return text
    return f"{key}={json.dumps(value)}"


@dataclass(frozen=True)
class Job:
    """One run of an experiment."""

    arm: ArmSpec
    config: RunConfig
    path: Path

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.arm.label} seed {self.config.seed}"

    @property
    def command(self) -> str:
        """The command that trains this run, here or on another machine, whose folder can then be copied here."""
        config = self.config
        words = ["recbft", "train", "-m", config.model, "-d", str(config.data.dataset)]
        words += ["--arm", config.arm, "--seed", str(config.seed)]
        for setting in settings_of(config):
            words += ["--set", setting]
        if config.data.data_root is not None:
            words += ["--data-root", config.data.data_root]
        return shlex.join([*words, "--out", str(self.path.parent), "--name", self.path.name])


def plan(
    arms: Sequence[ArmSpec], seeds: Sequence[int], runs: Path, configure: Callable[[ArmSpec, int], RunConfig]
) -> list[Job]:
    """All runs, seed by seed, so that an experiment broken off has whole pairs.

    A run takes one thread unless its config names a number, so that its numbers do not depend on the machine's cores.
    """
    return [
        Job(arm, _with_threads(configure(arm, seed)), runs / f"{arm.folder}-seed{seed}")
        for seed in seeds
        for arm in arms
    ]


def status(job: Job, dataset: Dataset) -> Status:
    """How far a run is; what else its folder holds, as a run with another config, is refused."""
    if not os.path.lexists(job.path):  # asked first: a folder that another command makes has its config from the start
        return "missing"
    if not (job.path / "config.yaml").is_file():
        RunFolder.refuse_taken(job.path)
        return "missing"
    run = RunFolder.open(job.path)
    there = run.protocol
    refuse_other_data(there, dataset, f"{job.path} holds a run", _REMEDY)
    refuse_other_settings(there["config"], to_dict(job.config), f"{job.path} holds a run with", _REMEDY)
    if there["recbft_version"] != recbft_version():
        raise UserError(
            f"{job.path} holds a run of recbft_version {there['recbft_version']}, and this is {recbft_version()}; "
            f"{_REMEDY}"
        )
    return "finished" if run.is_finished else "unfinished"


def write_commands(jobs: Sequence[Job], path: Path) -> None:
    """A line for each run: any scheduler can work through them."""
    write_atomic(path, "".join(f"{job.command}\n" for job in jobs).encode(errors="surrogateescape"))


def _with_threads(config: RunConfig) -> RunConfig:
    return replace(config, training=replace(config.training, threads=config.training.threads or 1))
