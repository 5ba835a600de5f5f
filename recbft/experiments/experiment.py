"""Train what an experiment lacks, and put its comparison into a folder.

OUT/runs/ARM-seedN/     a folder per run
OUT/queue/              locks and logs
OUT/commands.txt        the command of each run
OUT/comparison.json     every figure; OUT/comparison.md, the tables
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recbft.config import to_dict
from recbft.datasets import Dataset
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.experiments import provenance
from recbft.experiments.arms import ArmSpec, check_distinct, parse_arms
from recbft.experiments.comparison import Comparison, common_seeds, comparison_of
from recbft.experiments.document import comparison_document
from recbft.experiments.external import read_external
from recbft.experiments.lists import parse_seeds
from recbft.experiments.plan import Job, plan, status, write_commands
from recbft.experiments.queue import Watcher, train_all
from recbft.experiments.results import METRICS, write_comparison
from recbft.files import make_folder, write_atomic
from recbft.machine import cores
from recbft.models import MODELS
from recbft.run_config import RunConfig
from recbft.torchrun import refuse_several
from recbft.training.many_seeds import check_stackable, check_together
from recbft.training.run_folder import RunFolder, settle
from recbft.training.run_parts import check_begins
from recbft.training.same_run import first_difference

SIDE_BY_SIDE = "processes that the command itself begins (-j) train the runs, each one of them"  # not torchrun's
_NAMED_AT_MOST = 5  # failed runs that a message names


def plan_comparison(
    arms: str,
    seeds: str,
    out: Path,
    configure: Callable[[ArmSpec, int], RunConfig],
    *,
    baseline: str | None = None,
    external: Mapping[str, Path] | None = None,
    dataset: Dataset | None = None,
    together: int = 1,
) -> tuple[list[Job], Dataset]:
    """The runs of all arms and seeds, and their data, checked before anything is trained or written.

    Args:
        arms, seeds: as ``parse_arms`` and ``parse_seeds`` read them.
        out, configure, dataset, together: as in ``prepare``.
        baseline, external: as in ``comparison_of``.

    Raises:
        UserError: as ``prepare``; fewer than two arms or seeds, a baseline that is not there, or a file of ranks that
            is missing or does not go with these data and seeds.
    """
    wanted, specs, files = parse_seeds(seeds), parse_arms(arms), external or {}
    if len(wanted) < 2:
        raise UserError(f"--seeds {seeds!r} names one seed; a comparison needs at least 2, such as 0-9")
    names = [*(spec.label for spec in specs), *files]
    if len(names) < 2:
        raise UserError(f"--arms {arms!r} names one arm; a comparison needs at least 2, such as matched,bft")
    if len(set(names)) < len(names):
        raise UserError(f"--external has the name of an arm among {', '.join(names)}; give it another")
    for name, file in files.items():
        if not file.is_file():
            raise UserError(f"--external {name}: there is no file {file}")
    if baseline is not None and baseline not in names:
        raise UserError(f"--baseline {baseline!r} is not an arm; choose one of {', '.join(names)}")
    jobs, dataset = prepare(specs, wanted, out, configure, dataset=dataset, together=together)
    targets = dataset.decode(dataset.items[dataset.offsets[1:] - 1])
    ranks = [(name, read_external(file, dataset.user_ids, targets, num_items=dataset.num_items))
             for name, file in files.items()]  # fmt: skip
    trained = {spec.label: set(wanted) for spec in specs}
    common_seeds(trained, {name: set(found.seeds) for name, found in ranks if found.seeds is not None})
    return jobs, dataset


def prepare(
    arms: Sequence[ArmSpec],
    seeds: Sequence[int],
    out: Path,
    configure: Callable[[ArmSpec, int], RunConfig],
    *,
    dataset: Dataset | None = None,
    together: int = 1,
) -> tuple[list[Job], Dataset]:
    """The runs of an experiment and its data, checked before anything is trained or written.

    Args:
        configure: the run of an arm and seed.
        dataset: the data that the runs will find where their config says, loaded already.
        together: as in ``train_missing``.

    Raises:
        UserError: an arm cannot be configured, is not trained, is another's equal or cannot be compared, a folder holds
            another run, or what is missing cannot begin on these data, or not with its seeds together.
    """
    refuse_several(SIDE_BY_SIDE)
    jobs = plan(arms, seeds, out / "runs", configure)
    for job in jobs:
        if not MODELS[job.config.model].trainable:
            raise UserError(f"model {job.config.model!r} is not trained: its seeds are all alike; choose another")
    check_distinct(arms, [job.config for job in jobs[: len(arms)]])
    _check_comparable(jobs)
    dataset = jobs[0].config.data.load() if dataset is None else dataset
    settle(out / "runs")
    found = [(job, status(job, dataset)) for job in jobs]
    for arm in arms:
        _check_begins([job.config for job, its in found if job.arm == arm and its == "missing"], dataset, arm)
        if together > 1:
            _check_together([job.config for job, its in found if job.arm == arm and its != "finished"], arm)
    return jobs, dataset


def train_missing(
    jobs: Sequence[Job], dataset: Dataset, out: Path, *, workers: int, watch: Watcher, together: int = 1
) -> None:
    """Train what is not finished, several runs at a time, after writing down the command of each.

    Args:
        jobs, dataset: as ``prepare`` returns them.
        workers: processes at a time.
        together: most runs of an arm, which differ in their seed alone, that one process trains together.

    Raises:
        UserError: ``workers`` or ``together`` is not positive, or another command has put another run in a job's place.
        RunError: runs failed, or the user broke it off; the message says how to go on.
    """
    check_positive("--jobs", workers)
    check_positive("--batch-seeds", together)
    write_commands(jobs, make_folder(out) / "commands.txt")
    train_or_say(jobs, dataset, out, workers=workers, watch=watch, together=together)


def train_or_say(
    jobs: Sequence[Job], dataset: Dataset, out: Path, *, workers: int, watch: Watcher, together: int = 1
) -> None:
    """``train_all`` whose bad ends are one line each, and after which every job's run is the one asked for."""
    try:
        failed = train_all(jobs, dataset, out / "queue", workers, watch, together)
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
            f"{out / 'queue'}; mend the cause and give the same command again"
        )
    for job in jobs:
        status(job, dataset)


class Concluded(NamedTuple):
    """A comparison whose results are written."""

    comparison: Comparison
    made: dict[str, Any]  # how: the header of its results
    text: str  # its tables, for a terminal


def train_and_compare(
    jobs: Sequence[Job],
    dataset: Dataset,
    out: Path,
    *,
    command: str,
    workers: int,
    watch: Watcher,
    together: int = 1,
    baseline: str | None = None,
    external: Mapping[str, Path] | None = None,
    metrics: Sequence[str] = METRICS,
    skip_broken: bool = False,
) -> Concluded:
    """Train what is missing of a planned comparison and write its results.

    Args:
        command: what asked for it, as it stands beside the results.
        workers, watch, together: as in ``train_missing``.
        baseline, external, skip_broken: as in ``comparison_of``.
        metrics: what is tested.

    Raises:
        UserError, RunError: as in ``train_missing`` and ``comparison_of``.
    """
    check_devices(jobs)
    made = provenance.header(command, dataset, device=provenance.device_of(jobs[0].config))
    train_missing(jobs, dataset, out, workers=workers, watch=watch, together=together)
    comparison = comparison_of(
        [job.path for job in jobs],
        baseline=baseline,
        external=external,
        names={job.path: job.arm.label for job in jobs},
        skip_broken=skip_broken,
    )
    made = provenance.close(made, comparison.run_folders)
    return Concluded(comparison, made, conclude(comparison, out, made=made, external=external, metrics=metrics))


def usual_workers() -> int:
    """One per core, with room for other people on a large machine."""
    return min(cores(), 4)


def check_devices(jobs: Sequence[Job]) -> None:
    """Refuse runs on a device that is not there."""
    for config in {job.config.training.device: job.config for job in jobs}.values():
        provenance.device_of(config)


def check_positive(option: str, value: int) -> None:
    """Refuse a number of processes or runs below 1."""
    if value < 1:
        raise UserError(f"{option} is {value}; give a whole number of at least 1")


def conclude(
    comparison: Comparison,
    out: Path,
    *,
    made: Mapping[str, Any],
    external: Mapping[str, Path] | None = None,
    metrics: Sequence[str] = METRICS,
) -> str:
    """Write the comparison's two files and return the tables for a terminal."""
    result = write_comparison(comparison, out, made=made, external=external, metrics=metrics)
    write_atomic(out / "comparison.md", comparison_document(result, markdown=True).encode())
    return comparison_document(result, markdown=False)


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


def _check_begins(configs: Sequence[RunConfig], dataset: Dataset, arm: ArmSpec) -> None:
    """Refuse before training what each run of an arm would refuse in its own process, maybe hours later."""
    if not configs:
        return
    try:
        check_begins(configs[0], dataset)
    except UserError as error:
        raise UserError(f"arm {arm.label}: {error}") from None


def _check_together(configs: Sequence[RunConfig], arm: ArmSpec) -> None:
    """Refuse before training what the process that trains seeds of an arm together would refuse."""
    if len(configs) < 2:
        return
    try:
        check_together(configs[:2])
        check_stackable(configs[0])
    except UserError as error:
        raise UserError(f"--batch-seeds cannot be given with arm {arm.label}: {error}") from None


def _compared_on(config: RunConfig) -> dict[str, Any]:
    return {"data": to_dict(config.data), "evaluation": {"filter_seen": config.evaluation.filter_seen}}
