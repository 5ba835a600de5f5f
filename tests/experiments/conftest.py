"""Runs small enough to train in a blink, and comparisons made of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recbft.datasets.synth import SyntheticConfig, generate
from recbft.experiments.plan import parse_arms, plan
from recbft.training.one_run import train

SMALL = ("data.time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu", "epochs=2")
ROOT = Path(__file__).resolve().parents[2]
RECBFT = (sys.executable, "-c", "import sys; from recbft_cli.main import main; sys.exit(main())")


_MADE = {}  # by name, once whichever folder of tests asks for it


def jobs_of(events, out, arms="matched,bft", seeds=(0, 1), settings=()):
    """The runs of a small experiment."""
    return plan(
        parse_arms(arms), seeds, out / "runs",
        lambda arm, seed: arm.config([*SMALL, *settings], dataset=str(events), seed=seed),
    )  # fmt: skip


@pytest.fixture(scope="session")
def events(tmp_path_factory):
    if "events" not in _MADE:
        _MADE["events"] = path = tmp_path_factory.mktemp("experiment-data") / "tiny.parquet"
        generate(SyntheticConfig(num_users=60, num_items=60, mean_length=7.0, seed=3)).events.to_parquet(path)
    return _MADE["events"]


@pytest.fixture(scope="session")
def trained(events, tmp_path_factory):
    """An experiment's folder with two arms over three seeds, all finished; tests that change it work on a copy."""
    if "trained" not in _MADE:
        _MADE["trained"] = out = tmp_path_factory.mktemp("trained")
        for job in jobs_of(events, out, seeds=(0, 1, 2)):
            train(job.config, job.path)
    return _MADE["trained"]


@pytest.fixture
def copied(trained, tmp_path):
    """The same, to be changed."""
    return unbound(shutil.copytree(trained, tmp_path / "copied"))


def unbound(out):
    """Runs whose metrics do not say of which run they are, as those of an earlier version: protocols can be changed."""
    for file in Path(out).glob("runs/*/metrics.json"):
        metrics = json.loads(file.read_bytes())
        del metrics["run"]
        file.write_text(json.dumps(metrics))
    return Path(out)


def runs_in(out, pattern="*"):
    return sorted(out.glob(f"runs/{pattern}-seed*"))


def wait_for(condition, seconds=240):  # a new session may get a tenth of a busy machine
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def begin(words):
    """A command in a process and session of its own, which hears Ctrl-C whatever the shell of the tests ignores."""
    return subprocess.Popen(
        [*RECBFT, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


class Watch:
    """Remembers what a queue says."""

    def __init__(self):
        self.said, self.most = [], 0

    def start(self, total, finished):
        self.said.append(f"{finished} of {total}")

    def look(self, running, waiting):
        self.most = max(self.most, len(running))

    def finished(self, job, seconds):
        self.said.append(f"finished {job.path.name}")

    def failed(self, failure):
        self.said.append(f"failed {failure.job.path.name}: {failure.reason}")

    def note(self, message):
        self.said.append(message)

    def stop(self):
        self.said.append("stop")
