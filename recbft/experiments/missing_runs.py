"""Train the runs that an experiment lacks.

OUT/runs/ARM-seedN/     a folder per run
OUT/queue/              locks and logs
OUT/commands.txt        the command of each run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recbft.config.fields import check_range, to_dict
from recbft.datasets import Dataset
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.experiments.plan import ArmSpec, Job, check_distinct, plan, status, write_commands
from recbft.experiments.queue import Watcher, train_all
from recbft.models import MODELS
from recbft.runs.environment import cores
from recbft.runs.folder import RunFolder, settle
from recbft.system.files import make_folder
from recbft.system.torchrun import refuse_several
from recbft.training.build import check_begins
from recbft.training.bundle import first_difference
from recbft.training.many_seeds import check_stackable, check_together
from recbft.training.process_settings import chosen_device
from recbft.training.run_config import RunConfig

SIDE_BY_SIDE = "processes that the command itself begins (-j) train the runs, each one of them"  # not torchrun's
_NAMED_AT_MOST = 5  # failed runs that a message names


def prepare(
    arms: Sequence[ArmSpec],
    seeds: Sequence[int],
    out: Path,
    configure: Callable[[ArmSpec, int], RunConfig],
    *,
    dataset: Dataset | None = None,
    batch_seeds: int = 1,
) -> tuple[list[Job], Dataset]:
    """The runs of an experiment and its data, checked before anything is trained or written.

    Args:
        configure: the run of an arm and seed.
        dataset: the data that the runs will find where their config says, loaded already.
        batch_seeds: as in ``train_missing``.

    Raises:
        UserError: an arm cannot be trained or compared, or a folder holds another run.
    """
    refuse_several(SIDE_BY_SIDE)
    jobs = plan(arms, seeds, out / "runs", configure)
    for job in jobs:
        if not MODELS[job.config.model].trainable:
            raise UserError(f"model {job.config.model!r} is not trained: its seeds are all alike; choose another")
    check_distinct(arms, [job.config for job in jobs[: len(arms)]])
    _check_comparable(jobs)
    data = jobs[0].config.data
    dataset = data.load() if dataset is None else data.split_as_asked(dataset)
    settle(out / "runs")
    found = [(job, status(job, dataset)) for job in jobs]
    for arm in arms:
        missing = [job.config for job, its in found if job.arm == arm and its == "missing"]
        unfinished = [job.config for job, its in found if job.arm == arm and its != "finished"]
        _check_begins(missing, unfinished if batch_seeds > 1 else [], dataset, arm)
    return jobs, dataset


def train_missing(
    jobs: Sequence[Job], dataset: Dataset, out: Path, *, workers: int, watch: Watcher, batch_seeds: int = 1
) -> None:
    """Train what is not finished, several runs at a time, after writing down the command of each.

    Args:
        jobs, dataset: as ``prepare`` returns them.
        workers: processes at a time.
        batch_seeds: most runs of an arm, which differ in their seed alone, that one process trains together.

    Raises:
        UserError: another command put another run in a job's place.
        RunError: runs failed, or the user broke it off; the message says how to go on.
    """
    check_range("--jobs", workers, at_least=1)
    check_range("--batch-seeds", batch_seeds, at_least=1)
    write_commands(jobs, make_folder(out) / "commands.txt")
    train_or_say(jobs, dataset, out, workers=workers, watch=watch, batch_seeds=batch_seeds)


def train_or_say(
    jobs: Sequence[Job], dataset: Dataset, out: Path, *, workers: int, watch: Watcher, batch_seeds: int = 1
) -> None:
    """``train_all`` whose bad ends are one line each, and after which every job's run is the one asked for."""
    try:
        failed = train_all(jobs, dataset, out / "queue", workers, watch, batch_seeds)
    except KeyboardInterrupt:
        done = sum(RunFolder(job.path).is_finished for job in jobs)
        raise RunInterruptedError(
            f"interrupted; {done} of {len(jobs)} runs are finished, the same command goes on"
        ) from None
    if failed:
        names = ", ".join(failure.job.name for failure in failed[:_NAMED_AT_MOST])
        more = f" and {len(failed) - _NAMED_AT_MOST} more" if len(failed) > _NAMED_AT_MOST else ""
        raise RunError(
            f"{len(failed)} of {len(jobs)} runs failed ({names}{more}: {failed[0].reason}); what they said is in "
            f"{out / 'queue'}; mend the cause and give the same command again, or leave that arm out: what is finished "
            "is kept"
        )
    for job in jobs:
        status(job, dataset)


def usual_workers() -> int:
    """One per core, with room for other people on a large machine."""
    return min(cores(), 4)


def check_devices(jobs: Sequence[Job]) -> None:
    """Refuse runs on a device that is not there."""
    for config in {job.config.training.device: job.config for job in jobs}.values():
        chosen_device(config.training.device)


def _check_comparable(jobs: Sequence[Job]) -> None:
    """Refuse before training what a comparison would refuse after it: other data, or another headline."""
    first = jobs[0]
    for job in jobs[1:]:
        before, now = _compared_on(first.config), _compared_on(job.config)
        if before != now:
            raise UserError(
                f"arm {job.arm.label} cannot be compared with {first.arm.label}, which has "
                f"{first_difference(before, now)}; give all arms the same"
            )


def _compared_on(config: RunConfig) -> dict[str, Any]:
    return {"data": to_dict(config.data), "evaluation": {"filter_seen": config.evaluation.filter_seen}}


def _check_begins(missing: Sequence[RunConfig], together: Sequence[RunConfig], dataset: Dataset, arm: ArmSpec) -> None:
    """Refuse before training what a run of an arm would refuse in its own process, maybe hours later.

    Args:
        together: the runs that processes train together; none where each is trained by itself.
    """
    where = f"arm {arm.label}"
    try:
        if missing:
            check_begins(missing[0], dataset)
        if len(together) > 1:
            where = f"--batch-seeds cannot be given with arm {arm.label}"
            check_together(together[:2])
            check_stackable(together[0], with_features=dataset.features is not None)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
