"""The answer says what the test says, and what could have been found where it says nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from recbft.evaluation.paired import compare_seeds
from recbft.reporting.comparison_tables import Finding
from recbft.reporting.tables import p_text
from recbft.reporting.verdict import LEVEL, SENTENCES, answer, answers, terms

BASE = np.linspace(0.05, 0.052, 10)


def finding(baseline, other, arm="bft"):
    seeds = compare_seeds(baseline, other)
    return Finding(
        arm=arm, baseline="matched", metric="ndcg@10", setting="unfiltered", seeds=seeds, users=None, validation=None,
        holm_p=seeds.p_t,
    )  # fmt: skip


def arms(ours=0.111, theirs=0.109, seconds=(3.0, 2.0)):
    levels = {"bft": (ours, seconds[0]), "matched": (theirs, seconds[1])}
    return {
        name: {"metrics": {"unfiltered": {"ndcg@10": {"mean": 0.05}, "hr@10": {"mean": hits}}}, "training_seconds": [s]}
        for name, (hits, s) in levels.items()
    }


def say(baseline, other, known=None, p=None, **how):
    found = finding(baseline, other)
    return answer(found, "ml-1m", known or {}, p=found.seeds.p_t if p is None else p, **how)


def noisy(seed, shift=0.0, sd=0.0005):
    return BASE + shift + np.random.default_rng(seed).normal(0, sd, 10)


def test_a_gain_is_one_sentence_for_everyone_and_evidence_for_the_curious():
    other = noisy(0, 0.001)
    said = say(BASE, other, arms())
    assert said.sentence == (
        "bft ranks better than matched on ml-1m: it finds the next item in its top ten for 11.1 % of users, matched "
        "for 10.9 %; with 10 repeats this is unlikely to be luck."
    )
    assert said.advice == "use bft, if a gain of this size is worth training 1.5 times as long."
    assert say(BASE, other, arms(seconds=(2.0, 2.0))).advice == "use bft; training takes no longer."
    low, high = stats.ttest_rel(other, BASE).confidence_interval(0.95)
    p, share = stats.ttest_rel(other, BASE).pvalue, 100 / BASE.mean()
    assert said.evidence.startswith(
        f"{(other - BASE).mean() * share:+.1f} % NDCG@10 (all items), "
        f"95 % interval {low * share:+.1f} to {high * share:+.1f} %, 10 seeds, p {'< 0.001' if p < 0.001 else ''}"
    )
    worse = say(other, BASE, arms())
    assert worse.sentence.startswith("bft ranks worse than matched") and worse.advice == "keep matched."
    assert str(said) == f"{said.sentence}\nWhat to do: {said.advice}\nEvidence: {said.evidence}"


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (0.10534, 0.10527, ": its NDCG@10 is 0.0520, that of matched 0.0510 (both find the next item in their top ten "
         "for 10.5 % of users); with"),
        (0.101, 0.102, ": its NDCG@10 is 0.0520, that of matched 0.0510 (it finds the next item in its top ten for "
         "10.1 % of users, matched for 10.2 %); with"),
        (0.2, 0.1, ": it finds the next item in its top ten for 20.0 % of users, matched for 10.0 %; with"),
    ],
)  # fmt: skip
def test_the_sentence_speaks_of_what_differs(ours, theirs, told):
    assert told in say(BASE, noisy(0, 0.001), arms(ours, theirs)).sentence


def test_where_hits_hardly_differ_and_nothing_is_shown_both_find_as_many():
    said = say(BASE, noisy(1, sd=0.002), arms(0.10534, 0.10527)).sentence
    assert said.endswith(" Both find the next item in their top ten for 10.5 % of users.")


def test_without_hits_or_seconds_nothing_is_said_of_them():
    said = say(BASE, noisy(0, 0.001))
    assert said.sentence == (
        "bft ranks better than matched on ml-1m: its NDCG@10 is 0.0520, that of matched 0.0510; with 10 repeats this "
        "is unlikely to be luck."
    )
    assert said.advice == "use bft, if a gain of this size is worth a change."


def test_a_gain_comes_with_what_the_same_runs_have_on_validation():
    found = finding(BASE, noisy(2, 0.001))
    held = {up: replace(found, validation=compare_seeds(BASE, noisy(5, up))) for up in (-0.002, 0.002)}
    lost, kept = (answer(held[up], "ml-1m", {}, p=0.01) for up in (-0.002, 0.002))
    assert lost.evidence.endswith(" % (p < 0.001).") and "On validation the same runs have -" in lost.evidence
    assert "on validation the same runs show no gain" in lost.advice and "careful" not in kept.advice
    assert "alidation" not in str(answer(found, "ml-1m", {}, p=0.01)) + str(answer(held[0.002], "ml-1m", {}, p=0.5))


def test_no_difference_says_what_would_have_been_found():
    other = noisy(1, sd=0.002)
    effect = f"{100 * finding(BASE, other).seeds.smallest_effect / BASE.mean():.1f} %"
    said = say(BASE, other, arms())
    assert said.sentence == (
        f"No difference between bft and matched could be shown on ml-1m; one of {effect} or more would probably have "
        "been. bft finds the next item in its top ten for 11.1 % of users, matched for 10.9 %."
    )
    assert said.advice.startswith("keep matched, or train more seeds")
    assert said.evidence.endswith(f"with 10 seeds a difference of {effect} would have been found with 80 % power.")


@pytest.mark.parametrize(("p", "shown"), [(0.0499, True), (0.05, False)])
def test_a_difference_is_shown_where_the_adjusted_p_is_below_the_level(p, shown):
    other = BASE + np.random.default_rng(1).normal(0.001, 0.002, 10)
    said, alone = say(BASE, other, p=p, num_arms=2), finding(BASE, other).seeds.p_t
    assert said.sentence.startswith("bft ranks better" if shown else "No difference")
    assert f"p = {p_text(p)} (Holm over 2 arms; {p_text(alone)} by itself)" in said.evidence
    same = say(BASE, other, num_arms=2).evidence
    assert f"p = {alone:.3f} (Holm over 2 arms)" in same and "by itself" not in same


@pytest.mark.parametrize(("n", "reaches"), [(5, False), (6, True)])
def test_six_seeds_are_the_fewest_that_sign_flips_can_be_sure_with(n, reaches):
    said = say(BASE[:n], BASE[:n] + 1e-3 * np.arange(1, n + 1), p=0.01)
    assert said.evidence.endswith(f"Better in {n} of {n} seeds; exact sign-flip p = 0.031.") == reaches
    assert (f"p = 0.062, and {n} seeds cannot bring it below 0.0625." in said.evidence) != reaches
    assert (f"but {n} repeats are too few to rely on it." in said.sentence) != reaches
    assert (said.advice == "train at least 6 seeds before relying on this.") != reaches


@pytest.mark.parametrize(("n", "how"), [(20, "exact"), (21, "sampled")])
def test_where_the_two_tests_disagree_it_is_said(n, how):
    rng = np.random.default_rng(0)
    base = rng.normal(0.05, 0.001, n)
    said = say(base, base + rng.normal(0, 0.001, n), p=0.04)
    assert f"; {how} sign-flip p = " in said.evidence and f": the {how} test does not show it." in said.evidence
    assert "only one of two tests says" in said.sentence and said.advice == "train more seeds before relying on this."


def test_identical_arms_are_called_so():
    assert (
        say(BASE, BASE, same_ranks=True).sentence == "bft and matched rank every target of ml-1m alike in every seed."
    )
    equal = say(BASE, BASE)  # equal metrics from other ranks
    assert equal.sentence == "No difference between bft and matched could be shown on ml-1m."
    assert "0.0 % NDCG@10 (all items), the same in every seed and so without an interval, p by sig" in equal.evidence
    assert "95 % interval" not in equal.evidence and "80 % power" not in equal.evidence


@pytest.mark.parametrize("n", [3, 10])
def test_the_same_difference_in_every_seed_has_no_interval_and_no_power(n):
    said = say(BASE[:n], BASE[:n] + 5e-4)
    assert f"{100 * 5e-4 / BASE[:n].mean():+.1f} % NDCG@10 (all items), the same in every seed" in said.evidence
    assert ("p = 0.250." in said.evidence and "No diff" in said.sentence) if n == 3 else "better" in said.sentence
    assert "80 % power" not in said.evidence


def test_an_end_of_the_interval_near_zero_shows_its_side():
    d = np.array([1, 3.5, 1, 2.5, 1, 3.25, 2, 2.25]) * 1e-5  # from 0.024 to 0.055 % of the baseline
    assert "+0.04 % NDCG@10 (all items), 95 % interval +0.02 to +0.1 %" in say(np.full(8, 0.05), 0.05 + d).evidence
    assert "95 % interval -0.1 to -0.02 %" in say(np.full(8, 0.05), 0.05 - d).evidence


def test_a_baseline_of_zero_is_compared_in_the_metrics_own_unit():
    said = say([0.0, 0.0, 0.0], [0.01, 0.012, 0.011]).evidence
    assert "+0.0110 NDCG@10" in said and "interval +0.0085 to +0.0135" in said and "%, 3 seeds" not in said


def test_several_arms_are_adjusted_and_power_is_said_of_the_test_that_it_holds_for():
    found = finding(BASE, noisy(1, sd=0.002))
    (one,), several = (
        answers([(found, found.seeds.p_t)], "ml-1m", {}),
        answers([(found, 1.0)] * 3, "ml-1m", {}, {"bft"}),
    )
    assert one.evidence.endswith("with 80 % power.") and len(several) == 3
    assert all("rank every target" in said.sentence for said in several), "an arm of the same ranks"
    for said in answers([(found, 1.0)] * 3, "ml-1m", {}):
        assert said.evidence.endswith("with 80 % power by a test alone, without Holm's adjustment.")


@pytest.mark.parametrize("better", [(), (2,), (0, 5)])
def test_of_many_arms_those_of_which_something_is_shown_have_an_answer_each_and_the_others_share_one(better):
    noise = np.random.default_rng(4).normal(0, 0.002, (SENTENCES + 1, 10))
    values = [BASE + noise[n] + 0.02 * (n in better) for n in range(SENTENCES + 1)]
    found = [(finding(BASE, each, f"bft{n}"), LEVEL * (n not in better)) for n, each in enumerate(values)]
    few, many = answers(found[:-1], "ml-1m", {}), answers(found, "ml-1m", {})
    assert len(few) == SENTENCES and len(many) == len(better) + 1
    assert [said.sentence.split()[0] for said in many[:-1]] == [f"bft{n}" for n in better]
    rest = [n for n in range(SENTENCES + 1) if n not in better]
    least, most = (pick(rest, key=lambda n: found[n][0].seeds.difference) for pick in (min, max))
    share = {n: f"{100 * found[n][0].seeds.difference / BASE.mean():+.1f} % (bft{n})" for n in rest}
    assert many[-1].sentence == (
        f"No difference from matched could be shown on ml-1m for {len(rest)} of {SENTENCES + 1} arms."
    )
    assert many[-1].evidence == (
        f"{share[least]} to {share[most]} NDCG@10 (all items), 10 seeds, smallest p = 0.050 (Holm over "
        f"{SENTENCES + 1} arms). What each could have shown is under Metrics."
    )


def test_the_words_of_the_answers_are_explained():
    found = finding(BASE, noisy(0, 0.001))
    one, several = terms([found], 1), terms([found], 2)
    assert {"arm", "seed", "target", "NDCG@10", "all items", "p"} <= set(one)
    assert set(several) - set(one) == {"Holm"} and "matched is the baseline" in one["arm"] and terms([], 0) == {}
