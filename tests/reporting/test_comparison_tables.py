"""Findings, tables and what is printed of comparisons and pools: every number is one of the results."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from recbft.comparing.results import cells_of, pool, results_of
from recbft.evaluation.paired import UserComparison, compare_seeds, compare_users, holm
from recbft.reporting.comparison_tables import (
    comparison_document,
    findings,
    headline_findings,
    level_table,
    on_validation,
    out_of_reach,
    pooled_document,
    seed_table,
    training_table,
    user_table,
)
from recbft.reporting.tables import comma_separated, p_equals, p_text, percent
from tests.comparing.made_up import MADE, drawn, made_up, on_data

ITEMS = {"unfiltered": "all items", "filtered": "seen masked"}


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


def test_a_phone_shows_who_what_how_much_and_whether_it_is_found(results, found):
    shown = [c.heading for c in seed_table(results, found).columns if c.narrowest == "phone"]
    assert shown == ["arm", "metric", "items", "relative", "p Holm"]


def test_where_no_arm_was_trained_there_is_no_table_of_it(results):
    arms = {name: {**arm, "epochs": []} for name, arm in results["arms"].items()}
    assert training_table({**results, "arms": arms}) is None


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
    assert user_table(results, [tiny]).rows[0][4] == 4e-4 / seeds.mean_baseline
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


def tables_of(text):
    """The tables of a Markdown text: the cells of every row but the rule's."""
    parts = [part.splitlines() for part in text.split("\n\n")]
    rows = [[line for line in part if not set(line) <= set("| -:")] for part in parts if part[0].startswith("| ")]
    return [[[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part] for part in rows]


def test_every_number_of_the_document_is_one_of_the_results():
    rng, ranks = np.random.default_rng(5), drawn("matched", "bft", "other")
    comparison = made_up(ranks)
    for name in ("matched", "bft"):
        comparison.arms[name].ranks["filtered"] = ranks[name] - rng.integers(0, 2, (6, 40)) * (ranks[name] > 1)
        comparison.arms[name].validation["filtered"] = {"mrr": rng.uniform(0.1, 0.2, 6)}
    result = results_of(comparison, metrics=("hr@10", "mrr"))
    result["arms"]["bft"] |= {"epochs": [10, 20], "best_epochs": [4, None], "training_seconds": [1.0, 2.5]}
    result["arms"]["matched"] |= {"epochs": [7, 7], "best_epochs": [None, None], "training_seconds": [3.0, 3.0]}
    given = {**result, "made": MADE, "notes": ["one", "two"]}
    text = comparison_document(given, markdown=True)
    assert "- note: one\n- note: two\n" in text and "different environments" not in text
    levels, training, seeds, users = tables_of(text)
    expected = [
        [name, ITEMS[setting], *(f"{figures[metric]['mean']:.4f} ± {figures[metric]['sd']:.4f}" for metric in figures)]
        for setting in ITEMS for name in ("matched", "bft", "other")
        if (figures := result["arms"][name]["metrics"].get(setting))
    ]  # fmt: skip
    assert levels == [["arm", "items", "HR@10", "MRR"], *expected]
    assert training[1:] == [["matched", "2", "7.0", "-", "3.0"], ["bft", "2", "15.0", "4.0", "1.8"]]
    found = cells_of(result["comparisons"]["matched"])
    for (name, setting, metric, cell), row in zip(found, seeds[1:], strict=True):
        d = cell["over_seeds"]
        low, high = d["interval"]
        assert row == [
            name, metric.upper(), ITEMS[setting], f"{d['difference']:+.4f}", f"{100 * d['relative']:+.1f} %",
            f"{low:+.4f} to {high:+.4f}", *(p_text(d[p]) for p in ("p_t", "p_holm", "p_sign_flip")),
            f"{d['wins']} of 6", f"{d['cohen_d']:+.2f}", f"{100 * d['smallest_effect'] / d['mean_baseline']:.1f} %",
            "-" if (held := cell.get("on_validation")) is None
            else f"{100 * held['relative']:+.1f} % (p {p_equals(held['p_t'])})",
        ]  # fmt: skip
    adjusted = holm([cell["over_users"]["p_sign_flip"] for *_, cell in found])
    for (name, setting, metric, cell), p, row in zip(found, adjusted, users[1:], strict=True):
        d = cell["over_users"]
        low, high = d["interval"]
        relative = d["difference"] / cell["over_seeds"]["mean_baseline"]
        assert row == [
            name, metric.upper(), ITEMS[setting], f"{d['difference']:+.4f}", f"{100 * relative:+.1f} %",
            f"{low:+.4f} to {high:+.4f}", p_text(d["p_sign_flip"]), p_text(p),
        ]  # fmt: skip
    several = comparison_document({**given, "environments": [{"cpu": "a"}, {"cpu": "b"}]}, markdown=True)
    assert "- note: the runs come from 2 different environments" in several
    # A terminal has the same cells.
    plain = [line.split() for line in comparison_document(given, markdown=False).splitlines()]
    for row in (*levels, *training, *seeds, *users):
        assert " ".join(row).split() in plain


def test_the_two_claims_are_told_apart():
    result = {**results_of(made_up(drawn("matched", "bft"))), "made": MADE}
    for markdown in (False, True):
        text = " ".join(comparison_document(result, markdown=markdown).split())
        assert "Difference from matched, paired by seed" in text and "Holm over the 3 t-tests" in text
        assert "Difference from matched over users, seeds averaged away" in text and "nan" not in text


def test_a_family_too_large_for_the_drawn_sign_patterns_is_said_to_be():
    said = "2,000 drawn sign patterns and is at least 0.0005: by Holm over 101 tests it cannot reach 0.05"
    assert said in out_of_reach(101, 2000) and out_of_reach(100, 2000) == ""
    users = {"num_users": 10_001, "difference": 0.0, "interval": (0.0, 0.0), "p_sign_flip": 1 / 2001}
    result = {**results_of(made_up(drawn("matched", "bft")), metrics=["mrr"]), "made": MADE}
    cell = result["comparisons"]["matched"]["bft"]["unfiltered"]["mrr"] | {"over_users": users}
    for tests in (100, 101):
        result["comparisons"]["matched"]["bft"]["unfiltered"] = {f"hr@{k}": cell for k in range(1, tests + 1)}
        assert (said in " ".join(comparison_document(result, markdown=False).split())) == (tests == 101)


def test_a_name_is_no_tag_in_markdown_and_as_it_is_in_a_terminal():
    name, command = "<script>alert(1)", "recbft compare --external '<b>=FILE'"
    ranks = {arm: np.arange(1, 61).reshape(2, 30) for arm in ("matched", name)}
    results = [
        {**results_of(made_up(ranks, content=content)), "made": {**MADE, "command": command}}
        for content in ("<b>d", "b")
    ]
    result = {**results[0], "notes": [f"arm {name} is external"]}
    for document, given in ((comparison_document, result), (pooled_document, pool(results))):
        assert name in document(given, markdown=False)
        prose = document(given, markdown=True).replace(f"`{command}`", "")
        assert "&lt;script>alert(1)" in prose and not re.search("<[a-z]", prose)
    assert f"`{command}`" in comparison_document(result, markdown=True)  # what is set as code is no tag


@pytest.mark.parametrize(
    ("config", "filter_seen", "said"),
    [
        (
            {"training.valid_metric": "ndcg@10", "training.epochs": 2},
            False,
            "validation NDCG@10 (all items) within 2 epochs.",
        ),
        ({"training.valid_metric": "mrr"}, True, "validation MRR (seen masked)."),
        ({}, True, "each arm's validation metric (seen masked)."),
    ],
)
def test_the_document_says_by_which_metric_and_within_how_many_epochs_runs_were_stopped(config, filter_seen, said):
    result = results_of(made_up({name: np.ones((2, 30), int) for name in ("matched", "bft")}), metrics=["mrr"])
    result["protocol"] |= {"config": config, "filter_seen": filter_seen}
    text = comparison_document({**result, "made": MADE}, markdown=False)
    assert "Seeds 0,1. The last event of each user is the test target; it is ranked among all 12,345 items" in text
    assert f"Early stopping on {said}" in text


def test_a_pool_shows_its_rows_and_how_each_comparison_was_made():
    results = [on_data("beauty", -2), on_data("games", -1), on_data("toys", 2)]
    found = pool(results)
    text = pooled_document(found, markdown=False)
    for data in ("beauty", "games", "toys"):
        assert f"`recbft compare -d {data}`\n2026-01-01, a CPU" in text
    assert "Holm over the 3 rows" in " ".join(text.split()) and text.count("ranked among all 12,345 items") == 3
    first, row = found["pooled"][0], tables_of(pooled_document(found, markdown=True))[0][1]
    changes = [f"{100 * r:+.1f} %" for r in (*first["relative"], first["mean_relative"])]
    assert row == ["bft", "HR@10", "all items", *changes, "2 of 3", *(p_text(first[p]) for p in ("p_fisher", "p_holm"))]
    del results[1]["comparisons"]["matched"]["bft"]["unfiltered"]["mrr"]
    said = "Left out, not in every comparison: bft MRR (all items)\n"
    assert said in pooled_document(pool(results), markdown=False)


def test_a_pool_says_where_a_difference_has_no_spread_or_no_relative_size():
    results = [on_data("beauty", -2), on_data("games", -1)]
    one, other = (r["comparisons"]["matched"]["bft"]["unfiltered"]["hr@10"]["over_seeds"] for r in results)
    one["relative"], other["relative"] = None, -0.0004
    assert "| - | -0.04 % | -0.04 % |" in pooled_document(pool(results), markdown=True)
    assert "sign flips" not in pooled_document(pool(results), markdown=False)
    other["difference"] = other["smallest_effect"] = 0.0
    assert "same in every seed of a data set" in " ".join(pooled_document(pool(results), markdown=False).split())


@pytest.mark.parametrize(
    ("p", "written"),
    [(0.00099999, "< 0.001"), (0.001, "= 0.001"), (0.0496, "= 0.0496"), (0.05, "= 0.050"), (1.0, "= 1.000")],
)
def test_a_p_is_written_to_three_digits_and_shows_on_which_side_of_its_bounds_it_lies(p, written):
    assert p_equals(p) == written
