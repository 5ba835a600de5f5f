"""Arms within strata, on tables small enough to work by hand and beside scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from recbft.errors import UserError
from recbft.evaluation.metrics import one_from_ranks
from recbft.evaluation.paired import SeedComparison, UserComparison, bootstrap_interval, holm, seed_interval
from recbft.evaluation.strata import MIN_HITS, MIN_USERS, item_frequency, p_of, stratify


def within(ranks, *, counts, metric="hr@10", baseline="plain", strata=None):
    strata = item_frequency(counts, sorted(set(counts)), quantiles=2) if strata is None else strata
    target = np.arange(len(counts))
    return stratify(strata, ranks, baseline=baseline, metric=metric, target=target, target_frequency=counts)


def random_ranks(rng, shape):
    return rng.integers(1, 40, shape)


@pytest.mark.parametrize(("seed", "metric"), [(0, "hr@10"), (1, "ndcg@5"), (2, "mrr")])
def test_seeds_are_paired_by_scipys_test_in_each_stratum_and_holm_is_over_the_table(seed, metric):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 30, 80)
    ranks = {arm: random_ranks(rng, (6, 80)) for arm in ("plain", "bft", "other")}
    strata = item_frequency(counts, counts)
    rows = within(ranks, counts=counts, metric=metric, strata=strata)
    expected = []
    for stratum, row in enumerate(rows):
        inside = {
            arm: one_from_ranks(of_arm[:, strata.member == stratum], metric).mean(1) for arm, of_arm in ranks.items()
        }
        for arm in ("bft", "other"):
            test = stats.ttest_rel(inside[arm], inside["plain"])
            assert p_of(row.differences[arm]) == pytest.approx(test.pvalue)
            expected.append(test.pvalue)
        interval = stats.t.interval(0.95, 5, inside["bft"].mean(), stats.sem(inside["bft"]))
        assert row.levels["bft"].interval == pytest.approx(interval)
    assert [row.holm_p[arm] for row in rows for arm in ("bft", "other")] == pytest.approx(holm(expected))


def test_a_single_pair_of_runs_is_compared_over_users():
    rng = np.random.default_rng(0)
    counts = np.repeat([1, 9], 50)
    ranks = {arm: random_ranks(rng, (1, 100)) for arm in ("plain", "bft")}
    for stratum, row in enumerate(within(ranks, counts=counts)):
        found = row.differences["bft"]
        assert isinstance(found, UserComparison) and found.num_users == 50
        inside = {arm: one_from_ranks(of_arm[0, counts == (1, 9)[stratum]], "hr@10") for arm, of_arm in ranks.items()}
        assert found.difference == pytest.approx(inside["bft"].mean() - inside["plain"].mean())
        assert row.levels["bft"].interval == bootstrap_interval(inside["bft"], samples=2000)


def test_one_run_has_levels_with_intervals_and_no_test():
    (row,) = within({"bft": np.arange(1, 51)}, counts=np.ones(50, int), baseline=None)
    low, high = row.levels["bft"].interval
    assert low < row.levels["bft"].mean == 0.2 < high and row.differences == {} and row.holm_p == {}


def test_strata_too_small_say_so_and_why():
    counts = np.array([1] * (MIN_USERS - 1) + [5] * 60)
    hits = np.full(counts.size, 99)
    hits[-MIN_HITS:] = (11, 10, 10, 10, 10)
    few, rare = within({"plain": np.stack([hits, hits]), "bft": np.stack([hits, hits])}, counts=counts)
    assert few.too_small == "29 users"
    assert rare.too_small == "4 hits"
    hits[-MIN_HITS:] = 10
    for seeds in (2, 10, 20):  # means over ten seeds do not sum to whole numbers
        assert within({"plain": np.stack([hits] * seeds)}, counts=counts, baseline=None)[1].too_small == ""
    weak = np.where(hits == 10, 11, hits)
    one, other = within({"plain": np.stack([weak] * 2), "bft": np.stack([hits] * 2)}, counts=counts)
    assert (one.too_small, other.too_small) == ("29 users", ""), "the best arm has hits enough"
    hits[-MIN_HITS + 1 :] = 11
    assert within({"plain": np.stack([hits, hits])}, counts=counts, baseline=None)[1].too_small == "1 hit"


@pytest.mark.parametrize(("metric", "k"), [("hr@5", 5), ("ndcg@20", 20), ("mrr", 10), ("mrr@7", 7)])
def test_hits_are_counted_to_the_metrics_own_cut_off_and_to_ten_where_it_has_none(metric, k):
    for num_users in (MIN_USERS - 1, MIN_USERS):
        for last, said in ((k, ""), (k + 1, "4 hits")):
            ranks = np.full((2, num_users), 99)
            ranks[:, :MIN_HITS] = (1, 1, 1, k, last)
            (row,) = within({"plain": ranks}, counts=np.ones(num_users, int), metric=metric, baseline=None)
            assert row.too_small == (said if num_users == MIN_USERS else "29 users")


def test_constant_metrics_and_single_users_give_no_nan():
    ranks = {"plain": [[99, 99, 99], [98, 98, 98], [97, 97, 97]], "bft": [[97, 97, 97], [98, 98, 98], [99, 99, 99]]}
    for row in within(ranks, counts=[1, 9, 9]):
        found = row.differences["bft"]
        assert isinstance(found, SeedComparison)
        assert (found.difference, found.relative, found.p_t, found.interval) == (0, 0, 1, (0, 0))
        assert row.levels["bft"].interval == (0, 0) and row.holm_p["bft"] == 1
    alone, pair = within({"plain": [[5, 99, 99]], "bft": [[1, 99, 1]]}, counts=[1, 9, 9])
    assert alone.levels["bft"].interval is None and alone.differences == {} and alone.holm_p == {}
    assert pair.differences["bft"].difference == 0.5 and pair.levels["bft"].interval == (0, 1)


def test_what_does_not_fit_together_is_refused():
    for more in ([[1, 2]], [[1, 2, 3], [1, 2, 3]]):
        with pytest.raises(AssertionError, match="seeds in common"):
            within({"plain": [[1, 2], [1, 2]], "bft": more}, counts=[1, 9])
    with pytest.raises(UserError, match="unknown metric 'auc@10'"):
        within({"plain": [[1, 2]]}, counts=[1, 9], metric="auc@10")


def test_a_seed_interval_is_students():
    values = [0.1, 0.2, 0.25]
    assert seed_interval(values) == pytest.approx(stats.t.interval(0.95, 2, np.mean(values), stats.sem(values)))
    assert seed_interval([0.1, 0.3]) == pytest.approx(stats.t.interval(0.95, 1, 0.2, 0.1))
    assert seed_interval([0.1]) is None


def test_one_set_of_ranks_for_all_seeds_has_no_interval():
    rng = np.random.default_rng(0)
    ranks = {"plain": random_ranks(rng, (4, 40)), "file": np.repeat(random_ranks(rng, (1, 40)), 4, axis=0)}
    (row,) = within(ranks, counts=np.ones(40, int))
    assert row.levels["file"].interval is None and row.levels["plain"].interval is not None
    assert row.differences["file"].interval[0] < row.differences["file"].interval[1], "the baseline varies"
