"""Runs small enough to train in a blink, and comparisons made of them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from recbft.datasets.synth import SyntheticConfig, generate
from recbft.experiments.arms import parse_arms
from recbft.experiments.plan import plan
from recbft.training.one_run import train

SMALL = ("data.time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu", "epochs=2")
ROOT = Path(__file__).resolve().parents[2]
RECBFT = (sys.executable, "-c", "import sys; from recbft_cli.main import main; sys.exit(main())")


@pytest.fixture(scope="session")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("experiment-data") / "tiny.parquet"
    generate(SyntheticConfig(num_users=60, num_items=60, mean_length=7.0, seed=3)).events.to_parquet(path)
    return path


def jobs_of(events, out, arms="matched,bft", seeds=(0, 1), settings=()):
    """The runs of a small experiment."""
    return plan(
        parse_arms(arms), seeds, out / "runs",
        lambda arm, seed: arm.config([*SMALL, *settings], dataset=str(events), seed=seed),
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(events, tmp_path_factory):
    """An experiment's folder with two arms over three seeds, all finished; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("trained")
    for job in jobs_of(events, out, seeds=(0, 1, 2)):
        train(job.config, job.path)
    return out


@pytest.fixture
def copied(trained, tmp_path):
    """The same, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


def runs_in(out, pattern="*"):
    return sorted(out.glob(f"runs/{pattern}-seed*"))


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
