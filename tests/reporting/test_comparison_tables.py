"""Findings and their tables are the figures of the comparison, nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recbft.comparing.results import results_of
from recbft.evaluation.paired import UserComparison, compare_seeds, compare_users, holm
from recbft.reporting.comparison_tables import (
    findings,
    headline_findings,
    level_table,
    on_validation,
    seed_table,
    training_table,
    user_table,
)
from recbft.reporting.tables import comma_separated, p_equals, percent


@pytest.fixture(scope="module")
def results(comparison):
    return results_of(comparison)


@pytest.fixture(scope="module")
def found(results):
    return findings(results)["matched"]


def by_heading(table):
    return [dict(zip([c.heading for c in table.columns], row, strict=True)) for row in table.rows]


def test_every_test_of_the_comparison_is_found(comparison, results, found):
    assert list(findings(results)) == ["matched"] and len(found) == 6
    for one in found:
        pair = [comparison.values(arm, one.setting, one.metric) for arm in ("matched", "bft")]
        assert one.seeds == compare_seeds(*pair)
        users = [comparison.per_user(arm, one.setting, one.metric) for arm in ("matched", "bft")]
        assert one.users == compare_users(*users)
        held = [comparison.arms[arm].validation[one.setting][one.metric] for arm in ("matched", "bft")]
        assert one.validation == compare_seeds(*held)
        assert on_validation(one) == f"{percent(one.validation.relative)} (p {p_equals(one.validation.p_t)})"
    assert [one.holm_p for one in found] == holm([one.seeds.p_t for one in found])


def test_the_tables_show_them(comparison, results, found):
    levels, seeds, users = level_table(results), seed_table(results, found), user_table(results, found)
    assert [row[0] for row in levels.rows] == ["matched", "bft"] * 2
    values = comparison.values("bft", "unfiltered", "ndcg@10")
    assert levels.rows[1][3] == (pytest.approx(values.mean()), pytest.approx(values.std(ddof=1)))
    for row, one in zip(seeds.rows, found, strict=True):
        s = one.seeds
        assert row[3:9] == [s.difference, s.relative, s.interval, s.p_t, one.holm_p, s.p_sign_flip]
        assert row[9:] == [f"{s.wins} of 3", s.cohen_d, s.smallest_effect / s.mean_baseline, on_validation(one)]
    for row, one, p in zip(users.rows, found, holm([one.users.p_sign_flip for one in found]), strict=True):
        u = one.users
        assert row[3:] == [u.difference, u.difference / one.seeds.mean_baseline, u.interval, u.p_sign_flip, p]
    assert "Holm over the 6 t-tests" in seeds.caption and "ties count against the target" in levels.caption
    assert "Another question than over seeds" in users.caption and "over 150 users" in users.caption
    # On a phone a table says who, what, how much and whether it is shown.
    assert [c.heading for c in seeds.columns if c.narrowest == "phone"] == [
        "arm", "metric", "items", "relative", "p Holm"
    ]  # fmt: skip


def test_training_is_shown_as_means_over_the_seeds_that_say_it(results):
    arms = results["arms"]
    changed = {"bft": {**arms["bft"], "epochs": [4, 9], "best_epochs": [None, 2], "training_seconds": [1.0, 4.0]}}
    table = training_table({**results, "arms": {**arms, **changed}})
    assert table.rows[1] == ["bft", 2, 6.5, 2, 2.5] and table.rows[0][:3] == ["matched", 3, 2]
    silent = {name: {**arm, "epochs": [], "best_epochs": [], "training_seconds": []} for name, arm in arms.items()}
    assert training_table({**results, "arms": silent}) is None


def test_a_difference_that_is_the_same_in_every_seed_has_dashes_and_a_reason(results, found):
    base = np.array([0.1, 0.12, 0.15])
    shifted, equal = (replace(found[0], seeds=compare_seeds(base, base + more)) for more in (0.01, 0.0))
    table = seed_table(results, [shifted, equal, found[1]])
    for row, p in zip(by_heading(table), (0.25, 1.0), strict=False):
        assert (row["95 % interval"], row["detectable"], row["p"]) == (None, None, p)
    assert by_heading(table)[2]["detectable"] == found[1].seeds.smallest_effect / found[1].seeds.mean_baseline
    assert "A difference without an interval is the same in every seed" in table.caption
    assert "without an interval" not in seed_table(results, found[1:]).caption


def test_levels_and_differences_have_the_digits_of_what_was_found(results, found):
    base = np.linspace(0.1, 0.15, 6)
    seeds = compare_seeds(base, np.add(base, [3e-5, 2e-5, 3e-5, 2e-5, 3e-5, 2e-5]))
    users = UserComparison(num_users=9, difference=4e-4, interval=(1e-4, 7e-4), p_sign_flip=0.01)
    tiny = replace(found[0], seeds=seeds, users=users)
    assert (seed_table(results, [found[1], tiny]).digits, user_table(results, [tiny]).digits) == (6, 5)
    cells = {"hr@10": {"over_seeds": {"difference": 2.5e-5, "p_t": seeds.p_t}}}
    changed = results | {"comparisons": results["comparisons"] | {"matched": {"bft": {"unfiltered": cells}}}}
    assert (level_table(changed).digits, level_table(results).digits) == (6, 4)


def test_the_headline_is_one_metric_per_arm_in_the_protocol_s_setting(comparison, results, found):
    ((one, p),) = headline_findings(comparison, found)
    assert (one.arm, one.metric, one.setting) == ("bft", "ndcg@10", "unfiltered") and p == one.seeds.p_t
    masked = replace(comparison, protocol={**comparison.protocol, "filter_seen": True})
    ((one, _),) = headline_findings(masked, found)
    assert (one.metric, one.setting) == ("ndcg@10", "filtered")
    other = results_of(comparison, metrics=("mrr", "hr@10"))
    ((one, _),) = headline_findings(comparison, findings(other)["matched"])
    assert (one.metric, one.setting) == ("mrr", "unfiltered")
    assert headline_findings(comparison, []) == []


def test_an_external_system_joins_with_the_setting_that_it_has(with_external):
    results = results_of(with_external, metrics=("ndcg@10",))
    found = findings(results)["matched"]
    (ours, other), adjusted = zip(*headline_findings(with_external, found), strict=True)
    assert list(adjusted) == holm([ours.seeds.p_t, other.seeds.p_t]) != [ours.seeds.p_t, other.seeds.p_t]
    assert (ours.setting, other.arm, other.setting) == ("unfiltered", "<b>other</b>", "filtered")
    assert user_table(results, [replace(one, users=None) for one in found]) is None, "of one user there are none"
    table = level_table(results)
    cells = {row[0]: row[2] for row in table.texts()}
    assert "±" not in cells["<b>other</b>"] and "±" in cells["bft"]  # one set of ranks for all seeds
    (line,) = (line for line in comma_separated(table).splitlines() if "other" in line)
    assert line.endswith(",")  # no deviation, which is not one of 0
