"""The published files against figures computed elsewhere: counts, ties, and ranking by popularity.

Needs the files: set RECBFT_DATA_ROOT to their folder.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

from recbft.datasets import Dataset, card, describe, is_available, leave_one_out

ROOT = os.environ.get("RECBFT_DATA_ROOT")
# HR@10, NDCG@10, MRR of the most popular items by training count: nothing masked, then the user's earlier items masked
FIGURES = {
    "ml-1m": ((0.01623, 0.00790, 0.01193), (0.03692, 0.01803, 0.01989)),
    "amazon-beauty": ((0.01064, 0.00509, 0.00540), (0.01096, 0.00526, 0.00553)),
    "amazon-instruments": ((0.07138, 0.03566, 0.03256), (0.07558, 0.03903, 0.03569)),
}
# share of users whose last two events tie, share of test targets never seen in training, both in percent
SHARES = {"ml-1m": (None, 0.00), "amazon-beauty": (43.5, 0.62), "amazon-instruments": (44.2, 2.52)}


@pytest.fixture(params=FIGURES)
def dataset(request):
    if ROOT is None or not is_available(card(request.param)):
        pytest.skip(f"{request.param} is not under RECBFT_DATA_ROOT")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # counts and content hash agree with the card
        return Dataset.load(request.param)


def figures(ranks):
    ndcg = np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0)
    return ((ranks <= 10).mean(), ndcg.mean(), (1 / ranks).mean())


def test_popularity_ranks_give_the_published_figures(dataset):
    test = leave_one_out(dataset).test
    counts = dataset.training_counts
    at_least = np.concatenate([[0], np.cumsum(np.bincount(counts[1:])[::-1])])[::-1]
    ranks = at_least[counts[test.target]]  # items with as many training events or more, the target among them
    owner = np.repeat(np.arange(dataset.num_users), test.stop - test.start)
    history = dataset.items[np.repeat(test.start, test.stop - test.start) + np.arange(len(owner)) - np.repeat(
        np.cumsum(test.stop - test.start) - (test.stop - test.start), test.stop - test.start
    )]  # fmt: skip
    first = np.unique(np.stack([owner, history]), axis=1)
    ahead = (counts[first[1]] >= counts[test.target[first[0]]]) & (first[1] != test.target[first[0]])
    masked = ranks - np.bincount(first[0][ahead], minlength=dataset.num_users)
    unmasked_expected, masked_expected = FIGURES[dataset.name]
    assert [f"{value:.5f}" for value in figures(ranks)] == [f"{value:.5f}" for value in unmasked_expected]
    assert [f"{value:.5f}" for value in figures(masked)] == [f"{value:.5f}" for value in masked_expected]


def test_shares_are_the_published_ones(dataset):
    statistics = describe(dataset)
    tied, unseen = SHARES[dataset.name]
    assert (statistics.tied_last_two is None) == (tied is None)
    assert tied is None or round(100 * statistics.tied_last_two, 1) == tied
    assert round(100 * statistics.unseen_targets, 2) == unseen


@pytest.mark.skipif(not is_available(card("ml-100k")), reason="neither RecBole nor the data root has ml-100k")
def test_the_ml_100k_of_recbole_is_the_one_of_the_card():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = Dataset.load("ml-100k")
    assert (dataset.num_users, dataset.num_items, dataset.num_events) == (943, 1682, 100_000)
    same_user = np.repeat(np.arange(dataset.num_users), dataset.lengths)
    assert (np.diff(dataset.times)[np.diff(same_user) == 0] >= 0).all()
