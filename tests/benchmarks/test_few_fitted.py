"""Probabilities fitted on few users, judged by others, with the prior and without."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import special

from benchmarks.study import few_fitted
from recbft import Recommender
from recbft.datasets import leave_one_out
from recbft.evaluation.probability import fit
from recbft.models.contract import ItemTable


def test_those_who_judge_are_every_second_user_and_took_no_part_in_the_fit(train_arms, tmp_path, capsys):
    folder = train_arms("bft")
    few_fitted.main([str(folder), "--users", "2,5000", "--draws", "2", "--json", str(tmp_path / "found.json")])
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())["few_fitted"]
    assert "study.few_fitted OUT" in said and [row["seed"] for row in rows] == [0, 1]
    assert said.count("| all items |") == said.count("| items not seen |") == 3 and " of 2 |" in said
    recommender = Recommender.load(folder / "runs" / "bft-seed0")
    dataset = recommender.own_dataset()
    view = leave_one_out(dataset).validation
    histories = {
        user: dataset.decode(dataset.items[start:stop]).tolist()
        for user, start, stop in zip(dataset.user_ids.tolist(), view.start, view.stop, strict=True)
    }
    users, items = recommender.user_vectors(histories).vectors, recommender.item_vectors()
    vectors = np.concatenate([items.vectors[:1], items.vectors[np.argsort(dataset.encode(items.items))]])
    table = ItemTable(torch.from_numpy(vectors), None)
    scores, own = (users @ vectors[1:].T)[1::2], view.target[1::2] - 1
    trained = special.softmax(scores, axis=1)[np.arange(len(own)), own]
    assert rows[0]["all items"]["as trained"]["with the prior"] == pytest.approx(-np.log(trained).mean(), rel=1e-4)
    for name, prior in few_fitted.WAYS.items():
        temperature, lapse = fit(torch.from_numpy(users[::2]), table, view.target[::2], prior=prior)
        p = (1 - lapse) * special.softmax(scores / temperature, axis=1) + lapse / scores.shape[1]
        expected = -np.log(p[np.arange(len(own)), own]).mean()
        assert rows[0]["all items"]["5000"][name] == pytest.approx(expected, rel=1e-3)
