"""Kill a training process at random moments, resume it, and compare the result with that of a run left in peace.

    python -m benchmarks.kill_resume --kills 20

Runs are those of ``recbft train`` and ``recbft train --resume`` in processes of their own, ended by SIGKILL. Three
kinds of moment take turns: any time after the start; a time within the training of a few epochs; and while a state is
being saved. A folder whose run came to its end is compared, and the next kill strikes a new one. Weights, optimiser and
random state, history, ranks and metrics must agree bit for bit; only times may differ. Exit code 1 where they do not.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks import machine
from benchmarks.command import count, finish, parse, recorded, training_parser
from recbft.errors import RunError
from recbft.reporting.tables import text_table
from recbft.runs import checkpoint
from recbft.runs.folder import RunFolder
from recbft.system.files import write_json
from recbft.training.one_run import run_name
from recbft.training.process_settings import chosen_device
from recbft.training.run_config import RunConfig, load_run_config

NAME = "kill_resume"
DEFAULTS = ("epochs=12", "hidden_size=32", "threads=1")
MOMENTS = ("any time", "training", "saving")
RECBFT = (sys.executable, "-c", "import sys; from recbft_cli.main import main; sys.exit(main())")
TIMES = {"seconds", "tokens_per_second", "training_seconds"}  # all that two equal runs may differ in
LOOK_EVERY = 0.0005  # seconds between looks at a folder
CHANGES = 20  # of the checkpoint's folder, a handful per epoch: how many are let pass at most
SAVING_SECONDS = 0.005  # about what is left of a save once its first file has appeared


@dataclass(frozen=True)
class Kill:
    """One life of a training process, cut short."""

    moment: str
    after: float  # seconds from its start
    epoch: int | None  # of the state it left; None before the first
    unfinished_files: int  # left half-written


class Trainer:
    """Starts, kills and resumes runs of one ``recbft train`` command, which makes the folder ``name`` in ``--out``."""

    def __init__(self, command: Sequence[str], name: str, data_root: str | None) -> None:
        self.command, self.name = [*RECBFT, "train", *command], name
        self.data_root = [] if data_root is None else ["--data-root", data_root]

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Train into a folder of ``out``, or go on with what is there."""
        run = out / self.name
        command = [*self.command, "--out", str(out)]
        if run.exists():
            command = [*RECBFT, "train", "--resume", str(run), "--quiet", *self.data_root]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def finish(self, out: Path) -> RunFolder:
        """Train to the end."""
        process = self.start(out)
        try:
            _, complaint = process.communicate()
        finally:
            process.kill()
        if process.returncode != 0:
            raise RunError(
                f"{out / self.name}: training ended with code {process.returncode}: {complaint.decode().strip()}"
            )
        return RunFolder.open(out / self.name)

    def kill(self, out: Path, moment: str, patience: float, chance: random.Random) -> Kill | None:
        """Start, and kill at a moment of this kind, not much later than ``patience``; None where it was done before."""
        began, process = time.perf_counter(), self.start(out)
        run = RunFolder(out / self.name)
        earlier = set(out.rglob("*.tmp"))
        try:
            if moment == "any time":
                _wait(process, chance.uniform(0, patience))
            elif _wait_for_change(process, run.checkpoint, times=chance.randint(1, CHANGES)):
                _wait(process, chance.uniform(0, patience / 8 if moment == "training" else SAVING_SECONDS))
            process.send_signal(signal.SIGKILL)
            after = time.perf_counter() - began
            _, complaint = process.communicate()
        finally:
            process.kill()
        if process.returncode > 0:
            raise RunError(f"{run.path}: training ended with code {process.returncode}: {complaint.decode().strip()}")
        if process.returncode == 0:
            return None
        epoch = checkpoint.load_state(run.checkpoint).epoch if run.has_checkpoint else None
        return Kill(moment, after, epoch, len(set(out.rglob("*.tmp")) - earlier))


def differences(one: RunFolder, other: RunFolder) -> list[str]:
    """What two finished runs differ in, times aside; bit for bit."""
    found = []
    states = [_tensors(run) for run in (one, other)]
    for name in sorted(set(states[0]) | set(states[1])):
        a, b = (state.get(name) for state in states)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape or not _same_bits(a, b):
            found.append(name)
    if _plain_state(one) != _plain_state(other):
        found.append("checkpoint state")
    if _timeless(one.metrics) != _timeless(other.metrics):
        found.append("metrics.json")
    if [_timeless(row) for row in one.read_history()] != [_timeless(row) for row in other.read_history()]:
        found.append("history.csv")
    if not pd.read_parquet(one.per_user_file).equals(pd.read_parquet(other.per_user_file)):
        found.append("per_user.parquet")
    return found


def kill_and_compare(
    trainer: Trainer, expected: RunFolder, folder: Path, *, kills: int, patience: float, chance: random.Random
) -> tuple[list[Kill], int, list[str]]:
    """Strike ``kills`` times; the kills, the number of runs brought to their end, and all differences found."""
    struck: list[Kill] = []
    found: list[str] = []
    runs, out = 0, folder / "killed-0"
    while len(struck) < kills or out.exists():
        out.mkdir(exist_ok=True)
        kill = None
        if len(struck) < kills:
            kill = trainer.kill(out, MOMENTS[len(struck) % len(MOMENTS)], patience, chance)
        if kill is not None:
            struck.append(kill)
            print(
                f"[{len(struck)}/{kills}] killed at {kill.after:.2f} s ({kill.moment}), {_left(kill)}", file=sys.stderr
            )
            if len(struck) < kills:
                continue
        run = RunFolder(out / trainer.name)
        if not run.is_finished:
            run = trainer.finish(out)
        found += [f"{out.name}: {name}" for name in differences(expected, run)]
        runs += 1
        out = folder / f"killed-{runs}"
    return struck, runs, found


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    settings = [*DEFAULTS, *options.settings]
    config = load_run_config(
        None, settings, model=options.model, arm=options.arm, dataset=options.dataset, data_root=options.data_root
    )
    dataset = config.data.load()
    header = machine.header(recorded(NAME, arguments), dataset, device=chosen_device(config.training.device))
    header["threads"] = config.training.threads
    trainer = Trainer(_train_command(config, settings, options), run_name(config, dataset.name), options.data_root)
    with tempfile.TemporaryDirectory(prefix="recbft-kill-resume-") as name:
        folder = Path(name)
        began = time.perf_counter()
        (folder / "expected").mkdir()
        expected = trainer.finish(folder / "expected")
        patience = time.perf_counter() - began
        chance = random.Random(options.seed)
        kills, runs, found = kill_and_compare(
            trainer, expected, folder, kills=options.kills, patience=patience, chance=chance
        )
    header = machine.close(header)
    print("\n".join([*machine.lines(header), "", _table(kills), ""]))
    print(f"{len(kills)} kills in {runs} runs of {patience:.1f} s; ", end="")
    print(f"differences: {', '.join(found)}" if found else "all weights and metrics equal the uninterrupted run's")
    if options.json:
        content = {"kills": [vars(kill) for kill in kills], "runs": runs, "differences": found}
        write_json(options.json, {"benchmark": NAME, **header, **content})
    return 1 if found else 0


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _wait_for_change(process: subprocess.Popen[bytes], folder: Path, *, times: int) -> bool:
    """Wait until files have come or gone in a folder so many times; False where the process ends before."""
    before = _changed(folder)
    while process.poll() is None:
        now = _changed(folder)
        if now != before:
            before, times = now, times - 1
            if times == 0:
                return True
        time.sleep(LOOK_EVERY)
    return False


def _changed(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _tensors(run: RunFolder) -> dict[str, torch.Tensor]:
    """Every tensor of a run's checkpoint by name: last weights, best weights, optimiser, random state."""
    loaded = checkpoint.load(run.checkpoint)
    found: dict[str, torch.Tensor] = {}
    _collect(loaded.model_state, "weights", found)
    _collect(loaded.optimizer_state, "optimiser", found)
    _collect(loaded.rng_state, "random state", found)
    _collect(checkpoint.load_best(run.checkpoint), "best weights", found)
    return found


def _collect(tree: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found[name] = tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _collect(value, f"{name} {key}", found)
    elif isinstance(tree, (list, tuple)):
        for n, value in enumerate(tree):
            _collect(value, f"{name} {n}", found)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes: NaN equals itself, and 0 differs from -0.
    return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def _plain_state(run: RunFolder) -> dict[str, Any]:
    return vars(checkpoint.load_state(run.checkpoint))


def _timeless(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in TIMES}, sort_keys=True)


def _train_command(config: RunConfig, settings: Sequence[str], options: Any) -> list[str]:
    command = ["--model", config.model, "--arm", config.arm, "--dataset", options.dataset, "--quiet"]
    if options.data_root is not None:
        command += ["--data-root", options.data_root]
    for setting in settings:
        command += ["--set", setting]
    return command


def _left(kill: Kill) -> str:
    left = "nothing left" if kill.epoch is None else f"state of epoch {kill.epoch} left"
    return left + (f", {kill.unfinished_files} files half-written" if kill.unfinished_files else "")


def _table(kills: Sequence[Kill]) -> str:
    rows = []
    for moment in MOMENTS:
        chosen = [kill for kill in kills if kill.moment == moment]
        rows.append(
            [
                moment,
                str(len(chosen)),
                str(sum(kill.epoch is None for kill in chosen)),
                str(sum(kill.unfinished_files > 0 for kill in chosen)),
            ]
        )
    return text_table(["moment", "kills", "before any state", "with files half-written"], rows)


def _options(arguments: Sequence[str]) -> Any:
    options = training_parser(
        NAME, "Kill training at random moments, resume, compare with a run left in peace.", dataset="synthetic"
    )
    options.add_argument("--arm", default="bft")
    options.add_argument("--kills", type=count, default=20, metavar="N")
    options.add_argument("--seed", type=int, default=0, help="decides the moments")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
