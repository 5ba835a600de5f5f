"""The generated log has the structure it claims, and its truth finds its data set again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset, Preparation, SyntheticConfig, generate, save_synthetic, synthetic_dataset
from recbft.datasets.planted import planted_reliability
from recbft.errors import UserError


@pytest.fixture(scope="module")
def made():
    return generate(SyntheticConfig())


def test_equal_configs_give_equal_events_and_other_seeds_others():
    small = SyntheticConfig(num_users=50, num_items=60, mean_length=7)
    pd.testing.assert_frame_equal(generate(small).events, generate(small).events)
    other = generate(SyntheticConfig(num_users=50, num_items=60, mean_length=7, seed=1))
    assert not generate(small).events.equals(other.events)


def test_sizes_times_and_types_are_as_asked(made):
    events = made.events
    assert list(events.dtypes.astype(str)) == ["int64"] * 3
    assert events.timestamp.is_monotonic_increasing and events.timestamp.min() > 10**9
    lengths = events.user_id.value_counts()
    assert len(lengths) == 2000 and lengths.min() >= 5 and abs(lengths.mean() - 20) < 1.5
    assert not events.duplicated(["user_id", "item_id"]).any()
    assert (made.items.num_events.sum(), made.users.num_events.sum()) == (len(events), len(events))


def test_reliability_is_the_share_of_events_that_follow_taste():
    config = SyntheticConfig(seed=1, user_reliabilities=(1.0,), user_shares=(1.0,))
    items = generate(config).items
    for reliability, group in items.groupby("reliability"):
        events = group.num_events.sum()
        share = (group.taste_share * group.num_events).sum() / events
        assert abs(share - reliability) < 4 * np.sqrt(0.25 / events)


def test_noisy_users_follow_taste_as_much_less_as_their_reliability_says(made):
    shares = made.users.groupby("reliability")[["taste_share", "num_events"]].apply(
        lambda group: np.average(group.taste_share, weights=group.num_events)
    )
    assert shares[0.4] / shares[1.0] == pytest.approx(0.4, abs=0.03)


def test_reliability_is_independent_of_popularity(made):
    means = made.items.groupby("reliability").num_events.mean()
    assert means.max() / means.min() < 1.3


def test_times_are_sessions_of_minutes_that_lie_days_apart(made):
    first = made.events.groupby("user_id").timestamp.min()
    assert 1_577_836_800 <= first.min() < first.max() < 1_577_836_800 + 365 * 86_400
    gaps = made.events.groupby("user_id").timestamp.diff().dropna()
    # within the hour: 0.6 of the gaps, and 1 % of those with a mean of four days
    assert (gaps < 3600).mean() == pytest.approx(0.604, abs=0.015)
    assert gaps.mean() == pytest.approx(0.6 * 300 + 0.4 * 4 * 86_400, rel=0.05)


def with_sides(seed):
    """A config whose taste has one factor, stays and decides all: an item's side tells the sign of taste.

    Returns:
        The config, the side of each item by its id, -1 where nobody took it, and the side of each user by its id.
    """
    config = SyntheticConfig(
        num_users=1600, num_items=200, mean_length=12, num_factors=1, focus=1e6, seed=seed, drift_days=1e12,
        item_reliabilities=(1.0,), item_shares=(1.0,), user_reliabilities=(1.0,), user_shares=(1.0,),
    )  # fmt: skip
    events = generate(config).events
    item_side, user_side = np.arange(201), np.full(1601, 201)
    for _ in range(12):  # what a user has taken is on one side
        np.minimum.at(user_side, events.user_id, item_side[events.item_id])
        np.minimum.at(item_side, events.item_id, user_side[events.user_id])
    item_side[np.setdiff1d(np.arange(201), events.item_id)] = -1
    assert len(set(user_side[1:])) == 2
    return config, item_side, user_side


def test_taste_drifts_with_the_time_that_passes():
    """Its sign is kept with probability 1 - arccos(c) / pi, c = exp(-dt / drift)."""
    seed = 0
    config, side, _ = with_sides(seed)
    events = generate(replace(config, drift_days=2.0)).events.sort_values(["user_id", "timestamp"], kind="stable")
    events = events.assign(side=side[events.item_id])
    follows = (events.user_id == events.user_id.shift()).to_numpy()
    kept = (events.side == events.side.shift()).to_numpy()[follows]
    days = events.timestamp.diff().to_numpy()[follows] / 86_400
    expected = 1 - np.arccos(np.exp(-days / 2)) / np.pi
    for chosen in (days < 0.01, (days > 0.01) & (days < 2), days > 4):
        sigma = np.sqrt((expected[chosen] * (1 - expected[chosen])).sum()) / chosen.sum()
        assert chosen.sum() > 200 and abs(kept[chosen].mean() - expected[chosen].mean()) < 4 * sigma


def test_what_is_not_of_taste_is_drawn_by_popularity_among_items_of_its_level():
    seed = 1
    config, item_side, user_side = with_sides(seed)  # of the same items and users, who are drawn first
    noisy = generate(replace(config, item_reliabilities=(0.8, 0.2), item_shares=(0.5, 0.5), zipf=0.0))
    events = noisy.events.assign(level=noisy.items.reliability.to_numpy()[noisy.events.item_id - 1])
    agrees = pd.Series(item_side[events.item_id] == user_side[events.user_id]).groupby(events.level).mean()
    for level, items in noisy.items.groupby("reliability").item_id:
        of_each = (item_side[items][:, None] == np.unique(user_side[1:])).mean(axis=0)
        own = of_each[np.searchsorted(np.unique(user_side[1:]), user_side[events.user_id[events.level == level]])]
        assert agrees[level] == pytest.approx(level + (1 - level) * own.mean(), abs=0.04)


def test_without_focus_popularity_alone_decides():
    seed = 2
    config = SyntheticConfig(num_users=4000, num_items=40, mean_length=5, focus=0.0, zipf=1.5, seed=seed)
    first = generate(config).events.drop_duplicates("user_id").item_id
    share = np.arange(1, 41) ** -1.5
    expected = 4000 * share / share.sum()
    found = np.sort(np.bincount(first, minlength=41)[1:])[::-1]
    assert (abs(found - expected) < 5 * np.sqrt(expected)).all()


def test_histories_are_as_long_and_users_as_reliable_in_blocks_of_users(monkeypatch):
    config = SyntheticConfig(num_users=150, num_items=80, mean_length=10, user_reliabilities=(1.0, 0.05))
    whole = generate(config)
    monkeypatch.setattr("recbft.datasets.synth.BLOCK_CELLS", 7 * 80)
    parts = generate(config)
    same = ["user_id", "reliability", "num_events"]
    pd.testing.assert_frame_equal(parts.users[same], whole.users[same])
    for made in (whole, parts):
        lengths = made.events.user_id.value_counts().sort_index()
        assert lengths.tolist() == made.users.num_events.tolist()
        assert (lengths.min(), lengths.max()) == (5, 20), "the longest history has a quarter of the items"
        shares = made.users.groupby("reliability").taste_share.mean()
        assert shares[0.05] < 0.2 < 0.6 < shares[1.0]
    assert not parts.events.duplicated(["user_id", "item_id"]).any()


def test_events_and_truth_are_written_side_by_side(tmp_path):
    made = generate(SyntheticConfig(num_users=30, num_items=60, mean_length=6))
    paths = save_synthetic(made, tmp_path / "toy.parquet")
    assert [path.name for path in paths] == ["toy.parquet", "toy.truth-items.parquet", "toy.truth-users.parquet"]
    for path, table in zip(paths, made, strict=True):
        pd.testing.assert_frame_equal(pd.read_parquet(path), table)
    assert Dataset.load(tmp_path / "toy.parquet", time="timestamp").num_users == 30
    with pytest.raises(UserError, match=r"synthetic data is written as Parquet; let its name end in \.parquet"):
        save_synthetic(made, tmp_path / "toy.csv")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_users": 0}, "num_users is 0; it must be >= 1"),
        ({"num_items": 10}, "num_items is 10; it must be >= 20"),
        ({"mean_length": 3}, "mean_length is 3; it must be between 5 and"),
        ({"focus": -1}, "focus is -1; it must be between 0 and 1e[+]30"),
        ({"seed": -1}, "seed is -1; it must be >= 0"),
        ({"zipf": -0.1}, "zipf is -0.1; it must be between 0 and 14.9 with this num_items"),
        ({"num_factors": 0}, "num_factors is 0; it must be >= 1"),
        ({"drift_days": 0}, "drift_days is 0; it must be > 0"),
        ({"user_shares": (0.5, 0.4)}, "user_shares is .*; it must be one share per level"),
        ({"item_reliabilities": (1.0, 0.0)}, r"item_reliabilities is \(1.0, 0.0\); it must be in \(0, 1\]"),
    ],
)
def test_a_config_checks_its_values(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        SyntheticConfig(**settings)


@pytest.mark.parametrize(("focus", "zipf"), [(80.0, 3.0), (0.0, 27.9), (1e30, 27.9)])
def test_extreme_configs_never_give_an_item_twice(focus, zipf):
    config = SyntheticConfig(num_users=40, num_items=40, mean_length=5, focus=focus, zipf=zipf)
    assert not generate(config).events.duplicated(["user_id", "item_id"]).any()


@pytest.fixture(scope="module")
def small():
    return generate(SyntheticConfig(num_users=60, num_items=50, mean_length=6, seed=2))


@pytest.fixture(scope="module")
def synthetic():
    return Dataset.load("synthetic")


def test_a_saved_data_set_has_its_truth_beside_it(small, tmp_path):
    save_synthetic(small, tmp_path / "made.parquet")
    dataset = Dataset.load(tmp_path / "made.parquet", time="timestamp", preparation=Preparation(k_core=3))
    found = planted_reliability(dataset, tmp_path / "made.parquet")
    assert dataset.num_items < 50
    items = dict(zip(small.items["item_id"], small.items["reliability"], strict=True))
    users = dict(zip(small.users["user_id"], small.users["reliability"], strict=True))
    assert found.items.tolist() == [items[item] for item in dataset.item_ids]
    assert found.users.tolist() == [users[user] for user in dataset.user_ids]


def test_a_data_set_named_in_its_root_has_its_truth_there_and_ids_may_have_become_text(small, tmp_path):
    save_synthetic(small, tmp_path / "made.parquet")
    dataset = Dataset.load("made", data_root=tmp_path, time="timestamp")
    assert planted_reliability(dataset, "made") is None
    found = planted_reliability(dataset, "made", tmp_path)
    assert np.isin(found.users, [0.4, 1.0]).all()
    texts = Dataset.from_frame(small.events.astype({"user_id": str, "item_id": str}), time="timestamp")
    of_texts = planted_reliability(texts, tmp_path / "made.parquet")
    assert of_texts.items.tolist() == found.items.tolist() and of_texts.users.tolist() == found.users.tolist()


def test_ids_without_truth_are_nan(small, tmp_path):
    save_synthetic(small._replace(items=small.items[small.items["item_id"] != 7]), tmp_path / "made.parquet")
    dataset = Dataset.from_frame(small.events, time="timestamp")
    found = planted_reliability(dataset, tmp_path / "made.parquet").items
    assert np.flatnonzero(np.isnan(found)).tolist() == np.flatnonzero(dataset.item_ids == 7).tolist()


def test_the_generated_data_set_s_truth_is_generated_again(synthetic):
    found = planted_reliability(synthetic, "synthetic")
    assert found.items.size == 1000 and found.users.size == 2000
    assert pd.Series(found.items).value_counts().to_dict() == {1.0: 700, 0.5: 150, 0.2: 150}


def test_other_data_of_that_name_has_no_truth(small, synthetic, tmp_path):
    assert planted_reliability(synthetic_dataset(SyntheticConfig(num_users=30, seed=1)), "synthetic") is None
    assert planted_reliability(replace(synthetic, items=synthetic.items[::-1]), "synthetic") is None
    dataset = Dataset.from_frame(small.events)
    assert planted_reliability(dataset, tmp_path / "other.parquet") is None
    assert planted_reliability(dataset, "frame") is None
