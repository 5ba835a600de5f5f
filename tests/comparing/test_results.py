"""The figures of a comparison against scipy, where nothing differs, and pooled over data sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from recbft.comparing import results as results_module
from recbft.comparing.results import cells_of, pool, results_of
from recbft.errors import UserError
from recbft.evaluation.paired import compare_users, holm
from tests.comparing.made_up import drawn, made_up, on_data


def test_levels_are_over_seeds_and_holm_is_over_all_tests_of_the_table():
    ranks = drawn("matched", "bft", "published")
    found = results_of(made_up(ranks))
    for name, of_arm in ranks.items():
        figures, per_seed = found["arms"][name]["metrics"]["unfiltered"]["hr@10"], (of_arm <= 10).mean(axis=1)
        assert figures == {"mean": per_seed.mean(), "sd": np.std(per_seed, ddof=1), "values": per_seed.tolist()}
    cells = [cell["over_seeds"] for *_, cell in cells_of(found["comparisons"]["matched"])]
    assert [c["p_holm"] for c in cells] == holm([c["p_t"] for c in cells]) and len(cells) == 6


def test_the_second_baseline_is_of_the_model_of_the_first():
    names = [f"{model}/{arm}" for model in ("sasrec", "hstu") for arm in ("matched", "matched+recency", "bft")]
    ranks = {name: np.random.default_rng(number).integers(1, 40, (3, 20)) for number, name in enumerate(names)}
    ranks["matched+recency"] = ranks["sasrec/bft"][::-1]
    for model in ("sasrec", "hstu"):
        made = made_up(ranks, baseline=f"{model}/matched")
        arms = {name: replace(arm, trained=True) for name, arm in made.arms.items()}
        found = results_of(replace(made, arms=arms), metrics=["mrr"])
        assert list(found["comparisons"]) == [f"{model}/matched", f"{model}/matched+recency"]


@pytest.mark.parametrize(("users", "samples"), [(10_000, 10_000), (10_001, 2_000)])
def test_beyond_ten_thousand_users_there_are_fewer_resamples(monkeypatch, users, samples):
    asked = []

    def watched(*pair, samples):
        asked.append(samples)
        return compare_users(*pair, samples=20)

    monkeypatch.setattr(results_module, "compare_users", watched)
    results_of(made_up(drawn("matched", "bft", seeds=2, users=users)), metrics=["hr@10"])
    assert asked == [samples]


@pytest.mark.parametrize(
    ("arms", "baseline", "tables"),
    [
        (("matched", "bft"), "matched", {"matched": ["bft"]}),
        (("matched", "matched+recency"), "matched", {"matched": ["matched+recency"]}),
        (("matched", "matched+recency"), "matched+recency", {"matched+recency": ["matched"]}),
        (
            ("matched", "bft", "matched+recency"),
            "matched",
            {"matched": ["bft", "matched+recency"], "matched+recency": ["bft"]},
        ),
    ],
)
def test_what_is_left_over_the_recency_decay_has_a_table_of_its_own_where_there_is_an_arm_for_it(
    arms, baseline, tables
):
    ranks = {name: np.random.default_rng(0).integers(1, 40, (3, 30)) for name in arms}
    found = results_of(made_up(ranks, baseline=baseline), metrics=["mrr"])["comparisons"]
    assert {name: list(against) for name, against in found.items()} == tables


@pytest.mark.parametrize(("users", "also"), [(1, set()), (2, {"over_users"})])
def test_one_user_is_compared_over_seeds_alone(users, also):
    found = results_of(made_up(drawn("matched", "bft", users=users)), metrics=["mrr"])
    assert set(found["comparisons"]["matched"]["bft"]["unfiltered"]["mrr"]) == {"over_seeds"} | also


@pytest.mark.parametrize(
    ("seeds", "users", "notes"),
    [
        (3, 30, ["with 3 seeds no sign-flip p can be below 0.25; 6 seeds are the fewest that can reach 0.05"]),
        (5, 30, ["with 5 seeds no sign-flip p can be below 0.0625; 6 seeds are the fewest that can reach 0.05"]),
        (6, 30, []),
        (6, 29, ["with 29 users intervals over users are too narrow; 30 are the fewest, as in strata"]),
    ],
)
def test_few_seeds_and_few_users_are_said_to_show_little(seeds, users, notes):
    assert results_of(made_up(drawn("matched", "bft", seeds=seeds, users=users)), metrics=["mrr"])["notes"] == notes


def test_what_the_same_runs_have_on_validation_is_tested_where_both_arms_say_it():
    rng = np.random.default_rng(5)
    comparison = made_up(drawn("matched", "bft", "other"))
    held = {name: rng.uniform(0.1, 0.2, 6) for name in ("matched", "bft")}
    for name, values in held.items():
        comparison.arms[name].validation["unfiltered"] = {"mrr": values}
    found = results_of(comparison, metrics=("hr@10", "mrr"))["comparisons"]["matched"]
    said = found["bft"]["unfiltered"]["mrr"]["on_validation"]
    assert said["p_t"] == pytest.approx(stats.ttest_rel(held["bft"], held["matched"]).pvalue)
    assert said["difference"] == pytest.approx((held["bft"] - held["matched"]).mean())
    assert not any("on_validation" in cell for *key, cell in cells_of(found) if key != ["bft", "unfiltered", "mrr"])


def test_pooling_is_fishers_and_tells_the_direction():
    results = [on_data("beauty", -2), on_data("games", -1), on_data("toys", 2)]
    found = pool(results)
    assert found["data"] == ["beauty", "games", "toys"]
    first = found["pooled"][0]
    cells = [r["comparisons"]["matched"]["bft"]["unfiltered"]["hr@10"]["over_seeds"] for r in results]
    assert first["p_fisher"] == pytest.approx(stats.combine_pvalues([c["p_t"] for c in cells]).pvalue)
    flips = stats.combine_pvalues([c["p_sign_flip"] for c in cells]).pvalue
    assert first["p_fisher_sign_flip"] == pytest.approx(flips)
    assert first["relative"] == [c["relative"] for c in cells]
    assert first["mean_relative"] == pytest.approx(sum(first["relative"]) / 3)
    assert first["better_on"] == sum(c["difference"] > 0 for c in cells) == 2
    assert [row["p_holm"] for row in found["pooled"]] == holm([row["p_fisher"] for row in found["pooled"]])
    results[0]["comparisons"]["matched"]["more"] = results[0]["comparisons"]["matched"]["bft"]
    results[0]["comparisons"]["matched"]["bft"]["filtered"] = {"mrr": results[0]["comparisons"]["matched"]["bft"]}
    del results[1]["comparisons"]["matched"]["bft"]["unfiltered"]["mrr"]
    fewer = pool(results)
    assert len(fewer["pooled"]) == len(found["pooled"]) - 1
    assert fewer["left_out"] == ["bft MRR (all items)", "bft MRR (seen masked)", "more"]


def test_a_data_set_whose_baseline_has_no_hit_has_no_relative_change_and_no_part_in_their_mean():
    results = [on_data("beauty", -2), on_data("games", -1)]
    one, other = (r["comparisons"]["matched"]["bft"]["unfiltered"]["hr@10"]["over_seeds"] for r in results)
    one["relative"] = None
    first = pool(results)["pooled"][0]
    assert first["mean_relative"] == other["relative"] and first["better_on"] == 2
    other["relative"] = None
    assert pool(results)["pooled"][0]["mean_relative"] is None
    other["difference"] = other["smallest_effect"] = 0.0
    assert pool(results)["pooled"][0]["better_on"] == 1, "a data set on which nothing differs is none it is better on"


def test_one_file_prepared_in_two_ways_is_not_pooled():
    def prepared(content, before=(1429, 900, 10261), **filters):
        result = on_data(content, 1)
        told = {"before": dict(zip(("users", "items", "events"), before, strict=True)), "filters": filters}
        result["protocol"] |= {"dataset": "instruments", "preparation": told}
        return result

    whole = prepared("a", where=None, drop_last_events=0, k_core=0)
    cut = prepared("b", where=None, drop_last_events=1, k_core=5)
    with pytest.raises(UserError, match="on the events of instruments, prepared with other drop_last_events, k_core;"):
        pool([whole, on_data("games", 2), cut])
    part = prepared("b", where="year>2000", drop_last_events=0, k_core=0)
    with pytest.raises(UserError, match="on the events of instruments, prepared with other where;"):
        pool([on_data("games", 2), part, whole])
    assert len(pool([part, prepared("c", where="year<2000", drop_last_events=1, k_core=0)])["data"]) == 2
    for other in (
        prepared("b", where=None, drop_last_events=0, k_core=0),
        prepared("b", (1429, 900, 10262), where=None, drop_last_events=1, k_core=0),
    ):
        assert len(pool([whole, other])["data"]) == 2


def test_what_cannot_be_pooled_is_refused():
    one = on_data("beauty", 1)
    with pytest.raises(UserError, match="needs at least 2 comparisons"):
        pool([one])
    with pytest.raises(UserError, match="two comparisons are on the same data"):
        pool([one, on_data("beauty", 2)])
    untimed = on_data("games", 2)  # the same targets from a file without times
    untimed["protocol"]["target_hash"] = one["protocol"]["target_hash"]
    with pytest.raises(UserError, match="two comparisons are on the same data"):
        pool([one, untimed])
    with pytest.raises(UserError, match="have baselines bft, matched; give --baseline"):
        pool([one, {**on_data("games", 2), "baseline": "bft"}])
    models = [{**each, "protocol": {**each["protocol"], "config": {"model": model}}}
              for each, model in ((one, "sasrec"), (on_data("games", 2), "hstu"))]  # fmt: skip
    with pytest.raises(UserError, match="the comparisons are of hstu, sasrec; pool those of one model"):
        pool(models)
    with pytest.raises(UserError, match="no arm and metric in common"):
        pool([one, {**on_data("games", 2), "comparisons": {}}])
