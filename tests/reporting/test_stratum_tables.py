"""Tables of strata: from a comparison, one run, two runs; with the data set at hand and without."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset, leave_one_out
from recbft.errors import UserError
from recbft.evaluation.metrics import one_from_ranks
from recbft.reporting.stratum_tables import (
    STRATA,
    Cut,
    Items,
    Subject,
    available,
    confound_line,
    load_items,
    stratified,
    subject_of_comparison,
    subject_of_runs,
)


@pytest.fixture(scope="module")
def subject(comparison):
    return subject_of_comparison(comparison)


def column(table, heading):
    at = [c.heading for c in table.columns].index(heading)
    return [row[at] for row in table.rows]


def by_hand(**changes):
    """Four users, two seeds, counts and gaps one can check."""
    ranks = {"plain": np.array([[1, 20, 3, 20]] * 2), "bft": np.array([[1, 1, 3, 20], [1, 1, 20, 3]])}
    subject = Subject(
        dataset="hand", setting="unfiltered", ranks={"unfiltered": ranks, "filtered": {}}, baseline="plain",
        num_seeds=2,
        target=np.array(["a", "b", "c", "c"]), target_frequency=np.array([0, 1, 9, 9]),
        training_length=np.array([3, 3, 8, 9]),
        items=Items(counts=np.array([0, 1, 9, 4]), gap=np.array([0, 0, 86400, 864000]), ticks_per_second=1), missing="",
    )  # fmt: skip
    return replace(subject, **changes)


def test_a_table_worked_by_hand():
    (made,) = stratified(by_hand(), by=["item-frequency"], metrics=["hr@10"], quantiles=2, setting="unfiltered")
    table = made.table
    assert column(table, "stratum") == ["new", "Q0", "Q1"] and column(table, "bounds") == ["0", "1-4", "5-9"]
    assert column(table, "users") == [1, 1, 2] and column(table, "targets") == [1, 1, 1]
    assert column(table, "mean frequency") == [0.0, 1.0, 9.0]
    assert column(table, "plain") == [1.0, 0.0, 0.5] and column(table, "bft") == [1.0, 1.0, 0.5]
    assert column(table, "difference") == [0.0, 1.0, 0.0] and column(table, "relative") == [0.0, None, 0.0]
    assert column(table, "p") == [1.0, 0.5, 1.0] and column(table, "p Holm") == [1.0, 1.0, 1.0]
    assert column(table, "remark") == ["too small: 1 user", "too small: 1 user", "too small: 2 users"]
    assert "Edges of item frequency from the training counts of all 4 items, but for the 1 without" in table.caption
    assert "Holm over the 3 tests of this table" in table.caption and "Confound check, whether active" in table.caption
    assert column(table, "95 % interval") == [None] * 3 and "without an interval is the same" in table.caption


def test_a_baseline_without_a_hit_leaves_a_gain_without_a_relative_change():
    ranks = {"plain": np.full((2, 4), 20), "bft": np.array([[1, 20, 20, 20], [1, 1, 20, 20]])}
    subject = by_hand(ranks={"unfiltered": ranks, "filtered": {}})
    (made,) = stratified(subject, by=["item-frequency"], metrics=["hr@10"], quantiles=2, setting="unfiltered")
    assert column(made.table, "difference") == [1, 0.5, 0] and column(made.table, "relative") == [None, None, 0]


def test_a_users_targets_are_averaged_first_and_users_are_paired():
    ranks = {"plain": np.array([[1, 20, 3, 20]]), "bft": np.array([[1, 1, 20, 1]])}
    subject = by_hand(
        ranks={"unfiltered": ranks, "filtered": {}}, num_seeds=1, owner=np.array([0, 0, 0, 1]),
        target_frequency=np.array([1, 1, 9, 9]),
    )  # fmt: skip
    (made,) = stratified(subject, by=["item-frequency"], metrics=["hr@10"], quantiles=2, setting="unfiltered")
    assert column(made.table, "users") == [1, 2] and column(made.table, "stratum") == ["Q0", "Q1"]
    assert column(made.table, "plain") == [0.5, 0.5] and column(made.table, "bft") == [1, 0.5]
    assert column(made.table, "difference")[1] == 0 and column(made.table, "p")[0] is None, "one user, two targets"
    (made,) = stratified(subject, by=["user-activity"], metrics=["recall@2"], quantiles=2, setting="unfiltered")
    assert column(made.table, "plain") == [0.5, 0.0], "two of the first user's targets, and the third, have their own"


def test_one_user_in_one_seed_has_a_level_and_no_test():
    ranks = {"plain": np.array([[1, 20, 3, 20]]), "bft": np.array([[1, 1, 3, 20]])}
    subject = by_hand(ranks={"unfiltered": ranks, "filtered": {}}, num_seeds=1)
    (made,) = stratified(subject, by=["item-frequency"], metrics=["hr@10"], quantiles=4, setting="unfiltered")
    table = made.table
    assert column(table, "bounds") == ["0", "1", "5-9"] and column(table, "users") == [1, 1, 2]
    assert column(table, "plain") == [1, 0, 0.5] and column(table, "bft") == [1, 1, 0.5]
    assert column(table, "difference") == [None, None, 0] and column(table, "relative") == [None, None, 0]
    assert column(table, "95 % interval") == [None, None, (0, 0)] and column(table, "p Holm") == [None, None, 1]
    assert column(table, "remark") == ["too small: 1 user", "too small: 1 user", "too small: 2 users"]
    assert "one seed, so paired over users" in table.caption and "one test, so no adjustment" in table.caption
    alone = by_hand(
        ranks={"unfiltered": {name: each[:, :2] for name, each in ranks.items()}, "filtered": {}}, num_seeds=1,
        target=np.array(["a", "b"]), target_frequency=np.array([0, 1]), training_length=np.array([3, 3]),
    )  # fmt: skip
    (made,) = stratified(alone, by=["item-frequency"], metrics=["hr@10"], quantiles=4, setting="unfiltered")
    assert column(made.table, "p") == [None, None]
    assert "Nothing is tested: one seed, and no stratum with two users." in made.table.caption


def test_differences_that_cancel_are_not_called_no_difference():
    def hits(*numbers):
        return np.stack([np.where(np.arange(40) < number, 1, 20) for number in numbers])

    remarks = {}
    for arm, ranks in {"same": hits(20, 20), "more and less": hits(21, 19)}.items():
        subject = by_hand(
            ranks={"unfiltered": {"plain": hits(20, 20), arm: ranks}, "filtered": {}},
            target=np.arange(40), target_frequency=np.ones(40, int), training_length=np.full(40, 3),
        )  # fmt: skip
        (made,) = stratified(subject, by=["first-time"], metrics=["hr@10"], quantiles=2, setting="unfiltered")
        assert column(made.table, "difference") == [0.0] and column(made.table, "p") == [1.0]
        remarks[arm] = column(made.table, "remark")
    assert remarks == {"same": ["no difference at all"], "more and less": [""]}


def test_every_partition_of_real_runs_holds_every_user_once(subject, comparison):
    names, left_out = available(subject)
    assert names == list(STRATA) and left_out == []
    for made in stratified(subject, by=names, metrics=["ndcg@10"], quantiles=3, setting="unfiltered"):
        assert sum(column(made.table, "users")) == comparison.users.size
        total = np.dot(column(made.table, "users"), column(made.table, "bft")) / comparison.users.size
        assert total == pytest.approx(one_from_ranks(comparison.arms["bft"].ranks["unfiltered"], "ndcg@10").mean())
        assert not re.search(r"\bnan\b", str(made.table.texts()).lower())


def test_the_grid_is_both_axes_at_once(subject):
    one, other, both = (STRATA[name](subject, Cut(3)) for name in ("item-frequency", "user-activity", "grid"))
    for name, users in ((name, both.users(n)) for n, name in enumerate(both.names)):
        a, b = name.split(" x ")
        assert {one.names[m] for m in one.member[users]} == {a}
        assert {other.names[m] for m in other.member[users]} == {b}


def test_counts_and_gaps_are_the_data_sets(subject, events):
    dataset = Dataset.load(events, time="timestamp")
    split = leave_one_out(dataset)
    assert np.array_equal(subject.items.counts, dataset.training_counts[1:])
    assert np.array_equal(subject.target_frequency, dataset.training_counts[split.test.target])
    assert np.array_equal(subject.training_length, split.training_stop - split.training_start)
    times = [dataset.times[start:stop] for start, stop in pairwise(dataset.offsets)]
    assert subject.items.gap.tolist() == [each[-1] - each[-2] for each in times]


@pytest.mark.parametrize(("unit", "ticks"), [(1, 1), (10**3, 10**3), (10**6, 10**6), (10**9, 10**9), (10**-4, None)])
def test_times_have_the_unit_in_which_they_are_of_our_days(events, tmp_path, unit, ticks):
    frame = pd.read_parquet(events)
    path = tmp_path / "scaled.parquet"
    frame.assign(timestamp=(frame["timestamp"] * unit).astype(int)).to_parquet(path)
    dataset = Dataset.load(path, time="timestamp")
    config = {"data": {"dataset": str(path), "time": "timestamp"}}
    items, missing = load_items(config, dataset.content_hash, dataset.user_ids, None)
    assert (items.ticks_per_second, missing) == (ticks, "")
    none, missing = load_items(config, dataset.content_hash, dataset.user_ids[::-1], None)
    assert none is None and missing == "scaled as loaded lists other users than the runs"


def test_dates_have_the_unit_they_were_read_in(tmp_path):
    days = pd.to_datetime(["1970-01-01 00:00:00.250", "1970-01-02 00:00:00.250", "1970-01-03 00:00:00.250"])
    pd.DataFrame({"user_id": ["ann"] * 3, "item_id": ["tea", "milk", "tea"], "at": days}).to_parquet(tmp_path / "d.pq")
    dataset = Dataset.load(tmp_path / "d.pq", time="at")
    config = {"data": {"dataset": str(tmp_path / "d.pq"), "time": "at"}}
    items, missing = load_items(config, dataset.content_hash, dataset.user_ids, None)
    assert (items.gap.tolist(), items.ticks_per_second, missing) == ([86_400_000], 1000, "")


def test_data_that_are_gone_or_without_times_are_told_apart(events, tmp_path):
    users = Dataset.load(events).user_ids
    none, missing = load_items({"data": {"dataset": str(tmp_path / "gone.csv")}}, "hash", users, None)
    assert none is None and "gone.csv" in missing
    untimed = Dataset.load(events)
    items, missing = load_items({"data": {"dataset": str(events)}}, untimed.content_hash, users, None)
    assert (items.gap, items.ticks_per_second, missing) == (None, None, "")
    assert items.counts.tolist() == untimed.training_counts[1:].tolist()


def test_one_run_has_levels_and_no_test(trained):
    subject = subject_of_runs(trained / "runs" / "bft-seed0")
    (made,) = stratified(subject, by=["user-activity"], metrics=["hr@10"], quantiles=2, setting="filtered")
    headings = [c.heading for c in made.table.columns]
    assert headings[4:7] == ["HR@10", "95 % interval", "remark"] and "p" not in headings
    assert "one run, so nothing is tested" in made.table.caption and "seen masked" in made.table.caption


def test_one_run_has_the_users_and_the_ranks_that_it_has_in_a_comparison(trained, subject, comparison):
    runs = trained / "runs"
    for baseline in (None, runs / "matched-seed0"):
        one = subject_of_runs(runs / "bft-seed0", baseline=baseline)
        assert (one.num_seeds, one.setting, one.dataset) == (1, subject.setting, subject.dataset)
        assert one.baseline == (None if baseline is None else "matched")
        for of_users in ("target", "target_frequency", "training_length"):
            assert np.array_equal(getattr(one, of_users), getattr(subject, of_users))
        assert np.array_equal(one.items.gap, subject.items.gap)
        for setting, ranks in one.ranks.items():
            assert list(ranks) == (["bft"] if baseline is None else ["matched", "bft"])
            for arm, of_arm in ranks.items():
                assert np.array_equal(of_arm, comparison.arms[arm].ranks[setting][:1])


def test_strata_that_nobody_is_in_are_named():
    subject = by_hand(items=None, missing="the file is not here")
    made = stratified(subject, by=["user-activity", "grid"], metrics=["hr@10"], quantiles=9, setting="unfiltered")
    said = [found.table.caption for found in made]
    assert "Q1, Q2, Q3" in said[0] and "no user" not in said[1]
    assert re.search(r"Q\d, Q\d and Q\d have no user and are left out\.", said[0])


def test_two_runs_are_compared_over_users(trained):
    runs = trained / "runs"
    subject = subject_of_runs(runs / "bft-seed0", baseline=runs / "matched-seed0")
    (made,) = stratified(subject, by=["first-time"], metrics=["mrr"], quantiles=2, setting="unfiltered")
    assert "it says nothing about other seeds" in made.table.caption
    assert {"matched", "bft", "difference"} <= {c.heading for c in made.table.columns}
    again = subject_of_runs(runs / "bft-seed0", baseline=runs / "bft-seed1")
    assert list(again.ranks["unfiltered"]) == [str(runs / "bft-seed1"), str(runs / "bft-seed0")]
    other = subject_of_runs(runs / "bft-seed0", baseline=runs / "matched-seed1")
    assert list(other.ranks["unfiltered"]) == ["matched (seed 1)", "bft (seed 0)"]
    with pytest.raises(UserError, match="is its own baseline; give another run"):
        subject_of_runs(runs / "bft-seed0", baseline=runs / "bft-seed0")


def test_a_baseline_on_other_targets_is_refused(copied):
    runs = copied / "runs"
    file = runs / "matched-seed0" / "protocol.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_hash": "another"}))
    with pytest.raises(UserError, match="the runs differ in target_hash: another in "):
        subject_of_runs(runs / "bft-seed0", baseline=runs / "matched-seed0")


def test_without_the_data_set_edges_come_from_the_targets_and_the_table_says_so():
    subject = by_hand(items=None, missing="the file is not here")
    (made,) = stratified(subject, by=["item-frequency"], metrics=["hr@10"], quantiles=3, setting="unfiltered")
    assert made.strata.bounds == ("0", "1", "2-9")
    assert (
        "from the 3 distinct targets only, since the data set is not at hand (the file is not here)"
        in made.table.caption
    )
    others = [name for name in STRATA if name != "recency"]
    assert available(subject) == (others, ["recency is left out: the file is not here"])
    untimed = by_hand(items=Items(counts=np.array([0, 1, 9, 4]), gap=None, ticks_per_second=None))
    assert available(untimed) == (others, ["recency is left out: hand has no real times"])


def test_other_data_under_the_same_name_is_not_taken(copied):
    folder = copied / "runs" / "bft-seed0"
    for name in ("config.yaml", "protocol.json"):
        text = (folder / name).read_text()
        text = text.replace("time: timestamp", "time: null").replace('"time": "timestamp"', '"time": null')
        (folder / name).write_text(text)
    subject = subject_of_runs(folder)
    assert subject.items is None and "as loaded has content" in subject.missing


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({}, "item-frequencies", "unknown strata 'item-frequencies'; did you mean 'item-frequency'?"),
        (
            {"items": Items(counts=np.array([1]), gap=None, ticks_per_second=None)},
            "recency",
            "recency needs real times, and hand has none; leave",
        ),
        ({"items": None, "missing": "gone"}, "recency", "recency needs the data set: gone"),
    ],
)
def test_what_the_data_does_not_have_is_refused(changes, name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        stratified(by_hand(**changes), by=[name], quantiles=2, setting="unfiltered")


def test_a_setting_without_ranks_and_an_unknown_metric_are_refused():
    with pytest.raises(UserError, match="there are no ranks seen masked; choose the other --setting"):
        stratified(by_hand(), by=["first-time"], quantiles=2, setting="filtered")
    alone = by_hand().ranks["unfiltered"]["plain"]
    with pytest.raises(UserError, match="only plain has ranks seen masked, and nothing to be compared with"):
        stratified(
            by_hand(ranks={"unfiltered": {}, "filtered": {"plain": alone}}),
            by=["first-time"], quantiles=2, setting="filtered",
        )  # fmt: skip
    with pytest.raises(UserError, match="there are no ranks all items"):
        stratified(by_hand(ranks={"unfiltered": {"bft": alone}}), by=["first-time"], quantiles=2, setting="unfiltered")


def test_several_arms_have_a_line_each(comparison):
    three = subject_of_comparison(comparison)
    ranks = {**three.ranks["unfiltered"], "copy": three.ranks["unfiltered"]["matched"]}
    three = replace(three, ranks={"unfiltered": ranks, "filtered": {}})
    (made,) = stratified(three, by=["user-activity"], metrics=["ndcg@10"], quantiles=2, setting="unfiltered")
    assert column(made.table, "arm") == ["bft", "copy"] * len(made.results)
    copies = [row for row in made.results if row.differences["copy"].p_t == 1 and row.holm_p["copy"] == 1]
    assert len(copies) == len(made.results)
    assert "no difference at all" not in column(made.table, "remark"), "one arm differs"


def test_the_confound_is_said_in_words():
    assert "Pearson r = +0.99" in confound_line(by_hand()) and "partly say the same" in confound_line(by_hand())
    assert "does not vary" in confound_line(by_hand(training_length=np.full(4, 3)))
    assert "does not vary" in confound_line(by_hand(target_frequency=np.full(4, 3)))
    two = by_hand(training_length=np.array([3, 5]), target_frequency=np.array([1, 2]))
    assert confound_line(two) == "Confound check: fewer than three users have no correlation."
    falling = confound_line(by_hand(training_length=np.array([9, 8, 3, 3])))
    assert "Pearson r = -1.00" in falling and "partly say the same" in falling
    apart = by_hand(training_length=np.array([3, 5, 3, 5]), target_frequency=np.array([1, 1, 2, 2]))
    assert "Pearson r = +0.00" in confound_line(apart) and "(p = 1.000): the two axes are all but" in confound_line(
        apart
    )
