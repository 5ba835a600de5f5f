"""The runs that an experiment needs: where each lies, whether it is done, and the command that makes it anywhere.

A run is used again only if its configuration, its data and the version of recbft are those asked for. What stands in
its place otherwise is refused with the field that differs: nothing is trained over it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from recbft.config.fields import to_dict
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.experiments.arms import ArmSpec, settings_of
from recbft.runs.folder import RunFolder
from recbft.system import recbft_version
from recbft.system.files import write_atomic
from recbft.training.bundle import refuse_other_data, refuse_other_settings
from recbft.training.run_config import RunConfig

Status = Literal["missing", "unfinished", "finished"]

_REMEDY = "give another --out, or remove that folder"


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
    refuse_other_data(there["content_hash"], dataset, f"{job.path} holds a run", _REMEDY)
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
