"""The configs that are shipped: every one loads, and one that says it writes the defaults out does."""

from __future__ import annotations

from pathlib import Path

import pytest

from recbft.training.run_config import load_run_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_config_loads_in_every_arm_of_its_model(path):
    config = load_run_config(path)
    for arm in ("published", "matched", "bft"):
        assert load_run_config(path, arm=arm).model == config.model
    if "defaults" in path.read_text().split("model:")[0]:
        assert config == load_run_config(model=config.model)


def test_there_are_some():
    assert len(CONFIGS) >= 5
