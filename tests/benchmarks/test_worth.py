"""What a signal is worth: the joined ones beat their parts where they should, and learn nothing from the test."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from benchmarks.study import worth
from recbft.datasets import SyntheticConfig, synthetic_dataset
from recbft.errors import UserError
from recbft.experiments.arms import parse_arms
from recbft.experiments.plan import plan
from recbft.training.session import train


@pytest.fixture
def trained(tmp_path):
    events = tmp_path / "events.csv"
    dataset = synthetic_dataset(SyntheticConfig(num_users=80, num_items=60, mean_length=7.0))
    users = np.repeat(dataset.user_ids, np.diff(dataset.offsets))
    lines = [f"{user},{item},{n}" for n, (user, item) in enumerate(zip(users, dataset.items, strict=True))]
    events.write_text("\n".join(["user_id,item_id,timestamp", *lines]))
    settings = ["data.time=timestamp", "hidden_size=8", "max_length=10", "batch_size=32", "epochs=2"]

    def configure(arm, seed):
        return arm.config(settings, dataset=str(events), seed=seed)

    for job in plan(parse_arms("matched,bft"), [0, 1], tmp_path / "out" / "runs", configure):
        train(job.config, job.path)
    return tmp_path / "out"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_auroc_and_the_regression_are_scikit_learn_s(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 3))
    hit = rng.random(300) < 1 / (1 + np.exp(1 - x @ [1.0, -0.5, 0.0]))
    values = np.round(x[:, 0], 1)  # with ties
    assert worth.auroc(values, hit) == pytest.approx(roc_auc_score(hit, values))
    expected = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(x, hit).coef_[0]
    np.testing.assert_allclose(worth.logistic(x, hit), expected, atol=1e-3)
    assert np.isnan(worth.auroc(values, np.ones(300, bool)))


def test_every_run_of_the_arm_is_judged_and_the_folder_is_not_named(trained, tmp_path, capsys):
    worth.main([str(trained), "--json", str(tmp_path / "worth.json")])
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "worth.json").read_text())["worth"]
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(0 <= row[name] <= 1 for row in rows for name in worth.JOINED)
    assert "| precision adds to all |" in said and "study.worth OUT" in said and str(tmp_path) not in said


def test_an_arm_without_precision_is_refused(trained):
    with pytest.raises(UserError, match="have no precision; name an arm such as bft"):
        worth.main([str(trained), "--arm", "matched"])
    with pytest.raises(UserError, match="unknown arm 'bfd'"):
        worth.main([str(trained), "--arm", "bfd"])
