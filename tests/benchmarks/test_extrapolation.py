"""Reading beyond the trained length: who is measured, on what, and that the command repeats itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.mechanisms import extrapolation
from recbft.datasets import SyntheticConfig, synthetic_dataset
from recbft.errors import UserError
from recbft.training.run_config import load_run_config

FAST = ["--set", "hidden_size=8", "--set", "epochs=1", "--trained", "6", "--lengths", "6,12", "--mixers", "rope,rfa"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(extrapolation, "LONG", SyntheticConfig(num_users=60, num_items=120, mean_length=12.0))


def test_a_context_is_the_last_events_before_the_target():
    dataset = synthetic_dataset(SyntheticConfig(num_users=40, num_items=120, mean_length=12.0))
    users = extrapolation.long_histories(dataset, 10)
    assert 0 < len(users) < dataset.num_users
    config = load_run_config(arm="matched", mixer="rope", absolute_positions=False, max_length=5, hidden_size=8)
    model = config.build(torch.from_numpy(np.asarray(dataset.training_counts)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    short, long = (extrapolation.measure(model, dataset, users, length) for length in (5, 10))
    assert short != long
    changed = dataset.items.copy()
    view = extrapolation.view_of(dataset, "test", users)
    for start in view.stop - 10:
        changed[start : start + 5] = changed[start : start + 5][::-1]
    object.__setattr__(dataset, "items", changed)
    assert extrapolation.measure(model, dataset, users, 5) == short
    assert extrapolation.measure(model, dataset, users, 10) != long


def test_the_command_measures_the_same_users_at_every_length_and_repeats_itself(small, tmp_path, capsys):
    found = []
    for name in ("one.json", "two.json"):
        assert extrapolation.main([*FAST, "--json", str(tmp_path / name)]) == 0
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0]["extrapolation"] == found[1]["extrapolation"] and found[0]["users"] > 0
    assert [(row["mixer"], row["length"]) for row in found[0]["extrapolation"]] == [
        ("rope", 6), ("rope", 12), ("rfa", 6), ("rfa", 12),
    ]  # fmt: skip
    assert "last 12" in capsys.readouterr().out


def test_a_length_that_nobody_has_is_refused(small):
    with pytest.raises(UserError, match="no user of 'synthetic' has 5000 events before the target; the most is"):
        extrapolation.main([*FAST[:-4], "--lengths", "5000"])
