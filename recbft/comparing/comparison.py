"""Arms over the same seeds and users, read from run folders and from files of other systems' ranks.

Nothing here needs the data, the model or the machine a run was made on: all follows from ranks, one per user and seed.

Shapes: S seeds, U users, N targets, of which the split may give a user several: a user's value is their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recbft.comparing.external_ranks import ExternalRanks, read_external
from recbft.comparing.finished_runs import OF_MACHINE, Run, by_seed, check_same, config_of, label_runs, read_run
from recbft.errors import UserError, did_you_mean
from recbft.evaluation.metrics import SETTINGS, one_from_ranks
from recbft.experiments.lists import counted, seeds_text
from recbft.experiments.plan import leaves
from recbft.runs.folder import RunFolder
from recbft.system.files import read_json, user_path

COMPARISON_FILE = "comparison.json"
DATA_FILE = "dataset.parquet"  # beside it, or beside those of several models: the data set that a program gave
FEATURES_FILE = "items.parquet"  # beside that, its item features
BASELINE = "matched"  # where it takes part and no other is named
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Arm:
    """One side of a comparison, over the comparison's seeds."""

    name: str
    seeds: tuple[int, ...]
    runs: tuple[Path | None, ...]  # None for external ranks
    ranks: dict[str, IntArray]  # "unfiltered"/"filtered" -> (S, N) ranks of the test targets; absent where not known
    histories: tuple[list[dict[str, Any]], ...]  # rows of history.csv; none for external ranks
    config: dict[str, Any]  # of its first run, see ``config_of``; empty for external ranks
    trained: bool = False  # every seed; neither a file is, nor popularity, which has nothing to learn
    # "unfiltered"/"filtered" -> metric -> (S,) on validation, of the weights tested; where each run says it
    validation: dict[str, dict[str, FloatArray]] = field(default_factory=dict)

    @property
    def has_spread(self) -> bool:
        """Whether its seeds were each trained; what is not may have one set of ranks, which stands for every seed."""
        return self.trained or any((ranks != ranks[0]).any() for ranks in self.ranks.values())


@dataclass(frozen=True, eq=False)
class Comparison:
    """Arms that can be compared: same data, split, vocabulary, ranking, version; same seeds and users."""

    path: Path | None  # the folder it was read from
    protocol: dict[str, Any]  # what all runs share
    users: NDArray[Any]  # (N,) raw ids, those of one user side by side
    training_length: IntArray  # (N,) training events of the user
    target_frequency: IntArray  # (N,) training events of the test target
    target: NDArray[Any]  # (N,) raw ids of the test targets
    arms: dict[str, Arm]
    baseline: str
    seeds: tuple[int, ...]  # common to all arms
    notes: tuple[str, ...]  # what a reader must know: seeds and runs left out, arms that are external or identical
    owner: IntArray | None = None  # (N,) each target's user, as ``over_users`` takes it

    @property
    def num_users(self) -> int:
        """U."""
        return len(self.users) if self.owner is None else int(self.owner[-1]) + 1

    def values(self, arm: str, setting: str, metric: str) -> FloatArray:
        """A metric per seed, (S,); UserError where the arm, setting or metric is unknown or this arm lacks it."""
        values: FloatArray = self._values(arm, setting, metric).mean(axis=1)
        return values

    def per_user(self, arm: str, setting: str, metric: str) -> FloatArray:
        """A metric per user, averaged over seeds, (U,)."""
        values: FloatArray = self._values(arm, setting, metric).mean(axis=0)
        return values

    @property
    def run_folders(self) -> list[Path]:
        """The runs of all arms; external arms have none."""
        return [run for arm in self.arms.values() for run in arm.runs if run is not None]

    def settings(self, *arms: str) -> tuple[str, ...]:
        """The settings ("unfiltered", "filtered") that all of these arms have ranks for."""
        return tuple(setting for setting in SETTINGS if all(setting in self.arms[arm].ranks for arm in arms))

    def _values(self, arm: str, setting: str, metric: str) -> FloatArray:
        if arm not in self.arms:
            raise UserError(f"unknown arm {arm!r}; {did_you_mean(arm, self.arms)}")
        if setting not in self.arms[arm].ranks:
            raise UserError(f"arm {arm} has no {setting} ranks; use {' or '.join(self.arms[arm].ranks)}")
        return one_from_ranks(self.arms[arm].ranks[setting], metric, self.owner)


def comparison_of(
    run_dirs: Sequence[str | Path],
    *,
    baseline: str | None = None,
    external: Mapping[str, str | Path] | None = None,
    names: Mapping[Path, str] | None = None,
    skip_broken: bool = False,
) -> Comparison:
    """The comparison that finished runs and files of ranks make.

    Args:
        baseline: an arm's name; "matched" (of several models the first "MODEL/matched"), else the first arm.
        external: arm name -> file of ranks, see ``external``.
        names: run folder -> arm name; found from the configurations where left out, see ``finished_runs``.
        skip_broken: leave out folders that cannot be read, and say so in the notes.

    Raises:
        UserError: a run is broken, runs cannot be compared, or fewer than two arms or common seeds are there.
    """
    runs, notes = _read(run_dirs, skip_broken)
    if not runs:
        raise UserError("there is no run to compare; give the folders of finished runs")
    check_same(runs)
    grouped = label_runs(runs) if names is None else _grouped(runs, names)
    seeds_of = {name: by_seed(name, group) for name, group in grouped.items()}
    users = runs[0].per_user["user"].to_numpy()
    of_users = runs[0].of_users
    files = {name: read_external(user_path(path), users, of_users["target"], num_items=runs[0].protocol["items"])
             for name, path in (external or {}).items()}  # fmt: skip
    if clash := sorted(set(files) & set(grouped)):
        raise UserError(f"external arm {clash[0]!r} has the name of a trained arm; give it another")
    if len(grouped) + len(files) < 2:
        raise UserError(f"there is one arm, {next(iter(grouped))}; a comparison needs at least 2")
    have = {name: set(each) for name, each in seeds_of.items()}
    of_files = {name: set(file.seeds) for name, file in files.items() if file.seeds is not None}
    seeds, left_out = common_seeds(have, of_files)
    arms = {name: _trained_arm(name, each, seeds) for name, each in seeds_of.items()}
    for name, file in files.items():
        rows = [0] * len(seeds) if file.seeds is None else [file.seeds.index(seed) for seed in seeds]
        ranks = {setting: each[rows] for setting, each in file.ranks.items()}
        arms[name] = Arm(name, seeds, (None,) * len(seeds), ranks, tuple([] for _ in seeds), {})
        notes += _notes_on_file(name, file)
    notes += _notes_on_trainers(grouped)
    chosen = _baseline(baseline, arms)
    _refuse_without_seeds(chosen, arms)
    return Comparison(
        path=None,
        protocol=_shared_protocol(runs, arms, seeds),
        users=users,
        **of_users,
        owner=runs[0].owner,
        arms=arms,
        baseline=chosen,
        seeds=seeds,
        notes=(*notes, *left_out, *_notes_on_settings(grouped), *_notes_on_identical(arms, chosen)),
    )


def load_comparison(path: str | Path) -> Comparison:
    """The comparison in a folder written by ``recbft compare``.

    Raises:
        UserError: there is none, or a run it names has gone or is broken.
    """
    path = user_path(path)
    saved = read_results(path)
    try:
        names = {path / run: name for name, arm in saved["arms"].items() for run in arm["runs"].values()}
        external = {name: path / arm["external"] for name, arm in saved["arms"].items() if arm["external"]}
        baseline, order, notes = saved["baseline"], list(saved["arms"]), tuple(saved["notes"])
    except KeyError:
        raise _damaged(path) from None
    made = comparison_of(list(names), baseline=baseline, external=external, names=names)
    return replace(made, path=path, arms={name: made.arms[name] for name in order}, notes=notes)


def read_results(path: Path) -> dict[str, Any]:
    """The figures in a folder written by ``recbft compare``.

    Raises:
        UserError: there are none, or they are damaged.
    """
    if not (path / COMPARISON_FILE).is_file():
        raise UserError(
            f"{path} holds no {COMPARISON_FILE}; finish the comparison with the command that began it, or make one of "
            f"finished runs: recbft compare RUN_DIR... --out {path}"
        )
    try:
        read: dict[str, Any] = read_json(path / COMPARISON_FILE)
    except ValueError:
        raise _damaged(path) from None
    return read


def _damaged(path: Path) -> UserError:
    file = path / COMPARISON_FILE
    return UserError(f"{file} is damaged; make it again with: recbft compare RUN_DIR... --out {path}")


def _read(run_dirs: Sequence[str | Path], skip_broken: bool) -> tuple[list[Run], list[str]]:
    runs, notes = [], []
    for path in run_dirs:
        try:
            run = read_run(path)
            if skip_broken:
                _ = RunFolder(run.path).environment  # of which results tell
            runs.append(run)
        except UserError as error:
            if not skip_broken:
                raise UserError(f"{error}; `recbft compare --skip-broken` leaves such a run out") from None
            notes.append(f"left out, broken: {error}")
    return runs, notes


def _grouped(runs: Sequence[Run], names: Mapping[Path, str]) -> dict[str, list[Run]]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(names[run.path], []).append(run)
    return grouped


def common_seeds(trained: Mapping[str, set[int]], files: Mapping[str, set[int]]) -> tuple[tuple[int, ...], list[str]]:
    """The seeds that all of these arms have, trained here or in a column of a file, and notes on those left out.

    Raises:
        UserError: fewer than two are common.
    """
    have = {**trained, **files}
    common = set.intersection(*have.values())
    if len(common) < 2:
        each = "; ".join(f"{name} {seeds_text(sorted(seeds)) or 'none'}" for name, seeds in have.items())
        shared = counted(len(common), "seed")
        other = (
            "; or number those of a file anew, or leave its column 'seed' out if its ranks are to stand for every seed"
        )
        raise UserError(
            f"the arms share {shared}, and a comparison needs at least 2 (seeds: {each}); train more seeds"
            f"{other if files else ''}"
        )
    extra = {name: sorted(seeds - common) for name, seeds in have.items()}
    notes = [
        f"seeds not common to all arms are left out: {name} {seeds_text(more)}" for name, more in extra.items() if more
    ]
    return tuple(sorted(common)), notes


def _trained_arm(name: str, runs: Mapping[int, Run], seeds: tuple[int, ...]) -> Arm:
    chosen = [runs[seed] for seed in seeds]
    return Arm(
        name=name,
        seeds=seeds,
        runs=tuple(run.path for run in chosen),
        ranks={setting: np.stack([run.ranks(setting) for run in chosen]) for setting in SETTINGS},
        histories=tuple(run.history for run in chosen),
        config=config_of(chosen),
        trained=all(run.metrics.get("epochs") != 0 for run in chosen),  # what RecBole trained does not say epochs
        validation={setting: _on_validation(chosen, setting) for setting in SETTINGS},
    )


def _on_validation(runs: Sequence[Run], setting: str) -> dict[str, FloatArray]:
    """What all of these runs say of a metric on validation."""
    found = [run.metrics.get("validation", {}).get(setting, {}) for run in runs]
    values = {metric: [one.get(metric) for one in found] for metric in found[0]}
    return {metric: np.array(each) for metric, each in values.items() if all(isinstance(one, float) for one in each)}


def _baseline(name: str | None, arms: Mapping[str, Arm]) -> str:
    if name is not None and name not in arms:
        raise UserError(f"baseline {name!r} is not an arm; {did_you_mean(name, arms)}")
    usual = (arm for arm in arms if arm.rpartition("/")[2] == BASELINE)  # of several models each has its name before
    return name or next(usual, next(iter(arms)))


def _refuse_without_seeds(baseline: str, arms: Mapping[str, Arm]) -> None:
    """Two arms whose ranks hold for all seeds differ alike in each: there is nothing to test over seeds."""
    single = [name for name, arm in arms.items() if not arm.has_spread]
    if baseline in single and len(single) > 1:
        other = next(name for name in single if name != baseline)
        raise UserError(
            f"arms {baseline} and {other} have one set of ranks each, which no test over seeds tells apart; "
            "take a trained arm as --baseline, or give ranks of several seeds (a column seed)"
        )


def _shared_protocol(runs: Sequence[Run], arms: Mapping[str, Arm], seeds: tuple[int, ...]) -> dict[str, Any]:
    """The entries that all runs have, and the settings that all configurations have."""
    first = runs[0].protocol
    shared = {key: value for key, value in first.items() if all(run.protocol.get(key) == value for run in runs)}
    configs = [leaves(run.config) for run in runs]
    same = {key: value for key, value in configs[0].items() if all(c.get(key, c) == value for c in configs)}
    shared.setdefault("max_length", "of each arm")
    shared.setdefault("dataset", "data of several names")
    return shared | {"seed": seeds_text(seeds), "config": same, "arms": list(arms)}


def _notes_on_file(name: str, file: ExternalRanks) -> list[str]:
    notes = [f"arm {name} is external: its ranks come from a file, under a protocol that its maker answers for"]
    if file.seeds is None:
        notes.append(
            f"arm {name} has one set of ranks, used for every seed: its own variation over seeds is not in the tests"
        )
    if file.others:
        notes.append(f"arm {name}: {counted(file.others, 'user')} of its file, not in this comparison, left out")
    if set(file.ranks) == set(SETTINGS):
        worse = int((file.ranks["filtered"] > file.ranks["unfiltered"]).any(axis=0).sum())
        if worse:
            notes.append(
                f"arm {name}: for {counted(worse, 'user')} the rank is worse with seen items masked than among all, "
                "which cannot be unless the target was masked too, or columns changed places"
            )
    return notes


def _notes_on_trainers(grouped: Mapping[str, Sequence[Run]]) -> list[str]:
    """Arms whose epochs and stopping are not what their configuration says."""
    return [
        f"arm {name} was trained by RecBole: a target per row, its own early stopping, and no record of its epochs"
        for name, runs in grouped.items()
        if any(run.trained_by is not None for run in runs)
    ]


def _notes_on_settings(grouped: Mapping[str, Sequence[Run]]) -> list[str]:
    """Settings of training and evaluation, which a reader expects to be equal, where arms differ."""
    configs = {name: leaves(config_of(runs)) for name, runs in grouped.items()}
    keys = dict.fromkeys(
        key for config in configs.values() for key in config if key.startswith(("training.", "evaluation."))
    )
    notes = []
    for key in [*keys, "backbone.max_length", "backbone.show_target_time"]:
        values = {name: config[key] for name, config in configs.items() if key in config}
        if len(set(map(str, values.values()))) > 1:
            kind = "the machine decides" if key in OF_MACHINE else "the arms differ in"
            notes.append(f"{kind} {key}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    return notes


def _notes_on_identical(arms: Mapping[str, Arm], baseline: str) -> list[str]:
    first = arms[baseline].ranks
    return [
        f"arm {name} has the same ranks as {baseline} for every user and seed: the difference is 0 and p is 1"
        for name, arm in arms.items()
        if name != baseline and all(s in first and np.array_equal(first[s], arm.ranks[s]) for s in arm.ranks)
    ]
