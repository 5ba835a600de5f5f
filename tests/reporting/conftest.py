"""A comparison of real runs, small enough to train in seconds, with probes in one arm."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recbft.api import Recommender
from recbft.comparing.comparison import comparison_of
from recbft.datasets.synth import SyntheticConfig, generate
from recbft.experiments.arms import parse_arms
from recbft.experiments.plan import plan
from recbft.reporting.report import make_report
from recbft.system.files import json_text
from recbft.training.one_run import train

SMALL = ("data.time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "device=cpu", "epochs=2")


@pytest.fixture(scope="session")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("report-data") / "tiny.parquet"
    generate(SyntheticConfig(num_users=150, num_items=60, mean_length=7.0, seed=3)).events.to_parquet(path)
    return path


@pytest.fixture(scope="session")
def trained(events, tmp_path_factory):
    """The folder of six finished runs; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("report-runs")
    jobs = plan(
        parse_arms("matched,bft"), (0, 1, 2), out / "runs",
        lambda arm, seed: arm.config(SMALL, dataset=str(events), seed=seed),
    )  # fmt: skip
    for job in jobs:
        train(job.config, job.path)
    for name in ("bft-seed0", "bft-seed1", "matched-seed0"):
        recommender = Recommender.load(out / "runs" / name)
        found = recommender.probe(recommender.config.data.load(), "test")
        (out / "runs" / name / "probe.json").write_text(json_text(found))
    return out


@pytest.fixture(scope="session")
def report(comparison):
    """Of all that ``comparison`` has, with plots."""
    pytest.importorskip("matplotlib")
    return make_report(comparison)


@pytest.fixture
def copied(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "copied"))


@pytest.fixture(scope="session")
def comparison(trained):
    return comparison_of(sorted((trained / "runs").iterdir()))


@pytest.fixture(scope="session")
def with_external(trained, tmp_path_factory):
    """The same with another system's ranks, known with seen items masked only, and the same for every seed."""
    per_user = pd.read_parquet(trained / "runs" / "matched-seed0" / "per_user.parquet")
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("external") / "other.csv"
    pd.DataFrame({"user": per_user["user"], "rank_filtered": rng.integers(1, 40, len(per_user))}).to_csv(file)
    return comparison_of(sorted((trained / "runs").iterdir()), external={"<b>other</b>": file})


def section_of(report, name):
    """A report's section by its name."""
    return next(section for section in report.sections if section.name == name)
