"""Data sets by name: where they are looked for, what is checked, what a user is told."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import replace

import pandas as pd
import pytest

from recbft.datasets import (
    Dataset,
    Preparation,
    card,
    card_names,
    default_dataset,
    is_available,
    loading,
)
from recbft.datasets.config import DataConfig
from recbft.datasets.loading import Counts, find
from recbft.errors import UserError

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"


@pytest.fixture(autouse=True)
def _no_data_root(monkeypatch):
    monkeypatch.delenv("RECBFT_DATA_ROOT", raising=False)


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    """A package called recbole that carries a small ml-100k and must not be imported."""
    folder = tmp_path / "site" / "recbole"
    (folder / "dataset_example" / "ml-100k").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('recbole was imported')")
    rows = ["1\t9\t3\t881250949", "1\t8\t3\t881250948", "2\t9\t1\t5", "1\t7\t5\t881250947", "2\t8\t1\t5", "2\t7\t1\t5"]
    (folder / "dataset_example" / "ml-100k" / "ml-100k.inter").write_text(INTER + "\n".join(rows) + "\n")
    monkeypatch.delitem(sys.modules, "recbole", raising=False)  # another test may have imported the real one
    monkeypatch.syspath_prepend(str(folder.parent))


def without_recbole(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "recbole" else found(name))


def test_there_is_a_card_for_each_published_data_set():
    amazon = [f"amazon-{name}" for name in ("beauty", "games", "instruments", "sports", "toys")]
    assert card_names() == [*amazon, "ml-100k", "ml-1m"]
    for name in card_names():
        known = card(name)
        assert known.name == name
        assert known.source.startswith("https://")
        assert known.title and known.licence and known.how_to_get and known.files


def test_an_unknown_name_is_refused_with_the_nearest_and_the_list():
    told = r"unknown data set 'amazon-buty'; did you mean 'amazon-beauty'\? \(data sets: .*toys.*, or give a file"
    for ask in (Dataset.load, card):
        with pytest.raises(UserError, match=told):
            ask("amazon-buty")


def test_a_known_name_without_a_file_says_what_was_looked_for_and_how_to_get_it(tmp_path, monkeypatch):
    expected = (
        r"data set 'amazon-games' not found; looked for amazon-games\.parquet, .*reviews_Video_Games_5\.json\.gz.* "
        r"{}; put reviews_Video_Games_5\.json\.gz from https://"
    )
    with pytest.raises(
        UserError, match=expected.format(r"but no data root is set \(--data-root or RECBFT_DATA_ROOT\)")
    ):
        Dataset.load("amazon-games")
    with pytest.raises(UserError, match=expected.format(f"under {tmp_path}")):
        Dataset.load("amazon-games", data_root=tmp_path)
    monkeypatch.setenv("RECBFT_DATA_ROOT", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"gone: the data root \(from RECBFT_DATA_ROOT\) is not a folder"):
        Dataset.load("amazon-games")
    for missing in ("missing.csv", "~nobody-here/a.csv"):
        with pytest.raises(UserError, match=rf"{missing}: no such file"):
            Dataset.load(missing)


def test_counts_that_differ_from_the_card_are_a_warning_naming_both(tmp_path, monkeypatch):
    rows = [
        f'{{"reviewerID": "A{u}", "asin": "B{i}", "unixReviewTime": {i}, "reviewText": "x"}}'
        for u in range(2)
        for i in range(4)
    ]
    (tmp_path / "reviews_Video_Games_5.json").write_text("\n".join(rows))
    monkeypatch.setenv("RECBFT_DATA_ROOT", str(tmp_path))
    expected = "expects 24,303 users, 10,672 items, 231,780 events, but the file gives 2 users, 4 items, 8 events"
    with pytest.warns(UserWarning, match=expected):
        dataset = Dataset.load("amazon-games")
    assert dataset.name == "amazon-games" and dataset.times.tolist() == [0, 1, 2, 3] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filtered = Dataset.load("amazon-games", preparation=Preparation(where="unixReviewTime>=1"))
    assert filtered.num_events == 6, "with filters of one's own other counts are expected"


def test_events_that_differ_where_counts_agree_are_told_by_their_hash(tmp_path, monkeypatch):
    (tmp_path / "reviews_Video_Games_5.json").write_text(
        "\n".join(f'{{"reviewerID": "A", "asin": "B{i}", "unixReviewTime": {i}}}' for i in range(4))
    )
    games = replace(card("amazon-games"), expected=Counts(users=1, items=4, events=4))
    path, file = find(games, tmp_path)
    monkeypatch.setattr(loading, "card", lambda name: games)
    for known in (None, "0" * 64):
        monkeypatch.setattr(loading, "find", lambda card, root, known=known: (path, replace(file, content_hash=known)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            content_hash = Dataset.load("amazon-games", data_root=tmp_path).content_hash
        told = f"content hash begins {content_hash[:12]}, not 000000000000: events, order or times differ"
        assert [told in str(warning.message) for warning in caught] == [True] * (known is not None)
    monkeypatch.setattr(loading, "find", lambda card, root: (path, replace(file, content_hash=content_hash)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.load("amazon-games", data_root=tmp_path)


def test_the_data_set_that_recbole_carries_is_sorted_by_exact_time_without_importing_it(bundled):
    assert is_available(card("ml-100k"))
    with pytest.warns(UserWarning, match="expects 943 users, 1,682 items, 100,000 events"):
        dataset = Dataset.load("ml-100k")
    assert dataset.decode(dataset.items).tolist() == [7, 8, 9, 9, 8, 7]
    assert dataset.times.tolist() == [881250947, 881250948, 881250949, 5, 5, 5]
    assert default_dataset() == ("ml-100k", None)
    assert "recbole" not in sys.modules


def test_the_default_is_synthetic_with_a_notice_where_recbole_is_missing(monkeypatch):
    without_recbole(monkeypatch)
    name, notice = default_dataset()
    assert name == "synthetic" and "RecBole, which carries it, is not installed" in notice


def test_the_default_is_looked_for_where_the_config_says_that_data_lie(tmp_path, monkeypatch):
    without_recbole(monkeypatch)
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "ml-100k.inter").write_text(INTER + "1\t2\t3\t4\n" * 3)
    config = DataConfig(data_root=str(tmp_path))
    assert config.resolved().dataset == "ml-100k"
    with pytest.warns(UserWarning, match="expects 943 users"):
        assert config.load().num_events == 3


def test_a_name_without_card_is_looked_for_under_the_data_root(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.inter").write_text(INTER + "1\t2\t3\t4\n" * 3)
    pd.DataFrame({"user_id": [1] * 4, "item_id": [2] * 4}).to_csv(tmp_path / "other.csv", index=False)
    assert Dataset.load("mine", data_root=tmp_path).num_events == 3
    assert Dataset.load("other", data_root=tmp_path).num_events == 4
    (tmp_path / "sub").mkdir()
    (tmp_path / "other.csv").rename(tmp_path / "sub" / "other.csv")
    with pytest.raises(UserError, match="sub/other: unknown file ending ''"):  # a path, of where the program runs
        Dataset.load("sub/other", data_root=tmp_path)


def test_a_data_set_prepared_under_its_card_name_is_found_again(tmp_path):
    (tmp_path / "Beauty.txt").write_text("1 1 2 3 4\n2 1 2 3\n")
    hashes = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="expects 22,363 users"):
            dataset = Dataset.load("amazon-beauty", data_root=tmp_path)
        dataset.save(tmp_path / "amazon-beauty.parquet")
        (tmp_path / "Beauty.txt").unlink(missing_ok=True)
        hashes.append((dataset.content_hash, dataset.times))
    assert hashes[0] == hashes[1]


@pytest.mark.filterwarnings("ignore:.* expects 6,040 users")
def test_a_run_finds_a_card_s_data_again_as_they_were_asked_for(tmp_path):
    (tmp_path / "ml-1m").mkdir()
    rows = [f"{user}::{item}::{5 - user % 2}::{100 - item}" for user in range(1, 9) for item in range(user % 3, 9)]
    (tmp_path / "ml-1m" / "ratings.dat").write_text("\n".join([*rows, ""]))
    usual = Dataset.load("ml-1m", data_root=tmp_path)
    assert set(usual.item_ids) == set(range(1, 9)), "item 0 has fewer than 5 events"
    by_rating = Dataset.load("ml-1m", data_root=tmp_path, time="rating")
    fewer = Dataset.load("ml-1m", data_root=tmp_path, preparation=Preparation(min_user_events=8, where="rating>4"))
    assert len({data.content_hash for data in (usual, by_rating, fewer)}) == 3 and usual.columns == {}
    for data in (usual, by_rating, fewer):
        assert DataConfig.behind(data, data_root=str(tmp_path)).load().content_hash == data.content_hash


def test_settings_that_the_synthetic_data_set_lacks_are_refused():
    with pytest.raises(UserError, match="the synthetic data set has no file: columns and filters do not apply"):
        Dataset.load("synthetic", time="timestamp")
    with pytest.raises(UserError, match="the synthetic data set has no file"):
        Dataset.load("synthetic", preparation=Preparation(k_core=5))
    assert Dataset.load("synthetic").num_users == 2000
