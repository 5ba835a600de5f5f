"""The folder of one run: made whole, filled file by file, and finished when ``metrics.json`` stands in it.

    config.yaml       what to do: enough to repeat the run
    protocol.json     how its numbers are made
    environment.json  the day, the versions and the machine's kind
    history.csv       a line per epoch
    checkpoint/       the state after the last epoch, and the best weights
    card.md           what it is, for people, with its figures and their protocol
    per_user.parquet  a rank per user
    metrics.json      written last

Order within an epoch: first the line of ``history.csv``, then the checkpoint. A run killed between the two resumes from
the checkpoint and drops the line.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import secrets
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from recbft.config.yaml_text import read_yaml
from recbft.errors import UserError
from recbft.evaluation.metrics import config_hash, headline_setting
from recbft.evaluation.probability import Calibration
from recbft.runs import checkpoint
from recbft.runs.locks import locked
from recbft.system.files import (
    json_text,
    new_folder,
    read_json,
    remove,
    user_path,
    write_atomic,
    write_json,
    write_parquet,
)
from recbft.system.torchrun import Process

_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{8}\.old")  # a run that is being replaced

Row = dict[str, "int | float | str | None"]


class RunFolder:
    """A run's folder that exists; ``create`` makes one, ``open`` finds one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.protocol_file = path / "protocol.json"
        self.environment_file = path / "environment.json"
        self.history_file = path / "history.csv"
        self.per_user_file = path / "per_user.parquet"
        self.metrics_file = path / "metrics.json"
        self.checkpoint = path / "checkpoint"

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        config: str,
        protocol: Mapping[str, Any],
        environment: Mapping[str, Any],
        overwrite: bool = False,
    ) -> RunFolder:
        """Make the folder with its first three files, all at once; a run that it replaces stands until then.

        Args:
            path: does not exist, or is an empty folder; missing parents are made.
            config: the text of ``config.yaml``.
            protocol, environment: what ``run_protocol`` and ``machine.environment`` return.
            overwrite: put it in the place of a run that stands there.

        Raises:
            UserError: the folder is taken; the message says by what.
            RunError: the disk is full; what was there before is there still.
        """
        run = cls(user_path(path))
        cls.refuse_taken(path, overwrite=overwrite)
        place = run.path.resolve() if run.path.is_symlink() else run.path  # the link stays, and what it leads to is new
        with contextlib.ExitStack() as replacing, new_folder(place) as made:
            new = cls(made)
            new.config_file.write_text(config, encoding="utf-8")
            new.protocol_file.write_text(json_text(protocol), encoding="utf-8")
            new.environment_file.write_text(json_text(environment), encoding="utf-8")
            new.checkpoint.mkdir()
            if overwrite and run.is_run:
                replacing.enter_context(run.locked())
                replacing.enter_context(_put_aside(place))
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run in an existing folder."""
        path = user_path(path)
        if not path.is_dir():
            settle(Path(os.path.realpath(path)).parent)
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}; give the folder that `recbft train` printed")
        run = cls(path)
        if not run.config_file.is_file():
            raise UserError(f"{path} is not a run folder: {run.config_file.name} is missing; give {_runs_in(path)}")
        return run

    @classmethod
    def refuse_taken(
        cls, path: str | Path, *, overwrite: bool = False, remedy: str = "replace it with --overwrite"
    ) -> None:
        """Check that a run can be made here, before any work is done for it; ``overwrite`` allows another run.

        Args:
            remedy: what else than another folder a caller can take where a finished run stands here.

        Raises:
            UserError: something stands here already; where another process trains it, the message says so.
        """
        path = user_path(path)
        settle(Path(os.path.realpath(path)).parent)
        if not os.path.lexists(path):
            return
        if not path.is_dir():
            raise UserError(f"{path} is a file; name another folder for the run")
        run = cls(path)
        if not run.is_run:
            if any(path.iterdir()):
                raise UserError(f"{path} is a folder with other files in it; name another folder for the run")
            return
        if overwrite:
            return
        if run.is_finished:
            raise UserError(f"{path} holds a finished run; name another folder, or {remedy}")
        with run.locked():  # a run in training has not stopped
            epoch = checkpoint.load_state(run.checkpoint).epoch if run.has_checkpoint else 0
        raise UserError(
            f"{path} holds a run that stopped after epoch {epoch}; "
            f"go on with `{run.resume_command}`, or name another folder"
        )

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here: the files that ``create`` makes, all at once, and no mere ``config.yaml``."""
        return self.config_file.is_file() and self.protocol_file.is_file() and self.checkpoint.is_dir()

    @property
    def resume_command(self) -> str:
        """What goes on with this run in a shell, by as many processes as began it."""
        try:
            processes = self.environment.get("processes", 1)
        except UserError:
            processes = 1
        return self.command_to_resume(Process.of(processes))

    def command_to_resume(self, processes: Process) -> str:
        """What goes on with it in a shell, by these processes."""
        return processes.command(f"recbft train --resume {shlex.quote(str(self.path))}")

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end; whatever stands in the metrics' place is refused when it is read."""
        return self.metrics_file.exists()

    @property
    def has_checkpoint(self) -> bool:
        """Whether an epoch has been completed; an unfinished run without one starts from the beginning when resumed."""
        return checkpoint.exists(self.checkpoint)

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.yaml``; UserError if it cannot be read."""
        return dict(read_yaml(self.config_file))

    @property
    def protocol(self) -> dict[str, Any]:
        """The content of ``protocol.json``; UserError if it cannot be read."""
        return _read_json(self.protocol_file)

    @property
    def identity(self) -> str:
        """What its files have in common and those of another run have not: SHA-256 of the protocol.

        Where the data lay, what they were called and how they were made is no part of it; their hashes are.
        """
        protocol = {key: value for key, value in self.protocol.items() if key not in ("dataset", "preparation")}
        return config_hash({**protocol, "config": {**protocol.get("config", {}), "data": None}})

    @property
    def environment(self) -> dict[str, Any]:
        """The content of ``environment.json``; UserError if it cannot be read."""
        return _read_json(self.environment_file)

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of ``metrics.json``; UserError if the run is not finished or the file cannot be read."""
        if not self.is_finished:
            raise UserError(f"{self.path} is not finished; go on with `{self.resume_command}`")
        metrics = _read_json(self.metrics_file)
        run = metrics.pop("run", None)  # None: of a version that did not say it
        if run is not None and run != self.identity:
            raise UserError(
                f"{self.metrics_file} is of another run than {self.protocol_file.name}; put its own file back, or "
                "train again into a new folder"
            )
        return metrics

    def calibration(self, *, filter_seen: bool) -> Calibration | None:
        """What makes probabilities of the model's scores; None of a run that has none, or not yet."""
        known = self.metrics.get("probability") if self.is_finished else None
        try:
            return Calibration(**known[headline_setting(filter_seen)])  # type: ignore[index]
        except (KeyError, TypeError):
            return None

    def locked(self, *, alone: bool = True) -> AbstractContextManager[None]:
        """Keep other processes from training or replacing this run; UserError if one does so now.

        Args:
            alone: none may copy it either, as those do who are not.
        """
        return locked(self.config_file, alone=alone)

    def remove_leftovers(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self.path.glob(".*.tmp"):
            remove(path)

    def record_change(self, epoch: int, changed: Mapping[str, Any]) -> None:
        """Write into ``environment.json``, if it can be read, what was one thing up to an epoch and then another."""
        with contextlib.suppress(UserError):
            earlier = [one for one in self.environment.get("changed", []) if one["after_epoch"] < epoch]
            self.record(changed=[*earlier, {"after_epoch": epoch, **changed}])

    def record(self, **more: Any) -> None:
        """Write more into ``environment.json``; UserError if it cannot be read."""
        write_json(self.environment_file, {**self.environment, **more})

    def finish(self, metrics: Mapping[str, Any], per_user: pd.DataFrame | pa.Table) -> None:
        """Write the ranks, then the metrics, whose file marks the run as finished."""
        write_parquet(self.per_user_file, per_user)
        write_json(self.metrics_file, {**metrics, "run": self.identity})

    def write_history(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rewrite ``history.csv``: one row per epoch, columns in the order in which rows bring them."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        # An epoch's line needs no wait for the disk: it can be lost only together with the checkpoint after it.
        write_atomic(self.history_file, text.getvalue().encode(), durable=False)

    def read_history(self, *, up_to_epoch: int | None = None) -> list[Row]:
        """The rows of ``history.csv``, those after an epoch left out; none before the first epoch's end."""
        if not self.history_file.is_file():
            return []
        with open(self.history_file, encoding="utf-8", newline="") as file:
            try:
                text = file.read()
                if not text.endswith("\n"):
                    raise ValueError("cut off, and with it perhaps a number")
                lines = csv.DictReader(io.StringIO(text), strict=True)
                rows = [{name: _number(text) for name, text in line.items()} for line in lines]
                return [row for row in rows if up_to_epoch is None or int(row["epoch"] or 0) <= up_to_epoch]
            except (csv.Error, KeyError, TypeError, ValueError):
                raise UserError(f"{self.history_file} is damaged; remove it to go on without its rows") from None


@contextlib.contextmanager
def _put_aside(path: Path) -> Iterator[None]:
    """Give the folder a hidden name; it is removed if the block ends well, else it comes back."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    try:
        os.replace(path, aside)
        yield
    except BaseException:
        if not path.exists():
            os.replace(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    if aside.exists():  # a folder that may only be read
        warnings.warn(f"the run that was replaced cannot be removed: {aside}; remove it by hand", stacklevel=2)


def settle(folder: Path) -> None:
    """End what a killed ``--overwrite`` left here: the old run comes back if no new one stands in its place."""
    with contextlib.suppress(OSError):  # there is no such folder, or it may not be changed
        asides = [(aside, found[1]) for aside in folder.iterdir() if (found := _ASIDE.fullmatch(aside.name))]
        for aside, name in asides:
            old, new = RunFolder(aside), RunFolder(folder / name)
            # Whoever is about to replace it has its lock; one half removed has nothing to lock, and none will miss it.
            with contextlib.suppress(UserError), old.locked() if old.is_run else contextlib.nullcontext():
                if new.is_run:
                    shutil.rmtree(aside, ignore_errors=True)
                elif old.is_run and not os.path.lexists(new.path):
                    os.replace(aside, new.path)


def _runs_in(folder: Path) -> str:
    """What to give in the place of a folder that is no run but may hold some, as what ``--out`` names does."""
    runs: list[Path] = []
    for place in (folder, folder / "runs"):
        with contextlib.suppress(OSError):  # there is no such folder, or it may not be read
            runs += sorted(path for path in place.iterdir() if path.name[0] != "." and RunFolder(path).is_run)
    if not runs:
        return "the folder of a run"
    return f"the run in it, {runs[0]}" if len(runs) == 1 else f"one of the {len(runs)} runs in it, such as {runs[0]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; the run folder is incomplete: train again into a new one") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or train into a new folder") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold keys and values; restore it, or train into a new folder")
    return content


def _number(text: str | None) -> int | float | str | None:
    """A cell of ``history.csv`` as what was written; an empty one is None."""
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
