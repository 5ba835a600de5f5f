"""``recbft compare`` for a notebook: arms over seeds, trained where they are missing, and their tables as data frames.

>>> from recbft import compare                                           # doctest: +SKIP
>>> compared = compare("matched,matched+recency,bft", dataset, out="comparisons/mine", epochs=50)  # doctest: +SKIP
>>> compared.differences[["arm", "setting", "metric", "difference", "low", "high", "p_holm"]]  # doctest: +SKIP

Runs are trained in processes of their own, which import the script that called: there the call has to stand under
``if __name__ == "__main__":``. A notebook and an interactive session need no such line.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from recbft.api.train_and_compare import plan_comparison, train_and_compare
from recbft.comparing.comparison import COMPARISON_FILE, DATA_FILE, FEATURES_FILE, Comparison
from recbft.comparing.results import METRICS, cells_of, is_constant
from recbft.config.fields import NULL_WORDS, is_whole
from recbft.datasets import Dataset
from recbft.datasets.config import DataConfig
from recbft.errors import RunError, RunInterruptedError, UserError
from recbft.evaluation.paired import holm
from recbft.experiments.lists import parse_metrics, split_list
from recbft.experiments.missing_runs import check_devices, usual_workers
from recbft.experiments.plan import ArmSpec, Job
from recbft.experiments.queue import WORDLESS, Failure, Running, Watcher
from recbft.reporting.comparison_tables import comparison_document
from recbft.system.files import make_folder, plain, read_json, user_path
from recbft.training.run_config import RunConfig

# What messages call as the command line does.
_OPTION = re.compile(r"(?<!\S)--(arms|batch-seeds|seeds|baseline|out)\b")
_NULL = re.compile(f'"({"|".join(NULL_WORDS)})"', re.IGNORECASE)  # quoted, it would be a text


@dataclass(frozen=True, eq=False, repr=False)
class Compared:
    """A finished comparison; printed, it is the tables that ``recbft compare`` prints.

    The columns of the data frames have the names that ``comparison.json`` has, and each frame a row per model, arm,
    setting ("unfiltered": all items ranked, "filtered": seen ones masked) and metric.
    """

    path: Path  # the folder: comparison.json, comparison.md, commands.txt, runs/; of several models, MODEL/ of these
    comparisons: dict[str, Comparison]  # by model: values per seed and per user, and each arm's run folders
    results: dict[str, dict[str, Any]]  # by model: the content of comparison.json

    @property
    def arms(self) -> pd.DataFrame:
        """Each arm's mean and standard deviation over seeds (NaN where there is one set of ranks for all seeds)."""
        rows = [
            {"model": model, "arm": arm, "setting": setting, "metric": metric, "num_seeds": len(each["values"]),
             "mean": each["mean"], "sd": each["sd"]}
            for model, result in self.results.items()
            for arm, figures in result["arms"].items()
            for setting, metrics in figures["metrics"].items()
            for metric, each in metrics.items()
        ]  # fmt: skip
        frame: pd.DataFrame = pd.DataFrame(rows).astype({"sd": float})
        return frame

    @property
    def differences(self) -> pd.DataFrame:
        """Each arm less each baseline, paired by seed, with a 95 % interval from low to high.

        p by two-sided paired t-test (``p_t``), by sign flips, and by Holm over the t-tests of a model against one
        baseline; ``smallest_effect`` is the difference that so many seeds would have found four times in five. A
        difference that is the same in every seed, be it 0, leaves no spread to judge by: it has neither that nor an
        interval, NaN, and its ``p_t`` is the sign flips'.
        """
        frame: pd.DataFrame = self._differences("over_seeds").astype({"relative": float, "cohen_d": float})
        return frame

    @property
    def on_validation(self) -> pd.DataFrame:
        """The same runs and seeds on validation, by which epochs were chosen: a gain of the method shows there too.

        As ``differences``, without Holm's adjustment; no rows for arms that come from files.
        """
        return self._differences("on_validation")

    @property
    def over_users(self) -> pd.DataFrame:
        """The same over users, seeds averaged away, which is another claim: other users would show the difference too.

        A bootstrap interval, p by sign flips, and by Holm over those of a model against one baseline.
        """
        frame = self._differences("over_users")
        if len(frame):  # of one user nothing can be said
            family = frame.groupby(["model", "baseline"], sort=False)["p_sign_flip"]
            frame["p_holm"] = family.transform(lambda p: holm(p.tolist()))
        return frame

    @property
    def notes(self) -> list[str]:
        """What a reader must know beside the tables."""
        return [note for result in self.results.values() for note in result["notes"]]

    def __repr__(self) -> str:
        return "\n".join(comparison_document(result, markdown=False) for result in self.results.values())

    def _differences(self, over: str) -> pd.DataFrame:
        """A row per cell that was compared over seeds or users."""
        rows: list[dict[str, Any]] = []
        for model, result in self.results.items():
            for baseline, against in result["comparisons"].items():
                for arm, setting, metric, cell in cells_of(against):
                    key = {"model": model, "baseline": baseline, "arm": arm, "setting": setting, "metric": metric}
                    d = dict(cell.get(over, {}))
                    if d:
                        low, high = d.pop("interval")
                        if is_constant(d):
                            low = high = d["smallest_effect"] = math.nan
                        rows.append(key | {"difference": d.pop("difference"), "low": low, "high": high} | d)
        frame: pd.DataFrame = pd.DataFrame(rows)
        return frame


def compare(
    arms: str | Sequence[str],
    dataset: Dataset | str | Path | None = None,
    *,
    out: str | Path,
    model: str | Sequence[str] | None = None,
    seeds: str | Sequence[int] = "0-9",
    baseline: str | None = None,
    metrics: str | Sequence[str] = METRICS,
    jobs: int | None = None,
    batch_seeds: int = 1,
    config: str | Path | None = None,
    progress: Watcher | None = None,
    **settings: Any,
) -> Compared:
    """Train the runs that are missing, as ``recbft compare`` does, and compare the arms by seed and by user.

    A script calls it under ``if __name__ == "__main__":``, since the processes that train import the script.

    Args:
        arms: NAME, NAME+recency or NAME[key=value,...], at least two; a list, or one text with commas.
        dataset: a data set, a name of ``recbft data list`` or a file; the configured one unless given. A data set is
            written to ``out/dataset.parquet``, where the processes that train read it.
        out: the folder for runs and results; the same call goes on with what is there.
        model: one of ``recbft models``, or several, each with a folder of its own in ``out``; sasrec unless given.
        seeds: such as "0-9", or whole numbers; at least two.
        baseline: the arm that others are compared with; matched where it takes part, else the first.
        metrics: what is tested; with the arms, the family of Holm's adjustment.
        jobs: runs trained at a time; the cores, at most 4, unless given.
        batch_seeds: train up to so many seeds of an arm together in one process.
        config: a YAML file with settings of every run.
        progress: an object that is told how it goes, as ``recbft.experiments.queue.Watcher``; none unless given, and
            what should be read is a warning then.
        settings: settings of every run, as ``Recommender`` takes them; an arm's own win over them.

    Returns:
        Printed, the tables that ``recbft compare`` prints; as data frames ``arms``, ``differences`` over seeds,
        ``over_users`` and ``on_validation``; ``notes`` to read beside them, and the ``path`` of the files.

    Raises:
        UserError: an unknown name, a value of the wrong type or range, arms that cannot be compared, ``out`` holds
            other runs, or the script that calls is no file; before anything is trained.
        RunError: runs failed, or it was interrupted; the same call goes on.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)  # a process that trains, as it imports the script that called; who waits for it says what is wrong
    _check_importable()
    given = dataset if isinstance(dataset, Dataset) else None
    if dataset is not None and not isinstance(dataset, (Dataset, str, Path)):
        raise UserError(
            f"dataset is a {type(dataset).__name__}; make a data set of it with Dataset.from_frame(frame), or give the "
            "name of one or a file"
        )
    for key, number in (("jobs", jobs), ("batch_seeds", batch_seeds)):
        if number is not None and not (is_whole(number) and number >= 1):
            raise UserError(f"{key} is {number!r}; give a whole number of at least 1")
    texts, models, arms, seeds = _settings(settings), _models(model), _joined("arms", arms), _joined("seeds", seeds)
    folder, tested = user_path(out), parse_metrics(_joined("metrics", metrics))
    file = folder / DATA_FILE
    where = str(file) if given is not None else None if dataset is None else str(dataset)
    named = {"model": model, "seeds": seeds, "baseline": baseline, "config": config, "metrics": ",".join(tested)}
    command = _call(arms, dataset, named | settings)

    def configure(arm: ArmSpec, seed: int, *, model: str | None) -> RunConfig:
        own = None if config is None else Path(config)
        made = arm.config(texts, file=own, seed=seed, model=model, dataset=where)
        if given is None:
            return made
        made.data.check_prepared(given)
        return replace(made, data=_kept(given, file).split_as(made.data.split_as_asked(given)))

    with _python_words():
        plans = {}
        for name in models:  # all are planned, and what is wrong with one is said, before the first is trained
            its = folder if len(models) == 1 else folder / str(name)
            jobs_of, data = plan_comparison(
                arms,
                seeds,
                its,
                partial(configure, model=name),
                baseline=baseline,
                dataset=given,
                batch_seeds=batch_seeds,
            )
            plans[jobs_of[0].config.model] = its, jobs_of, data
            check_devices(jobs_of)
        if given is not None:
            _keep(given, file)
        comparisons, results = {}, {}
        for name, (its, jobs_of, data) in plans.items():
            concluded = train_and_compare(
                jobs_of,
                data,
                its,
                command=command,
                workers=usual_workers() if jobs is None else jobs,
                watch=progress or _Quiet(),
                batch_seeds=batch_seeds,
                baseline=baseline,
                metrics=tested,
            )
            comparisons[name] = concluded.comparison
            results[name] = read_json(its / COMPARISON_FILE)
    return Compared(folder.absolute(), comparisons, results)


class _Quiet:
    """Hears what a queue says, and passes on what a user should read."""

    def start(self, total: int, finished: int) -> None:
        pass

    def look(self, running: Sequence[Running], waiting: int) -> None:
        pass

    def finished(self, job: Job, seconds: float) -> None:
        pass

    def failed(self, failure: Failure) -> None:
        pass

    def note(self, message: str) -> None:
        warnings.warn(message, stacklevel=2)

    def stop(self) -> None:
        pass


@contextmanager
def _python_words() -> Iterator[None]:
    """Say what is wrong in the words of a call, and after an interruption how a program goes on."""
    try:
        yield
    except UserError as error:
        raise UserError(_OPTION.sub(lambda found: found[1].replace("-", "_"), str(error))) from None
    except RunError as error:
        kind = RunInterruptedError if isinstance(error, RunInterruptedError) else RunError
        on = "the same call of compare"
        if WORDLESS in str(error) and hasattr(sys.modules["__main__"], "__file__"):
            on += "; in a script it has to stand under `if __name__ == '__main__':`"
        raise kind(f"{error} (in Python: {on})") from None


def _check_importable() -> None:
    """Refuse a script that processes could not import, such as one on standard input."""
    script = sys.modules["__main__"]
    file = getattr(script, "__file__", None)
    if file is not None and script.__spec__ is None and not Path(file).is_file():
        raise UserError(
            f"the processes that train import the script that calls compare, and {file} is no file; save the script "
            "as a file, with the call under `if __name__ == '__main__':`"
        )


def _kept(dataset: Dataset, file: Path) -> DataConfig:
    """Where processes read a data set that ``_keep`` has written."""
    if dataset.features is None:
        return DataConfig(dataset=str(file))
    kinds = tuple(f"{column}={kind}" for column, kind in dataset.features.kinds_to_read.items())
    return DataConfig(dataset=str(file), items=(str(file.with_name(FEATURES_FILE)),), item_kinds=kinds)


def _keep(dataset: Dataset, file: Path) -> None:
    """Write a data set where processes read it, unless it is there."""
    if _hashes(dataset, file) == dataset.hashes:
        return
    make_folder(file.parent)
    dataset.save(file)
    if dataset.features is not None:
        dataset.features.save(file.with_name(FEATURES_FILE))
    if _hashes(dataset, file) != dataset.hashes:
        file.unlink()
        raise UserError(
            f"data set {dataset.name!r} has its items in another order than that in which they appear, which a file "
            "does not keep; give the data set that Dataset.from_frame or Dataset.load made"
        )


def _hashes(dataset: Dataset, file: Path) -> dict[str, str] | None:
    """Those of what is kept; None where it is not there, or damaged."""
    try:
        return _kept(dataset, file).load().hashes if file.is_file() else None
    except UserError:
        return None


def _joined(key: str, names: str | Sequence[Any]) -> str:
    if isinstance(names, str):
        return names
    if not isinstance(names, Iterable):
        raise UserError(f"{key} is {names!r}; give a list, or text with commas")
    return ",".join(map(str, names))


def _models(model: str | Sequence[str] | None) -> list[str | None]:
    names: list[str | None] = [None] if model is None else [*(split_list(model) if isinstance(model, str) else model)]
    if not names:
        raise UserError("model is empty; name at least one, or leave it out")
    if len(set(names)) < len(names):
        raise UserError(f"model {model!r} names a model twice; name each once")
    return names


def _settings(settings: Mapping[str, Any]) -> list[str]:
    """Keyword settings as ``key=value``, so that they are those of every run, and an arm's own win; None is none."""
    for key in ("arm", "seed"):
        if settings.get(key) is not None:
            raise UserError(f"{key} is {settings[key]!r}, but a comparison has several; give {key}s")
    texts = []
    for key, value in settings.items():
        if value is None:
            continue
        try:
            text = json.dumps(value, ensure_ascii=False, default=plain)
        except TypeError:
            raise UserError(f"{key} is {value!r}; give a number, text, a list, or a section as a mapping") from None
        texts.append(f"{key}={_NULL.sub(lambda found: found[1], text)}")
    return texts


def _call(arms: str, dataset: Dataset | str | Path | None, named: Mapping[str, Any]) -> str:
    """The call as it is kept beside results, without the places it had on this machine."""
    words = [repr(arms)]
    if dataset is not None:
        words.append(repr(dataset.name if isinstance(dataset, Dataset) else Path(dataset).name))
    hidden = {"config": "FILE", "data_root": "DIR"}
    words += [f"{key}={hidden.get(key, value)!r}" for key, value in named.items() if value is not None]
    return f"recbft.compare({', '.join([*words, 'out=' + repr('OUT')])})"
