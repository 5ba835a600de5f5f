"""The uncertainty report against the same figures made from full score tables."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn.metrics import roc_auc_score

from recbft.datasets import leave_one_out
from recbft.errors import RunError
from recbft.evaluation.evaluate import evaluate
from recbft.evaluation.probability import calibrations
from recbft.evaluation.uncertainty import uncertainty
from recbft.models import Popularity
from recbft.models.contract import read_histories
from recbft.system.files import json_text


@pytest.fixture(scope="module")
def large(lab):
    return lab.make_dataset(num_users=150, num_items=60, seed=3)


def tables(model, dataset, part):
    """Scores (N, V), precision (N,) or None, and 0-based targets."""
    view = getattr(leave_one_out(dataset), part)
    with torch.no_grad():
        (batch,) = read_histories(model, dataset.items, view.start, view.stop, times=dataset.times, source="")
        states, precision = model.user_states(batch)
        weight, bias = model.item_table()
        scores = states @ weight[1:].T + (0 if bias is None else bias[1:])
    return scores.numpy(), None if precision is None else precision.numpy(), view.target - 1


def probabilities(scores, calibration, when):
    if when == "before":
        return special.softmax(scores, axis=1)
    lapse = calibration["lapse"]
    return (1 - lapse) * special.softmax(scores / calibration["temperature"], axis=1) + lapse / scores.shape[1]


@pytest.mark.parametrize("part", ["test", "validation"])
def test_every_figure_is_that_of_the_full_score_table(lab, large, arm, part):
    model = lab.make_model(large, *arm)
    found = uncertainty(model, large, part, samples=30, memory_mb=0.01)
    scores, precision, target = tables(model, large, part)
    hit = (scores >= scores[np.arange(150), target][:, None]).sum(axis=1) <= 10
    assert found["hit_rate"] == hit.mean() == evaluate(model, large, part, ks=(10,)).metrics["unfiltered"]["hr@10"]
    p = special.softmax(scores, axis=1)
    view = getattr(leave_one_out(large), part)
    confidences = {
        "negative_entropy": -stats.entropy(p, axis=1), "history_length": view.stop - view.start,
        "top_probability": p.max(axis=1), "top_10_probability": np.sort(p, axis=1)[:, -10:].sum(axis=1),
    }  # fmt: skip
    if precision is not None:
        confidences["precision"] = precision
    assert set(found["confidences"]) == set(confidences)
    for name, values in confidences.items():
        assert found["confidences"][name]["auroc"] == pytest.approx(roc_auc_score(hit, values), abs=1e-9), name
    calibration = found["calibration"]
    for when in ("before", "after"):
        p = probabilities(scores, calibration, when)
        assert calibration["nll"][when] == pytest.approx(-np.log(p[np.arange(150), target]).mean(), rel=1e-9)
        claimed = np.sort(p, axis=1)[:, -10:].sum(axis=1).mean()
        assert calibration[when]["hit@10"]["mean_probability"] == pytest.approx(claimed, rel=1e-9)
        assert calibration[when]["hit@10"]["hit_rate"] == hit.mean()
    assert calibration["nll"]["uniform"] == math.log(60)


def test_the_interval_of_the_likelihood_loss_is_that_of_a_mean_over_users(lab, large):
    model = lab.make_model(large)
    found = uncertainty(model, large, samples=4000)["calibration"]
    scores, _, target = tables(model, large, "test")
    for when in ("before", "after"):
        nll = -np.log(probabilities(scores, found, when)[np.arange(150), target])
        half = 1.96 * nll.std() / math.sqrt(150)
        interval = (nll.mean() - half, nll.mean() + half)
        assert found["nll"][f"{when}_interval"] == pytest.approx(interval, abs=0.2 * half)


def test_what_is_judged_are_the_probabilities_that_lists_have_whatever_the_part(lab, large):
    model = lab.make_model(large)
    test, validation = (uncertainty(model, large, part, samples=5)["calibration"] for part in ("test", "validation"))
    of_lists = calibrations(model, large)["unfiltered"]
    assert {name: test[name] for name in of_lists} == of_lists == {name: validation[name] for name in of_lists}
    assert test["fitted_on"] == "validation" and validation["nll"]["after"] <= validation["nll"]["before"]


def test_a_posterior_that_is_all_at_the_cap_says_nothing_and_the_report_says_so(lab, large):
    model = lab.make_model(large, core={"lam_max": 0.5, "process_noise": False})
    found = uncertainty(model, large, samples=20)
    assert found["saturation"] == {"cap": 0.5, "coordinates": 1.0, "users": 1.0, "num_distinct": 1}
    assert found["confidences"]["precision"]["auroc"] == 0.5
    assert found["confidences"]["precision"]["verdict"] == "the same for every user, so it tells nothing: AUROC 0.5"


@pytest.mark.parametrize("n_layers", [1, 3])
def test_saturation_counts_coordinates_and_whole_users_of_the_last_layer(lab, large, n_layers):
    model = lab.make_model(large, core={"lam_max": 6.0, "process_noise": False}, n_layers=n_layers)
    found = uncertainty(model, large, samples=5)["saturation"]
    with torch.no_grad():
        view = leave_one_out(large).test
        (batch,) = read_histories(model, large.items, view.start, view.stop, source="")
        last = model.encode(batch).precision.flatten(0, 1)[batch.last]
    assert 0 < found["coordinates"] == pytest.approx((last >= 6.0).double().mean().item())
    assert found["users"] == (last >= 6.0).all(dim=1).double().mean().item()


def test_arms_without_precision_have_the_baselines_and_no_saturation(lab, large):
    found = uncertainty(lab.make_model(large, "hstu", "matched"), large, samples=5)
    assert found["saturation"] is None and "precision" not in found["confidences"]
    assert all("reference_above" not in row for row in found["confidences"].values())


@pytest.mark.parametrize(("kind", "learned"), [("temperature", 0.7), ("shrinkage", 0.5)])
def test_how_scores_read_the_precision_is_told(lab, large, kind, learned):
    model = lab.make_model(large, core={"read_out": kind})
    model.precision_read_out.strength.data.fill_(0.7 if kind == "temperature" else math.log(0.5))
    assert uncertainty(model, large, samples=1)["read_out"] == {"kind": kind, "learned": pytest.approx(learned)}
    assert uncertainty(lab.make_model(large), large, samples=1)["read_out"] is None


def test_popularity_knows_nothing_of_users(large):
    found = uncertainty(Popularity(large.training_counts), large, samples=20)
    for name in ("negative_entropy", "top_probability", "top_10_probability"):
        assert found["confidences"][name]["auroc"] == 0.5 and found["confidences"][name]["num_distinct"] == 1
    assert found["calibration"]["nll"]["after"] < found["calibration"]["nll"]["before"]


def test_some_users_are_judged_as_they_would_be_alone(lab, large):
    model = lab.make_model(large)
    users = np.array([3, 7, 50, 99, 120])
    found = uncertainty(model, large, users=users, samples=5)
    scores, _, target = tables(model, large, "test")
    p = special.softmax(scores, axis=1)
    assert found["num_users"] == found["calibration"]["fitted_users"] == 5
    assert found["calibration"]["nll"]["before"] == pytest.approx(-np.log(p[users, target[users]]).mean())


def test_one_user_is_enough_for_a_report(lab, large):
    found = uncertainty(lab.make_model(large), large, users=np.array([5]), samples=5)
    assert found["confidences"]["precision"]["auroc"] is None
    assert found["random_aurc"] == found["optimal_aurc"] == 1 - found["hit_rate"]
    assert '_interval": [' not in json_text(found) and found["calibration"]["after"]["hit@10"]["interval"] is None
    assert found["intervals"].endswith("resamples of the users; none of one user")


def test_intervals_of_fewer_users_than_a_stratum_needs_are_said_to_be_too_narrow(lab, large):
    model = lab.make_model(large)
    few, enough = (uncertainty(model, large, users=np.arange(n), samples=5)["intervals"] for n in (29, 30))
    assert few == f"{enough}; too narrow with 29 users, 30 are the fewest, as in strata"


@pytest.mark.parametrize("users", [None, np.array([7, 3])])
def test_broken_weights_are_an_error_that_names_the_user(lab, large, users):
    model = lab.make_model(large)
    with torch.no_grad():
        model.item_table().weight.fill_(torch.nan)
    first = large.user_ids[0 if users is None else 7]
    with pytest.raises(RunError, match=f"first for user '{first}'"):
        uncertainty(model, large, users=users, samples=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_changes_nothing_but_rounding_and_the_report_is_plain_json(lab, large, arm, dtype):
    model = lab.make_model(large, *arm).to(dtype).train()
    one, two = (uncertainty(model, large, samples=5, memory_mb=memory) for memory in (256, 0.01))
    assert json.loads(json_text(one)) == one and model.training
    for name in ("temperature", "lapse"):
        assert one["calibration"][name] == pytest.approx(two["calibration"][name], rel=1e-2)
    for name, row in one["confidences"].items():
        assert row["auroc"] == pytest.approx(two["confidences"][name]["auroc"], abs=1e-3)
