"""Run folders for every arm and seed: which are done, which go on, and worker processes that train the rest.

A run's folder is ``OUT/ARM-seedN``. A finished one is used again if its config and data are those asked for, and an
unfinished one is resumed. Whatever stops the command (Ctrl-C, a kill), the same command goes on from there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from recbft.config import to_dict
from recbft.datasets import Dataset
from recbft.errors import RunError, UserError
from recbft.evaluation.protocol import config_hash
from recbft.experiments.arms import ArmSpec
from recbft.experiments.plan import first_difference
from recbft.run_config import RunConfig
from recbft.training.run_folder import RunFolder
from recbft.training.session import resume, train

# What every run imports sooner or later (PyTorch's optimisers do the second): seconds, which short runs would pay each.
_IMPORTED_ONCE = ("recbft.training.session", "torch._dynamo", "scipy.stats")


@dataclass(frozen=True)
class Job:
    """One run to be had."""

    arm: ArmSpec
    config: RunConfig
    path: Path

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.arm.label} seed {self.config.seed}"


def plan(
    arms: Sequence[ArmSpec], seeds: Sequence[int], out: Path, configure: Callable[[ArmSpec, int], RunConfig]
) -> list[Job]:
    """All runs, seed by seed, so that a comparison broken off has whole pairs."""
    return [Job(arm, configure(arm, seed), out / f"{arm.folder}-seed{seed}") for seed in seeds for arm in arms]


def unfinished(jobs: Sequence[Job], dataset: Dataset) -> list[Job]:
    """The runs that are still to be trained, or trained on.

    Raises:
        UserError: a folder holds a run with another config or other data.
    """
    return [job for job in jobs if not _is_done(job, dataset)]


def _is_done(job: Job, dataset: Dataset) -> bool:
    if not (job.path / "config.yaml").is_file():
        RunFolder.refuse_taken(job.path)
        return False
    run = RunFolder.open(job.path)
    there = run.protocol
    if there["content_hash"] != dataset.content_hash:
        raise UserError(
            f"{job.path} holds a run on data with content {there['content_hash'][:12]}, and {dataset.name} as loaded "
            f"has {dataset.content_hash[:12]}; give another --out, or remove that folder"
        )
    now = to_dict(job.config)
    if config_hash(there["config"]) != config_hash(now):
        raise UserError(
            f"{job.path} holds a run with {first_difference(there['config'], now)}; "
            "give another --out, or remove that folder"
        )
    return run.is_finished


def train_all(jobs: Sequence[Job], workers: int, report: Callable[[Job, float], None]) -> list[Job]:
    """Train in ``workers`` processes at a time; returns the runs that failed, each having said why.

    Args:
        report: called here with a run that has finished, and the seconds this command spent on it.
    """
    # A run depends on its config alone; a fresh process per run also gives back all its memory.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(list(_IMPORTED_ONCE))
    waiting, failed = list(reversed(jobs)), []
    running: dict[Any, tuple[Any, Job, float]] = {}  # by sentinel
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop()
                process = context.Process(target=_work, args=(job,), daemon=True)
                process.start()
                running[process.sentinel] = (process, job, time.perf_counter())
            for sentinel in wait(list(running)):
                process, job, began = running.pop(sentinel)
                process.join()
                if process.exitcode == 0:
                    report(job, time.perf_counter() - began)
                else:
                    failed.append(job)
                    if process.exitcode < 0:
                        print(f"error: {job.name}: ended by signal {-process.exitcode}", file=sys.stderr)
    finally:
        # The state after the last epoch is on disk, so nothing but the epoch in progress is lost.
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.join()
    return failed


def _work(job: Job) -> None:
    """One run, in its own process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends its workers
    try:
        if (job.path / "config.yaml").is_file():
            resume(job.path, data_root=job.config.data.data_root)
        else:
            train(job.config, job.path)
    except (UserError, RunError) as error:
        print(f"error: {job.name}: {error}", file=sys.stderr)
        sys.exit(1)
