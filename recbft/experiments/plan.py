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
from typing import Any, Literal

from recbft.config import to_dict
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.evaluation.protocol import config_hash
from recbft.experiments.arms import ArmSpec, settings_of
from recbft.files import write_atomic
from recbft.run_config import RunConfig
from recbft.training.run_folder import RunFolder
from recbft.version import recbft_version

Status = Literal["missing", "unfinished", "finished"]


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
    """How far a run is.

    Raises:
        UserError: its folder holds a run with another config, other data or another version, or something else.
    """
    if not os.path.lexists(job.path):  # asked first: a folder that another command makes has its config from the start
        return "missing"
    if not (job.path / "config.yaml").is_file():
        RunFolder.refuse_taken(job.path)
        return "missing"
    run = RunFolder.open(job.path)
    there = run.protocol
    _check_fields(there, job)
    if there["content_hash"] != dataset.content_hash:
        raise UserError(
            f"{job.path} holds a run on data with content {there['content_hash'][:12]}, and {dataset.name} as loaded "
            f"has {dataset.content_hash[:12]}; give another --out, or remove that folder"
        )
    # Equal content says all about the data that matters; the path it was read from may differ between machines.
    before, now = ({**config, "data": None} for config in (there["config"], to_dict(job.config)))
    if config_hash(before) != config_hash(now):
        raise UserError(
            f"{job.path} holds a run with {first_difference(before, now)}; give another --out, or remove that folder"
        )
    if there["recbft_version"] != recbft_version():
        raise UserError(
            f"{job.path} holds a run of recbft_version {there['recbft_version']}, and this is {recbft_version()}; "
            "give another --out, or remove that folder"
        )
    return "finished" if run.is_finished else "unfinished"


def first_difference(there: Any, now: Any, key: str = "") -> str:
    """The first key in which two configs differ, with both values."""
    if isinstance(there, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in there if name not in now)]:
            if config_hash({"": there.get(name)}) != config_hash({"": now.get(name)}):
                return first_difference(there.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    return f"{key} {there!r}, and {now!r} is asked for"


def write_commands(jobs: Sequence[Job], path: Path) -> None:
    """A line for each run: any scheduler can work through them."""
    write_atomic(path, "".join(f"{job.command}\n" for job in jobs).encode(errors="surrogateescape"))


def _with_threads(config: RunConfig) -> RunConfig:
    return replace(config, training=replace(config.training, threads=config.training.threads or 1))


def _check_fields(protocol: dict[str, Any], job: Job) -> None:
    missing = [name for name in ("content_hash", "config", "recbft_version") if name not in protocol]
    if missing:
        raise UserError(
            f"{job.path / 'protocol.json'} lacks {', '.join(missing)}; restore it, or remove that folder to train again"
        )
