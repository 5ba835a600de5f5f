"""Train the runs that a comparison lacks, compare them, and write what was found into a folder.

OUT/comparison.json     every figure; OUT/comparison.md, the tables
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recbft.comparing import provenance
from recbft.comparing.comparison import Comparison, common_seeds, comparison_of
from recbft.comparing.external_ranks import read_external
from recbft.comparing.results import METRICS, write_comparison
from recbft.datasets import Dataset
from recbft.errors import UserError
from recbft.experiments.lists import parse_seeds
from recbft.experiments.missing_runs import check_devices, prepare, train_missing
from recbft.experiments.plan import ArmSpec, Job, parse_arms
from recbft.experiments.queue import Watcher
from recbft.reporting.comparison_tables import comparison_document
from recbft.system.files import write_atomic
from recbft.training.process_settings import chosen_device
from recbft.training.run_config import RunConfig


def plan_comparison(
    arms: str,
    seeds: str,
    out: Path,
    configure: Callable[[ArmSpec, int], RunConfig],
    *,
    baseline: str | None = None,
    external: Mapping[str, Path] | None = None,
    dataset: Dataset | None = None,
    batch_seeds: int = 1,
) -> tuple[list[Job], Dataset]:
    """The runs of all arms and seeds, and their data, checked before anything is trained or written.

    Args:
        arms, seeds: as ``parse_arms`` and ``parse_seeds`` read them.
        out, configure, dataset, batch_seeds: as in ``prepare``.
        baseline, external: as in ``comparison_of``.
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
    jobs, dataset = prepare(specs, wanted, out, configure, dataset=dataset, batch_seeds=batch_seeds)
    test = dataset.split.test
    tested, targets = dataset.user_ids[test.user], dataset.decode(test.target)
    ranks = [(name, read_external(file, tested, targets, num_items=dataset.num_items))
             for name, file in files.items()]  # fmt: skip
    trained = {spec.label: set(wanted) for spec in specs}
    common_seeds(trained, {name: set(found.seeds) for name, found in ranks if found.seeds is not None})
    return jobs, dataset


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
    batch_seeds: int = 1,
    baseline: str | None = None,
    external: Mapping[str, Path] | None = None,
    metrics: Sequence[str] = METRICS,
    skip_broken: bool = False,
) -> Concluded:
    """Train what is missing of a planned comparison and write its results.

    Args:
        command: what asked for it, as it stands beside the results.
        workers, watch, batch_seeds: as in ``train_missing``.
        baseline, external, skip_broken: as in ``comparison_of``.
        metrics: what is tested.
    """
    check_devices(jobs)
    made = provenance.header(command, dataset, device=chosen_device(jobs[0].config.training.device))
    train_missing(jobs, dataset, out, workers=workers, watch=watch, batch_seeds=batch_seeds)
    comparison = comparison_of(
        [job.path for job in jobs],
        baseline=baseline,
        external=external,
        names={job.path: job.arm.label for job in jobs},
        skip_broken=skip_broken,
    )
    made = provenance.close(made, comparison.run_folders)
    return Concluded(comparison, made, conclude(comparison, out, made=made, external=external, metrics=metrics))


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
