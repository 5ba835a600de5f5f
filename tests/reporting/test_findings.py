"""Findings and their tables are the figures of the comparison, nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recbft.comparing.results import results_of
from recbft.evaluation.paired import compare_seeds, compare_users, holm
from recbft.reporting.document import p_equals, percent
from recbft.reporting.findings import findings, headline_findings, level_table, seed_table, user_table
from recbft.reporting.tables import comma_separated


@pytest.fixture(scope="module")
def results(comparison):
    return results_of(comparison)


def test_every_test_of_the_comparison_is_found(comparison, results):
    found = findings(comparison, results)
    assert list(found) == ["matched"] and len(found["matched"]) == 6
    for one in found["matched"]:
        pair = [comparison.values(arm, one.setting, one.metric) for arm in ("matched", "bft")]
        assert one.seeds == compare_seeds(*pair)
        users = [comparison.per_user(arm, one.setting, one.metric) for arm in ("matched", "bft")]
        assert one.users == compare_users(*users)
    assert [one.holm_p for one in found["matched"]] == holm([one.seeds.p_t for one in found["matched"]])


def test_the_tables_show_them(comparison, results):
    found = findings(comparison, results)["matched"]
    seeds, users, levels = (
        seed_table(comparison, found),
        user_table(comparison, found),
        level_table(comparison, results),
    )
    assert [row[0] for row in levels.rows] == ["matched", "bft"] * 2
    mean, sd = levels.rows[1][3]
    values = comparison.values("bft", "unfiltered", "ndcg@10")
    assert (mean, sd) == (pytest.approx(values.mean()), pytest.approx(values.std(ddof=1)))
    for row, one in zip(seeds.rows, found, strict=True):
        s = one.seeds
        assert row[3:9] == [s.difference, s.relative, s.interval, s.p_t, one.holm_p, s.p_sign_flip]
        assert row[9:12] == [f"{s.wins} of 3", f"{s.cohen_d:+.2f}", s.smallest_effect / s.mean_baseline]
        pair = [comparison.arms[arm].validation[one.setting][one.metric] for arm in ("matched", "bft")]
        held = compare_seeds(*pair)
        assert row[12] == one.validation == f"{percent(held.relative)} (p {p_equals(held.p_t)})"
    for row, one, p in zip(users.rows, found, holm([one.users.p_sign_flip for one in found]), strict=True):
        u = one.users
        assert row[3:] == [u.difference, u.difference / one.seeds.mean_baseline, u.interval, u.p_sign_flip, p]
    assert "Holm p: over the 6 tests" in seeds.caption and "ties against the target" in seeds.caption
    assert "Another claim than over seeds" in users.caption and len(users.rows) == 6


def test_the_same_difference_in_every_seed_has_dashes_and_a_reason(comparison, results):
    found = findings(comparison, results)["matched"]
    equal = replace(found[0], seeds=compare_seeds(np.array([0.1, 0.12, 0.15]), np.array([0.11, 0.13, 0.16])))
    before, table = seed_table(comparison, found[1:]), seed_table(comparison, [equal, *found[1:]])
    cells = dict(zip([c.heading for c in table.columns], table.texts()[0], strict=True))
    assert (cells["95 % interval"], cells["d"], cells["80 % power"], cells["p"]) == ("-", "-", "-", "0.250")
    assert "p is the sign flips'" in table.caption and "p is the sign flips'" not in before.caption


def test_equal_arms_are_not_said_to_show_any_difference_however_small(comparison, results):
    (found, *_) = findings(comparison, results)["matched"]
    values = np.array([0.1, 0.12, 0.15])
    table = seed_table(comparison, [found, replace(found, seeds=compare_seeds(values, values))])
    one, equal = (dict(zip([c.heading for c in table.columns], row, strict=True)) for row in table.rows)
    assert one["80 % power"] == found.seeds.smallest_effect / found.seeds.mean_baseline > 0
    assert (equal["80 % power"], equal["p"], equal["95 % interval"]) == (None, 1.0, None)
    assert "A difference without an interval is the same in every seed" in table.caption


def test_the_headline_is_one_metric_per_arm_adjusted_over_arms_alone(comparison, results):
    ((one, p),) = headline_findings(comparison, findings(comparison, results)["matched"])
    assert (one.arm, one.metric, one.setting) == ("bft", "ndcg@10", "unfiltered") and p == one.seeds.p_t


def test_the_headline_is_in_the_protocol_s_setting_and_in_the_first_metric_without_the_usual_one(comparison, results):
    masked = replace(comparison, protocol={**comparison.protocol, "filter_seen": True})
    ((one, _),) = headline_findings(masked, findings(comparison, results)["matched"])
    assert (one.metric, one.setting) == ("ndcg@10", "filtered")
    other = results_of(comparison, metrics=("mrr", "hr@10"), over_users=False)
    ((one, _),) = headline_findings(comparison, findings(comparison, other)["matched"])
    assert (one.metric, one.setting) == ("mrr", "unfiltered")
    assert headline_findings(comparison, []) == []


def test_an_external_system_joins_with_the_setting_that_it_has(with_external):
    found = findings(with_external, results_of(with_external, metrics=("ndcg@10",), over_users=False))["matched"]
    (ours, other), adjusted = zip(*headline_findings(with_external, found), strict=True)
    assert list(adjusted) == holm([ours.seeds.p_t, other.seeds.p_t]) != [ours.seeds.p_t, other.seeds.p_t]
    assert (ours.setting, other.arm, other.setting) == ("unfiltered", "<b>other</b>", "filtered")
    assert user_table(with_external, found) is None


def test_one_set_of_ranks_for_all_seeds_has_a_mean_alone(with_external):
    table = level_table(with_external, results_of(with_external, metrics=("mrr",), over_users=False))
    cells = {row[0]: row[2] for row in table.texts()}
    assert "±" not in cells["<b>other</b>"] and "±" in cells["bft"]
    (line,) = (line for line in comma_separated(table).splitlines() if "other" in line)
    assert line.endswith(",")  # no deviation, which is not one of 0
