"""What a signal is worth: the joined ones beat their parts where they should, and learn nothing from the test."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from benchmarks.study import worth
from recbft.errors import UserError
from recbft.runs.folder import RunFolder


@pytest.fixture
def trained(train_arms):
    return train_arms("matched,bft")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_regression_is_scikit_learn_s(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 3))
    hit = rng.random(300) < 1 / (1 + np.exp(1 - x @ [1.0, -0.5, 0.0]))
    expected = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(x, hit).coef_[0]
    np.testing.assert_allclose(worth.logistic(x, hit), expected, atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_signal_at_its_cap_on_validation_says_nothing_on_the_test(seed):
    rng = np.random.default_rng(seed)
    sample, test = rng.normal(size=(2, 500, 2))
    hit, test_hit = (rng.random(500) < 1 / (1 + np.exp(1 - x[:, 0])) for x in (sample, test))
    capped, free = np.full(500, np.log(1000.0)), np.full(500, np.log(1000.0))
    free[:20] -= 0.01
    found = worth.joined(np.column_stack([sample, capped]), hit, np.column_stack([test, free]), test_hit)
    assert found == pytest.approx(worth.joined(sample, hit, test, test_hit), abs=1e-4)


def test_every_run_of_the_arm_is_judged_and_the_folder_is_not_named(trained, tmp_path, capsys):
    worth.main([str(trained), "--json", str(tmp_path / "worth.json")])
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "worth.json").read_text())["worth"]
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(0 <= row[name] <= 1 for row in rows for name in worth.JOINED)
    assert "| precision adds to all |" in said and "study.worth OUT" in said and str(tmp_path) not in said


def test_runs_of_other_data_than_is_at_hand_are_refused(trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    for file in other.glob("runs/bft-seed*/protocol.json"):
        said = json.loads(file.read_text()) | {"content_hash": "0" * 64}
        file.write_text(json.dumps(said))
        metrics = file.with_name("metrics.json")
        metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"run": RunFolder(file.parent).identity}))
    with pytest.raises(UserError, match="the runs differ in content_hash"):
        worth.main([str(trained), str(other)])
    for path in other.glob("runs/matched-*"):
        shutil.rmtree(path)
    with pytest.raises(UserError, match="was made on 000000000000; name the folder of its data with --data-root"):
        worth.main([str(other)])
    with pytest.raises(UserError, match="arm bft has two runs of seed 0"):
        worth.main([str(trained), str(trained)])


def test_an_arm_without_precision_is_refused(trained):
    with pytest.raises(UserError, match="have no precision; name an arm such as bft"):
        worth.main([str(trained), "--arm", "matched"])
    with pytest.raises(UserError, match="unknown arm 'bfd'"):
        worth.main([str(trained), "--arm", "bfd"])
