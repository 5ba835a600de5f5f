"""A comparison of the runs of tests/experiments, with probes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recbft.api import Recommender
from recbft.comparing.comparison import comparison_of
from recbft.reporting.report import make_report
from recbft.system.files import json_text
from tests.experiments.conftest import events, unbound
from tests.experiments.conftest import trained as unprobed

__all__ = ["events", "unprobed"]


@pytest.fixture(scope="session")
def trained(unprobed, tmp_path_factory):
    """The folder of six finished runs, some of them probed; tests that change it work on a copy."""
    out = Path(shutil.copytree(unprobed, tmp_path_factory.mktemp("report") / "runs-of-arms"))
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
    return unbound(shutil.copytree(trained, tmp_path / "copied"))


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
