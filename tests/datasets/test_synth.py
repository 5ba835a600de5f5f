"""The generated log has the structure it claims: popularity, taste that can be learned, reliability that is true."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset, SyntheticConfig, generate, leave_one_out, save_synthetic, synthetic_dataset
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


def test_popularity_falls_with_rank(made):
    counts = np.sort(made.items.num_events)[::-1]
    assert counts[0] > 5 * counts[len(counts) // 2] > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_reliability_is_the_share_of_events_that_follow_taste(seed):
    config = SyntheticConfig(seed=seed, user_reliabilities=(1.0,), user_shares=(1.0,))
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


@pytest.mark.parametrize("seed", [0, 1])
def test_what_came_before_predicts_what_comes_next_far_better_than_popularity(seed):
    dataset = synthetic_dataset(SyntheticConfig(seed=seed))
    split, V = leave_one_out(dataset), dataset.num_items
    followed = np.zeros((V + 1, V + 1))
    for start, stop in zip(split.training_start, split.training_stop, strict=True):
        history = dataset.items[start:stop]
        for lag in range(1, min(6, len(history))):
            np.add.at(followed, (history[:-lag], history[lag:]), 1 / lag)
            np.add.at(followed, (history[lag:], history[:-lag]), 1 / lag)
    followed /= np.maximum(followed.sum(axis=1, keepdims=True), 1)
    popularity = dataset.training_counts.astype(float)
    hits = {"popularity": 0, "neighbours": 0}
    for start, stop, target in zip(*split.test, strict=True):
        history = dataset.items[start:stop]
        recent = history[::-1][:8]
        for name, scores in (
            ("popularity", popularity.copy()),
            ("neighbours", 0.85 ** np.arange(len(recent)) @ followed[recent] + 1e-6 * popularity),
        ):
            scores[history] = scores[0] = -1
            hits[name] += (scores >= scores[target]).sum() <= 10
    assert hits["neighbours"] > 1.8 * hits["popularity"]


def test_events_and_truth_are_written_side_by_side(tmp_path):
    made = generate(SyntheticConfig(num_users=30, num_items=60, mean_length=6))
    paths = save_synthetic(made, tmp_path / "toy.parquet")
    assert [path.name for path in paths] == ["toy.parquet", "toy.truth-items.parquet", "toy.truth-users.parquet"]
    for path, table in zip(paths, made, strict=True):
        pd.testing.assert_frame_equal(pd.read_parquet(path), table)
    assert Dataset.load(tmp_path / "toy.parquet", time="timestamp").num_users == 30
    with pytest.raises(UserError, match=r"synthetic data is written as Parquet; let its name end in \.parquet"):
        save_synthetic(made, tmp_path / "toy.csv")


def test_the_synthetic_data_set_is_loaded_by_name():
    dataset = Dataset.load("synthetic")
    assert dataset.name == "synthetic" and dataset.num_users == 2000 and dataset.times is not None


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_users": 0}, "num_users is 0; it must be >= 1"),
        ({"num_items": 10}, "num_items is 10; it must be >= 20"),
        ({"mean_length": 3}, "mean_length is 3; it must be between 5 and"),
        ({"focus": -1}, "focus is -1; it must be >= 0"),
        ({"item_reliabilities": (1.0, 0.0)}, r"item_reliabilities is \(1.0, 0.0\); it must be in \(0, 1\]"),
        ({"user_shares": (0.5, 0.6)}, r"user_shares is \(0.5, 0.6\); it must be one share per level"),
    ],
)
def test_a_config_checks_its_values(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        SyntheticConfig(**settings)


def test_extreme_configs_never_give_an_item_twice():
    config = SyntheticConfig(num_users=40, num_items=40, mean_length=5, focus=80.0, zipf=3.0)
    assert not generate(config).events.duplicated(["user_id", "item_id"]).any()
