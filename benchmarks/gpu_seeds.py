"""Twenty seeds of each arm trained together, on generated histories as many and as short as those of Amazon Beauty.

    python -m benchmarks.gpu_seeds ARM        one arm, in this process; prints a line of JSON

``benchmarks.gpu_suite`` has both arms trained at once, a process each, as ``recbft compare --jobs 2 --batch-seeds 20``
does: while a GPU waits for one of them it serves the other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.command import finish, parser
from benchmarks.gpu_steps import histories
from benchmarks.sheltered import Row
from recbft.experiments.arms import parse_arms
from recbft.training import one_run
from recbft.training.many_seeds import train_seeds
from recbft.training.progress import Silent

NAME = "gpu_seeds"
ARMS = ("matched", "bft")
PATIENCE = 110.0  # seconds that an arm may take


class _Watch(Silent):
    """When the epochs of a run were over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def epoch(self, row: Mapping[str, object]) -> None:
        self.ends.append(time.perf_counter())


def side_by_side(device: str, *, small: bool) -> Iterator[Row]:
    """What ``measure`` finds of both arms, trained at the same time; RuntimeError where a process fails."""
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--device", device, *(["--small"] if small else [])]
    began = time.monotonic()
    working = [subprocess.Popen([*command, arm], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for arm in ARMS]
    try:
        for process in working:
            said, error = process.communicate(timeout=max(1.0, began + PATIENCE - time.monotonic()))
            if process.returncode:
                raise RuntimeError(error.decode(errors="replace").strip()[-300:])
            yield json.loads(said.splitlines()[-1])
    finally:
        for process in working:
            process.kill()
            process.communicate()


def measure(arm: str, device: str, *, small: bool) -> Row:
    """Seconds of an epoch of all seeds with what follows it, and of training alone beside one seed trained alone.

    A hundred epochs take what these took and more of the same. The first losses say how far the two ways are apart;
    on a GPU their dropout differs.
    """
    number, epochs, users, items = (2, 2, 60, 400) if small else (20, 3, 22_363, 12_101)
    dataset = histories(users, items, mean_length=8.9)
    settings = [f"epochs={epochs}", "patience=100", f"device={device}", *(["hidden_size=16"] if small else [])]
    config = parse_arms(arm)[0].config(settings, model="sasrec", dataset="synthetic")
    configs = [replace(config, seed=seed) for seed in range(number)]
    watches = [_Watch() for _ in configs]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        runs = train_seeds(configs, [Path(folder) / str(n) for n in range(number)], dataset=dataset, progresses=watches)
        whole = time.perf_counter() - began
        rows = [run.read_history() for run in runs]
        alone = one_run.train(configs[0], Path(folder) / "alone", dataset=dataset).read_history()
    ends = [max(watch.ends[epoch] for watch in watches) for epoch in range(epochs)]
    epoch_s = (ends[-1] - ends[0]) / (epochs - 1)  # the first compiles what it is the first to call
    training_s, alone_s = (
        statistics.median(sum(float(own[epoch]["seconds"]) for own in each) for epoch in range(1, epochs))
        for each in (rows, [alone])
    )
    return {
        "arm": arm,
        "seeds": number,
        "epoch_s": epoch_s,
        "training_s": training_s,
        "alone_s": alone_s,
        "x_alone": training_s / alone_s,
        "minutes_of_100_epochs": (whole + (100 - epochs) * epoch_s) / 60,
        "loss_apart": abs(float(rows[0][0]["loss"]) / float(alone[0]["loss"]) - 1),
    }


def main(arguments: Sequence[str]) -> int:
    options = parser(NAME, (__doc__ or "").split("\n")[0])
    options.add_argument("arm", help="such as bft")
    options.add_argument("--device", default="cuda")
    options.add_argument("--small", action="store_true", help="two seeds of a small model on few histories")
    chosen = options.parse_args(arguments)
    print(json.dumps(measure(chosen.arm, chosen.device, small=chosen.small)))
    return 0


if __name__ == "__main__":
    finish(main)
