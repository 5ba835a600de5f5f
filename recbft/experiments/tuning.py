"""Search settings with Optuna: each trial is an arm, its value the mean over the seeds of its objective.

    OUT/study.db            the study, in SQLite; the same command goes on with it
    OUT/runs/trial-HASH-seedN/   runs, named for their settings, so that a trial broken off goes on where it was

No point of a space that can be counted is tried twice: its runs would be the same. A trial whose settings no run can
have is failed for good. A trial whose training failed (a crash, a full disk) is taken up again by the next command:
nothing tells whether its settings were to blame. Test metrics are not used. Optuna is an extra, ``recbft[tune]``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recbft.config.fields import by_setting, check_range, to_dict
from recbft.config.yaml_text import parse_yaml
from recbft.datasets import Dataset
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.experiments.missing_runs import SIDE_BY_SIDE, prepare, train_or_say
from recbft.experiments.plan import ArmSpec
from recbft.experiments.queue import Watcher
from recbft.experiments.search_space import (
    OBJECTIVES,
    Dimension,
    all_points,
    best_validation,
    check_each_once,
    check_reach,
    of_kind,
)
from recbft.runs import locks
from recbft.system.files import make_folder
from recbft.system.torchrun import refuse_several
from recbft.training.build import check_begins
from recbft.training.bundle import refuse_other_data, refuse_other_settings
from recbft.training.run_config import RunConfig

_STUDY = "recbft"
_AGAIN = "asked for again"  # numbers of trials that do not count, since another was or will be asked for instead
_FAILED = "training failed"  # of a trial: what its training said
_IMPOSSIBLE = "cannot be run"  # of a trial: why no run can have its values
_VALIDATION = "validation"  # of a trial: the mean best validation, which is not its value where the objective is tail


def search(
    space: Sequence[Dimension],
    arm: str,
    seeds: Sequence[int],
    out: Path,
    configure: Callable[[ArmSpec, int], RunConfig],
    *,
    trials: int,
    workers: int,
    prune: bool,
    watch: Watcher,
    objective: str = "best",
) -> dict[str, Any]:
    """Go on with the study in ``out`` until it has so many trials; the trials, best first.

    Args:
        objective: a name of ``OBJECTIVES``, what trials are ranked and pruned by.

    Raises:
        UserError: Optuna is missing, the study is of another search, or no run can have what is asked for.
        RunInterruptedError: the user stopped it; the same command goes on.
        RunError: the study cannot be written, or every trial failed.
    """
    refuse_several(SIDE_BY_SIDE)
    check_range("--jobs", workers, at_least=1)
    if prune and len(seeds) < 2:
        raise UserError(
            "--prune has no effect with one seed, after which a trial is over; give more seeds or leave it out"
        )
    optuna = load_optuna()
    base = configure(ArmSpec(arm, arm), 0)
    # A key or value that no run can have is refused before a study is begun with it.
    first = configure(ArmSpec(arm, arm, tuple(f"{dimension.key}={dimension.first}" for dimension in space)), 0)
    check_each_once(space, first)
    values = by_setting(to_dict(first))
    space = [of_kind(dimension, values) for dimension in space]
    if not {dimension.key.rpartition(".")[2] for dimension in space} & {"training", "epochs", "eval_every"}:
        check_reach(objective, base.training)
    dataset = base.data.load()
    asked = _Asked(arm, seeds, out, configure, dataset, objective, workers, prune, watch)
    make_folder(out / "queue")
    with _alone(out), _ends_explained(out / "study.db", optuna):
        study = _open_study(out / "study.db", optuna, prune)
        _check_same(study, space, base, dataset, seeds, objective)
        _take_up_trials(study, optuna)
        points = all_points(space)
        while (number := _number(study)) < trials:
            # What is drawn follows from the trials that have ended, however often the search was stopped.
            study.sampler = optuna.samplers.TPESampler(seed=number)
            left = None if points is None else _untried(study, points)
            if left == []:
                watch.note(f"all {len(points or ())} points of the space were tried; more trials would repeat them")
                break
            trial = study.ask()
            values = {dimension.key: dimension.suggest(trial) for dimension in space}
            if left is not None and values not in left:
                _take_instead(study, trial, random.Random(number).choice(left), optuna)
                continue
            settings = tuple(f"{key}={value}" for key, value in values.items())
            watch.note(f"trial {number + 1} of {trials}: {' '.join(settings)}")
            state, value = _outcome(trial, settings, asked)
            study.tell(trial, value, state=optuna.trial.TrialState[state])
        return _results(study, out)


class _Asked(NamedTuple):
    """What all trials of a search have in common, as in ``search``."""

    arm: str
    seeds: Sequence[int]
    out: Path
    configure: Callable[[ArmSpec, int], RunConfig]
    dataset: Dataset
    objective: str
    workers: int
    prune: bool
    watch: Watcher


def _outcome(trial: Any, settings: tuple[str, ...], asked: _Asked) -> tuple[str, float | None]:
    """Train a trial: the state of Optuna's in which it ends, and its value where it is complete."""
    try:
        check_begins(asked.configure(ArmSpec(asked.arm, asked.arm, settings), asked.seeds[0]), asked.dataset)
    except UserError as error:  # values that no run can have together, such as 2 heads at a width of 9
        asked.watch.note(f"this trial cannot be run: {error}")
        trial.set_user_attr(_IMPOSSIBLE, str(error))
        return "FAIL", None
    spec = ArmSpec(f"trial-{hashlib.sha256(repr(settings).encode()).hexdigest()[:10]}", asked.arm, settings)
    try:
        value = _evaluate(trial, spec, asked)
    except RunInterruptedError:
        raise RunInterruptedError("interrupted; the same command goes on with this trial") from None
    except RunError as error:
        asked.watch.note(f"this trial failed: {error}")
        trial.set_user_attr(_FAILED, str(error))
        return "FAIL", None
    return ("PRUNED" if value is None else "COMPLETE"), value


def _evaluate(trial: Any, spec: ArmSpec, asked: _Asked) -> float | None:
    """The mean of the objective over seeds; None if the trial is pruned after some of them."""
    seeds = asked.seeds
    values: list[float] = []
    validations: list[float] = []
    # A trial can be given up between two batches: there are two at least, however many workers are free.
    at_once = min(asked.workers, (len(seeds) + 1) // 2) if asked.prune else len(seeds)
    for first in range(0, len(seeds), at_once):
        some = seeds[first : first + at_once]
        jobs, _ = prepare([spec], some, asked.out, asked.configure, dataset=asked.dataset)
        train_or_say(jobs, asked.dataset, asked.out, workers=asked.workers, watch=asked.watch)
        values += [OBJECTIVES[asked.objective](job) for job in jobs]
        validations += [best_validation(job) for job in jobs]
        if asked.prune:
            trial.report(statistics.mean(values), step=len(values))
            if len(values) < len(seeds) and trial.should_prune():
                return None
    trial.set_user_attr(_VALIDATION, statistics.mean(validations))
    return statistics.mean(values)


def load_optuna() -> Any:
    """Optuna, told to be quiet."""
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise UserError("tuning needs Optuna, which is not installed; pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No second command searches here: each would take the other's open trial for one that was broken off."""
    lock = locks.acquire(out / "queue", _STUDY)
    if lock is None:
        raise UserError(f"another `recbft tune` is at work in {out}; wait for its end, or give another --out")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _ends_explained(file: Path, optuna: Any) -> Iterator[None]:
    """Turn what the database refuses, once the study is open, into one line; and say how to go on after Ctrl-C."""
    sql_errors = importlib.import_module("sqlalchemy.exc").SQLAlchemyError
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterruptedError("interrupted; the same command goes on") from None
    except (sql_errors, optuna.exceptions.StorageInternalError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise RunError(
            f"{file}: {reason}; the trials that ended are kept: mend the cause and give the same command"
        ) from None


def _open_study(file: Path, optuna: Any, prune: bool) -> Any:
    """The study in a file, or a new one."""
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4) if prune else optuna.pruners.NopPruner()
    # Optuna lets the errors of SQLAlchemy through, and has a RuntimeError for a study of another version.
    sql_errors = importlib.import_module("sqlalchemy.exc").SQLAlchemyError
    try:
        storage = optuna.storages.RDBStorage(_address(file))
        # Asked by name: where a command was killed in the midst of the schema, the database itself would take several.
        if _STUDY not in optuna.get_all_study_names(storage):
            optuna.create_study(study_name=_STUDY, storage=storage, direction="maximize")
        return optuna.load_study(study_name=_STUDY, storage=storage, pruner=pruner)
    except (sql_errors, optuna.exceptions.OptunaError, RuntimeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{file} cannot be read as a study ({reason}); move it away to begin anew, or give another --out"
        ) from None


def _address(file: Path) -> str:
    """A file as SQLAlchemy is told of it: of a path as it stands it would take ? and %20 for signs of its own."""
    url = importlib.import_module("sqlalchemy.engine").URL
    made = url.create("sqlite", database=file.resolve().as_uri(), query={"uri": "true"})
    return str(made.render_as_string())


def _check_same(
    study: Any, space: Sequence[Dimension], base: RunConfig, dataset: Dataset, seeds: Sequence[int], objective: str
) -> None:
    """A study is of one search: its objective, model, data, fixed settings, space and seeds."""
    there = study.user_attrs
    begun = there.get("objective", objective)
    if begun != objective:
        raise UserError(
            f"the study in --out was begun with --objective {begun}, and {objective} is asked for; give another --out, "
            f"or --objective {begun}"
        )
    remedy = "give another --out, or {} it was begun with"
    config = there.get("config", base.to_yaml())
    before, now = (parse_yaml(text, "the study's config") for text in (config, base.to_yaml()))
    refuse_other_settings(before, now, "the study in --out was begun with", remedy.format("the options"))
    # Values on other data are no match for those of the trials before, whatever the file is called.
    hashes = {name: there.get(name, value) for name, value in dataset.hashes.items()}
    refuse_other_data({**there, **hashes}, dataset, "the study in --out was begun", remedy.format("the data"))
    lists = {"space": [repr(dimension) for dimension in space], "list of seeds": list(seeds)}
    for name, value in lists.items():
        if there.get(name, value) != value:
            raise UserError(f"the study in --out has another {name}; {remedy.format('the options')}")
    for name, value in {"objective": objective, "config": config, **hashes, **lists}.items():
        study.set_user_attr(name, value)


def _results(study: Any, out: Path) -> dict[str, Any]:
    """The trials that came to their end, best first, and how many did not."""
    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    counted = _counted(study)
    if counted and all(_IMPOSSIBLE in trial.user_attrs for trial in counted):
        raise UserError(
            f"none of the {len(counted)} trials can be run; the last: {counted[-1].user_attrs[_IMPOSSIBLE]}; "
            "give another --out, and values that go together"
        )
    if not done:
        raise RunError(f"none of the trials came to its end; what they said is in {out / 'queue'}")
    done.sort(key=lambda trial: -trial.value)
    ended = [trial.state.name for trial in counted]
    return {
        "trials": [
            {
                "settings": trial.params,
                "validation": trial.user_attrs[_VALIDATION],
                "value": trial.value,
            }
            for trial in done
        ],
        "pruned": ended.count("PRUNED"),
        "failed": ended.count("FAIL"),
    }


def _take_up_trials(study: Any, optuna: Any) -> None:
    """A trial that was left open, or whose training failed, is asked for again; its finished runs are used."""
    states = optuna.trial.TrialState
    for trial in _counted(study):
        if trial.state == states.RUNNING or _FAILED in trial.user_attrs:
            _take_instead(study, trial, trial.params, optuna)


def _take_instead(study: Any, trial: Any, point: Mapping[str, Any], optuna: Any) -> None:
    """The next trial asked for has these values, and this one does not count."""
    study.enqueue_trial(dict(point))
    study.set_user_attr(_AGAIN, [*study.user_attrs.get(_AGAIN, ()), trial.number])
    study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)


def _untried(study: Any, points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no trial which has ended had."""
    tried = [trial.params for trial in _counted(study) if trial.state.is_finished()]
    return [point for point in points if point not in tried]


def _number(study: Any) -> int:
    """Trials that have ended, whichever way."""
    return sum(trial.state.is_finished() for trial in _counted(study))


def _counted(study: Any) -> list[Any]:
    """The trials without those that were asked for again."""
    again = study.user_attrs.get(_AGAIN, ())
    return [trial for trial in study.trials if trial.number not in again]
