"""The sentence says what the test says, and what could have been found where it says nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from recbft.evaluation.paired import compare_seeds
from recbft.reporting.document import p_text
from recbft.reporting.findings import Finding
from recbft.reporting.verdict import LEVEL, SENTENCES, answer, answers


def finding(baseline, other, *, same=False):
    seeds = compare_seeds(baseline, other)
    return Finding(
        arm="bft", baseline="matched", metric="ndcg@10", setting="unfiltered", same_ranks=same, seeds=seeds, users=None,
        validation="", holm_p=seeds.p_t,
    )  # fmt: skip


def say(baseline, other, **how):
    found = finding(baseline, other, **how)
    return answer(found, "ml-1m", p=found.seeds.p_t)


BASE = np.linspace(0.05, 0.052, 10)


def test_a_gain_is_said_with_its_size_interval_seeds_and_p():
    rng = np.random.default_rng(0)
    other = BASE + 0.001 + rng.normal(0, 0.0005, 10)
    low, high = stats.ttest_rel(other, BASE).confidence_interval(0.95)
    p = stats.ttest_rel(other, BASE).pvalue
    said = say(BASE, other)
    share = 100 / BASE.mean()
    assert said.startswith(
        f"bft is better than matched on ml-1m: {(other - BASE).mean() * share:+.1f} % NDCG@10 (all items), "
        f"95 % interval {low * share:+.1f} to {high * share:+.1f} %, 10 seeds, p "
    )
    assert ("p < 0.001" if p < 0.001 else f"p = {p:.3f}") in said and "Better in" in said
    assert "bft is worse than matched" in say(other, BASE)


def test_of_a_gain_it_is_said_what_the_same_runs_have_on_validation():
    rng = np.random.default_rng(2)
    better, alike = BASE + 0.001 + rng.normal(0, 0.0005, 10), BASE + rng.normal(0, 0.001, 10)
    found = replace(finding(BASE, better), validation="-0.1 % (p = 0.830)")
    said = answer(found, "ml-1m", p=found.seeds.p_t)
    assert said.endswith(" On validation the same runs have -0.1 % (p = 0.830).")
    assert "validation" not in answer(replace(found, validation=""), "ml-1m", p=found.seeds.p_t)
    assert "validation" not in answer(replace(finding(BASE, alike), validation=found.validation), "ml-1m", p=0.5)


def test_no_difference_says_what_would_have_been_found():
    rng = np.random.default_rng(1)
    other = BASE + rng.normal(0, 0.002, 10)
    found = finding(BASE, other)
    effect = 100 * found.seeds.smallest_effect / BASE.mean()
    said = say(BASE, other)
    assert said.startswith("No difference between bft and matched could be shown on ml-1m:")
    assert said.endswith(f"with 10 seeds an effect of {effect:.1f} % would have been found with 80 % power.")


@pytest.mark.parametrize(("p", "shown"), [(0.0499, True), (0.05, False), (0.06, False)])
def test_a_difference_is_shown_where_the_adjusted_p_is_below_the_level(p, shown):
    found = finding(BASE, BASE + np.random.default_rng(1).normal(0.001, 0.002, 10))
    said = answer(found, "ml-1m", p=p, num_arms=2)
    assert said.startswith("bft is better" if shown else "No difference")
    assert f"p = {p_text(p)} (Holm over 2 arms; {p_text(found.seeds.p_t)} by itself)" in said
    alone = answer(found, "ml-1m", p=found.seeds.p_t, num_arms=2)
    assert f"p = {found.seeds.p_t:.3f} (Holm over 2 arms)" in alone and "by itself" not in alone


@pytest.mark.parametrize(("n", "reaches"), [(5, False), (6, True)])
def test_six_seeds_are_the_fewest_that_sign_flips_can_be_sure_with(n, reaches):
    said = answer(finding(BASE[:n], BASE[:n] + 1e-3 * np.arange(1, n + 1)), "ml-1m", p=0.01)
    assert said.endswith(f"Better in {n} of {n} seeds; exact sign-flip p = 0.031.") == reaches
    assert (f"p = 0.062, and {n} seeds cannot bring it below 0.0625: take more seeds" in said) != reaches


@pytest.mark.parametrize(("n", "how"), [(20, "exact"), (21, "sampled")])
def test_sign_flips_are_called_exact_where_they_are(n, how):
    rng = np.random.default_rng(0)
    base = rng.normal(0.05, 0.001, n)
    said = answer(finding(base, base + rng.normal(0, 0.001, n)), "ml-1m", p=0.04)
    assert f"; {how} sign-flip p = " in said and f": the {how} test does not show it." in said


def test_few_seeds_are_not_oversold():
    said = say([0.05, 0.051, 0.052], [0.0521, 0.053, 0.0541])
    assert "bft is better" in said
    assert "exact sign-flip p = 0.250, and 3 seeds cannot bring it below 0.25: take more seeds" in said


def test_where_the_two_tests_disagree_it_is_said():
    d = np.array([1, 1, 1, 1, 1, 1, -0.6, -0.5]) * 1e-3
    found = finding(np.full(8, 0.05), 0.05 + d)
    said = answer(found, "ml-1m", p=0.04)
    assert "the exact test does not show it" in said


def test_identical_arms_are_called_so():
    assert say(BASE, BASE, same=True) == (
        "bft and matched rank every target of ml-1m alike in every seed: difference 0, p = 1, nothing to tell apart."
    )
    equal = say(BASE, BASE)  # equal metrics from other ranks
    assert "No difference" in equal and "nan" not in equal
    assert "0.0 % NDCG@10 (all items), the same in every seed and so without an interval, p by sign flips" in equal
    assert "95 % interval" not in equal and "would have been found" not in equal


@pytest.mark.parametrize("n", [3, 10])
def test_the_same_difference_in_every_seed_has_no_interval_and_no_power(n):
    said = say(BASE[:n], BASE[:n] + 5e-4)
    share = 100 * 5e-4 / BASE[:n].mean()
    assert (
        f"{share:+.1f} % NDCG@10 (all items), the same in every seed and so without an interval, p by sign fl" in said
    )
    assert ("p = 0.250." in said and "No difference" in said) if n == 3 else "bft is better" in said
    assert "95 % interval" not in said and "80 % power" not in said


def test_an_end_of_the_interval_that_rounds_to_zero_keeps_its_side():
    d = np.array([1, 3.5, 1, 2.5, 1, 3.25, 2, 2.25]) * 1e-5  # from 0.024 to 0.055 % of the baseline
    assert "95 % interval +0.0 to +0.1 %" in say(np.full(8, 0.05), 0.05 + d)
    assert "95 % interval -0.1 to -0.0 %" in say(np.full(8, 0.05), 0.05 - d)


def test_a_baseline_of_zero_is_compared_in_the_metrics_own_unit():
    said = say([0.0, 0.0, 0.0], [0.01, 0.012, 0.011])
    assert "+0.0110 NDCG@10" in said and "interval +0.0085 to +0.0135" in said and "%, 3 seeds" not in said
    neither = say([0.0] * 3, [0.0] * 3)
    assert "No difference" in neither and "0.0 % NDCG@10 (all items), the same in every seed" in neither


@pytest.mark.parametrize("num_arms", [1, 3])
def test_several_arms_are_adjusted_and_the_p_alone_is_said_too(num_arms):
    rng = np.random.default_rng(2)
    found = finding(BASE, BASE + 0.0005 + rng.normal(0, 0.0006, 10))
    said = answers([(found, min(1.0, num_arms * found.seeds.p_t))] * num_arms, "ml-1m")
    assert len(said) == num_arms
    assert ("Holm over 3 arms" in said[0]) == (num_arms == 3)


def test_what_could_have_been_found_is_said_of_the_test_that_it_holds_for():
    found = finding(BASE, BASE + np.random.default_rng(1).normal(0, 0.002, 10))
    (one,), several = answers([(found, found.seeds.p_t)], "ml-1m"), answers([(found, 1.0)] * 2, "ml-1m")
    assert one.endswith("with 80 % power.")
    assert all(said.endswith("with 80 % power by a test alone, without Holm's adjustment.") for said in several)


@pytest.mark.parametrize("better", [(), (2,), (0, 5)])
def test_of_many_arms_those_of_which_something_is_shown_have_a_sentence_each_and_the_others_share_one(better):
    noise = np.random.default_rng(4).normal(0, 0.002, (SENTENCES + 1, 10))
    arms = [BASE + noise[n] + 0.02 * (n in better) for n in range(SENTENCES + 1)]
    found = [(replace(finding(BASE, arm), arm=f"bft{n}"), LEVEL * (n not in better)) for n, arm in enumerate(arms)]
    few, many = answers(found[:-1], "ml-1m"), answers(found, "ml-1m")
    assert len(few) == SENTENCES and len(many) == len(better) + 1
    assert [said.split()[0] for said in many[:-1]] == [f"bft{n}" for n in better]
    rest = [n for n in range(SENTENCES + 1) if n not in better]
    least, most = (pick(rest, key=lambda n: found[n][0].seeds.difference) for pick in (min, max))
    share = {n: f"{100 * found[n][0].seeds.difference / BASE.mean():+.1f} % (bft{n})" for n in rest}
    assert many[-1] == (
        f"No difference from matched could be shown on ml-1m for {len(rest)} of {SENTENCES + 1} arms: "
        f"{share[least]} to {share[most]} NDCG@10 (all items), 10 seeds, smallest p = 0.050 (Holm over "
        f"{SENTENCES + 1} arms). What each could have shown is under Metrics."
    )
