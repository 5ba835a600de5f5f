"""Features: kinds guessed and named, files of every format, the vocabulary, hashes and what is refused."""

from __future__ import annotations

import gzip
import json
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recbft.config.fields import from_dict
from recbft.datasets import Dataset, ItemFeatures
from recbft.datasets.config import DataConfig
from recbft.errors import UserError
from recbft.evaluation.metrics import protocol

TITLES = ["Toy Story (1995)", "Heat of the Night, The", "Jumanji, or so", "A Few Good Men", "Sense and Sensibility"]
EVENTS = pd.DataFrame({"user_id": ["u"] * 4 + ["v"] * 3, "item_id": [5, 2, 9, 5, 2, 9, 2]})


def movies():
    """Five items, of which the events have 2 and 5, and not 9."""
    return pd.DataFrame(
        {
            "item_id": [2, 3, 5, 7, 8],
            "title": TITLES,
            "genres": ["Comedy|Drama", "Drama", "Comedy|Drama", "Drama|Comedy", None],
            "colour": ["red", "blue", "red", "red", None],
            "year": [1995, 1995, 1967, np.nan, 1996],
            "tags": [["b", "a", "b"], [], None, ["c"], ["a"]],
            "embedding": [[1.0, 2.0], [0.5, 1.0], None, [2.0, 2.0], [np.nan, np.nan]],
        }
    )


def column(features, name):
    return features.table[name].to_pylist()


def test_kinds_are_guessed_and_values_canonical():
    features = ItemFeatures.from_frame(movies())
    assert features.kinds == {
        "title": "words", "genres": "set", "colour": "category", "year": "number", "tags": "set", "embedding": "vector"
    }  # fmt: skip
    assert column(features, "genres") == [
        ["Comedy", "Drama"],
        ["Drama"],
        ["Comedy", "Drama"],
        ["Comedy", "Drama"],
        None,
    ]
    assert column(features, "tags") == [["a", "b"], None, None, ["c"], ["a"]]
    assert column(features, "year") == [1995, 1995, 1967, None, 1996]
    assert column(features, "embedding") == [[1, 2], [0.5, 1], None, [2, 2], None]
    assert features.covered.all() and repr(features).startswith("<ItemFeatures of 5 items: title (words), genres (set)")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", ""], "number"),
        (["007", "008", "009"], "category"),  # codes
        (pd.Categorical([1, 2, 1]), "category"),
        ([True, False, True], "category"),
        (pd.to_datetime(["2020-01-01", None, "2021-01-01"]), "number"),
        ([[1, 2], [2], [3]], "set"),
        (["Estée Lauder", "Estée Lauder", "Max Factor"] * 4, "category"),  # several words, few values
    ],
)
def test_the_kind_is_guessed_from_type_and_values(values, kind):
    frame = pd.DataFrame({"item_id": range(len(values)), "x": values})
    assert ItemFeatures.from_frame(frame).kinds == {"x": kind}


def test_kinds_may_be_named_and_say_the_ids_and_what_to_skip():
    frame = movies().rename(columns={"item_id": "movie"})
    kinds = {"movie": "id", "title": "set:,", "year": "category", "embedding": "skip", "tags": "skip"}
    features = ItemFeatures.from_frame(frame, kinds=kinds)
    assert features.kinds == {"title": "set", "genres": "set", "colour": "category", "year": "category"}
    assert column(features, "title")[1] == ["Heat of the Night", "The"]
    assert column(features, "year") == ["1995", "1995", "1967", None, "1996"]


def write(path, frame):
    text = frame.assign(tags=frame["tags"].map(lambda tags: "; ".join(tags) if isinstance(tags, list) else ""))
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        path.write_text("\n".join(json.dumps(row) for row in rows))
    else:
        text.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return path


@pytest.mark.parametrize("name", ["items.csv", "items.tsv.gz", "items.jsonl", "items.parquet"])
def test_every_format_gives_the_same_features(tmp_path, name):
    frame = movies().drop(columns="embedding")
    read = ItemFeatures.read(write(tmp_path / name, frame), kinds={"tags": "set:;"} if "sv" in name else None)
    assert read.hash == ItemFeatures.from_frame(frame).hash
    assert read.files == (str(tmp_path / name),)


def test_recbole_items_have_the_kinds_of_their_header(tmp_path):
    header = "item_id:token\ttitle:token_seq\tyear:token\tprice:float\temb:float_seq"
    lines = [header, "1\tToy Story\t1995\t2.5\t1 2", "2\t\t\t\t"]
    (tmp_path / "x.item.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    features = ItemFeatures.read(tmp_path / "x.item.gz")
    assert features.kinds == {"title": "set", "year": "category", "price": "number", "emb": "vector"}
    assert [column(features, name)[0] for name in features.kinds] == [["Story", "Toy"], "1995", 2.5, [1, 2]]
    assert features.covered.tolist() == [True, False]
    assert ItemFeatures.read(tmp_path / "x.item.gz", kinds={"title": "words"}).kinds["title"] == "words"


def test_lists_are_read_from_text_as_pandas_and_numpy_write_them(tmp_path):
    values, tags = [[0.5, -1.0], [1e-7, 2.0], None, [3.25, 4.0]], [["tea", "women's"], ["cups"], None, ["tea", "a b"]]
    frame = pd.DataFrame({"item_id": list("abcd"), "v": values, "tags": tags})
    frame["n"] = [None if one is None else str(np.array(one)) for one in values]
    frame["bare"] = [None if one is None else ", ".join(map(str, one)) for one in values]
    frame.to_csv(tmp_path / "items.csv", index=False)
    features = ItemFeatures.read(tmp_path / "items.csv", kinds={"bare": "vector"})
    assert features.kinds == {"v": "vector", "tags": "set", "n": "vector", "bare": "vector"}
    for name in ("v", "n", "bare"):
        found = column(features, name)
        assert found[2] is None and [found[n] for n in (0, 1, 3)] == [pytest.approx(values[n]) for n in (0, 1, 3)]
    assert column(features, "tags") == [["tea", "women's"], ["cups"], None, ["a b", "tea"]]


def test_vectors_stand_beside_the_rows_of_a_table(tmp_path):
    write(tmp_path / "ids.csv", movies())
    np.save(tmp_path / "image.npy", np.arange(10.0).reshape(5, 2))
    features = ItemFeatures.read([tmp_path / "ids.csv", tmp_path / "image.npy"], kinds={"embedding": "skip"})
    assert features.kinds["image"] == "vector" and column(features, "image")[4] == [8, 9]
    np.save(tmp_path / "image.npy", np.ones((4, 2)))
    with pytest.raises(UserError, match=r"vectors 'image' have 4 rows and the items 5; give one row per item"):
        ItemFeatures.read([tmp_path / "ids.csv", tmp_path / "image.npy"], kinds={"embedding": "skip"})


def test_items_without_events_follow_in_the_order_of_the_features():
    plain = Dataset.from_frame(EVENTS)
    dataset = Dataset.from_frame(EVENTS, items=movies())
    assert dataset.item_ids.tolist() == [5, 2, 9, 3, 7, 8] and dataset.items.tolist() == plain.items.tolist()
    assert dataset.training_counts.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert column(dataset.features, "colour") == ["red", "red", None, "blue", "red", None]
    assert dataset.features.covered.tolist() == [True, True, False, True, True, True]
    record = dataset.preparation["features"]
    assert (record["items_without_events"], record["items_without_features"]) == (3, 1)


@pytest.mark.parametrize(
    ("ids", "more", "joined"),
    [
        ([1, 2], ["3", "2", "1"], [1, 2, 3]),
        ([1, 2], ["x", "2", "1"], ["1", "2", "x"]),
        ([1, 2], ["01", "2", "1"], ["1", "2", "01"]),
        (["a", "2"], [3, 2, 4], ["a", "2", "3", "4"]),
    ],
)
def test_ids_are_matched_by_their_text(ids, more, joined):
    events = pd.DataFrame({"user_id": [1, 1, 1], "item_id": [ids[0], ids[1], ids[0]]})
    features = pd.DataFrame({"item_id": more, "size": [1.0, 2.0, 4.0]})
    dataset = Dataset.from_frame(events, items=features)
    assert dataset.item_ids.tolist() == joined
    assert column(dataset.features, "size")[1] == 2
    assert (dataset.item_ids.dtype == object) == isinstance(joined[0], str)


def test_items_may_stand_in_parts_of_text_under_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "items").mkdir()
    movies().iloc[:3][["item_id", "colour"]].to_csv(tmp_path / "items" / "1.csv", index=False)
    movies().iloc[3:][["item_id", "colour"]].to_csv(tmp_path / "items" / "2.csv", index=False)
    features = ItemFeatures.read("~/items")
    assert features.ids.tolist() == [2, 3, 5, 7, 8], "whole numbers, as ids of events"
    dataset = Dataset.from_frame(EVENTS, items="~/items/*.csv")
    assert dataset.item_ids.tolist() == [5, 2, 9, 3, 7, 8] and dataset.features.hash == features.telling().hash


def test_hashes_name_the_features_and_nothing_else_changes():
    plain, dataset = Dataset.from_frame(EVENTS), Dataset.from_frame(EVENTS, items=movies())
    about = {"part": "test", "filter_seen": False, "max_length": 5, "seed": 0, "config": {}}
    assert "features_hash" not in protocol(plain, **about)
    assert protocol(dataset, **about)["features_hash"] == dataset.features.hash
    known = movies().query("item_id in (2, 5)")  # no new items: the events' hashes stay
    kept = Dataset.from_frame(EVENTS, items=known, item_kinds={"embedding": "skip", "colour": "skip", "genres": "skip"})
    assert (kept.content_hash, kept.target_hash) == (plain.content_hash, plain.target_hash)


def test_the_hash_sees_values_and_kinds_not_order_or_types(tmp_path):
    features = ItemFeatures.from_frame(movies())
    turned = movies().iloc[::-1, ::-1].assign(item_id=lambda frame: frame["item_id"].astype(str))
    assert ItemFeatures.from_frame(turned, kinds={"title": "words"}).hash == features.hash
    assert features.aligned(np.array([99, 8, 7, 5, 3, 2])).hash == features.hash
    codes = [ItemFeatures.from_frame(pd.DataFrame({"item_id": [1, 2], "x": x}), kinds={"x": "category"}).hash
             for x in ([7, 8], ["7", "8"], [7.0, 8.0])]  # fmt: skip
    assert len(set(codes)) == 1
    flags = pd.DataFrame({"item_id": [1, 2, 3], "x": [True, False, True], "y": [4.0, np.nan, 5.0]})
    flags.to_csv(tmp_path / "flags.csv", index=False)
    flags.to_parquet(tmp_path / "flags.parquet")
    asked = {"x": "category", "y": "category"}
    read = [ItemFeatures.read(tmp_path / f"flags.{end}", kinds=asked).hash for end in ("csv", "parquet")]
    assert len({*read, ItemFeatures.from_frame(flags, kinds=asked).hash}) == 1
    changed = [
        movies().assign(year=[1995, 1995, 1967, np.nan, 1997]),
        movies().assign(tags=[["b"], [], None, ["c"], ["a"]]),
        movies().assign(embedding=[[1.0, 2.5], [0.5, 1.0], None, [2.0, 2.0], None]),
        movies().rename(columns={"year": "date"}),
    ]
    hashes = {features.hash, *(ItemFeatures.from_frame(frame).hash for frame in changed)}
    hashes.add(ItemFeatures.from_frame(movies(), kinds={"year": "category"}).hash)
    assert len(hashes) == 6


def test_a_data_set_renumbered_takes_its_features_along():
    dataset = Dataset.from_frame(EVENTS, items=movies())
    other = Dataset.from_frame(EVENTS.iloc[::-1], items=movies())
    again = dataset.numbered_as(other.vocabulary)
    assert again.features.table.equals(other.features.table) and again.features.hash == dataset.features.hash


def test_a_set_that_is_missing_among_lists_of_a_fixed_size_is_missing():
    lists = pa.array([["x", "y"], None, ["y", "z"]], pa.list_(pa.string(), 2))
    found = ItemFeatures.from_frame(pa.table({"item_id": [1, 2, 3], "s": lists}))
    assert found.table.column("s").to_pylist() == [["x", "y"], None, ["y", "z"]]


def test_a_saved_data_set_holds_the_events_alone(tmp_path):
    Dataset.from_frame(EVENTS, items=movies()).save(tmp_path / "x.parquet")
    again = Dataset.load(tmp_path / "x.parquet")
    assert again.features is None and again.content_hash == Dataset.from_frame(EVENTS).content_hash
    assert "features" not in again.preparation


def test_a_config_reads_features_again(tmp_path, monkeypatch):
    EVENTS.to_csv(tmp_path / "events.csv", index=False)
    write(tmp_path / "movies.parquet", movies())
    np.save(tmp_path / "image.npy", np.eye(5))
    values = {"dataset": str(tmp_path / "events.csv"), "item_kinds": ["title=skip", "genres=set:|"]}
    config = from_dict(DataConfig, {**values, "items": ["movies.parquet", "image.npy"], "data_root": str(tmp_path)})
    dataset = config.load()
    assert list(dataset.features.kinds) == ["genres", "colour", "year", "tags", "embedding", "image"]
    behind = DataConfig.behind(dataset, data_root=str(tmp_path))
    assert (behind.items, behind.item_kinds) == (("movies.parquet", "image.npy"), ("title=skip", "genres=set:|"))
    config.check_prepared(dataset)
    with pytest.raises(UserError, match="a data set is given, which has no item features; give them to Dataset"):
        config.check_prepared(Dataset.from_frame(EVENTS))


def test_the_recbole_file_beside_the_events_is_read_where_asked_for(tmp_path):
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml/ml.inter").write_text("user_id:token\titem_id:token\nu\t1\nu\t2\nu\t1\n")
    assert Dataset.load("ml", data_root=tmp_path).features is None
    with pytest.raises(UserError, match=r"there is no \.item file beside .*ml\.inter; name the file of item features"):
        Dataset.load("ml", data_root=tmp_path, items="auto")
    (tmp_path / "ml/ml.item").write_text("item_id:token\tcolour:token\n1\tred\n2\tblue\n3\tred\n")
    dataset = Dataset.load("ml", data_root=tmp_path, items="auto")
    assert dataset.num_items == 3 and dataset.features.files == ("auto",)


def test_columns_that_tell_nothing_are_named_and_left_out():
    frame = movies().assign(one="x", code=list("vwxyz"), none=np.nan, single=3.0)
    with pytest.warns(UserWarning, match="left out, since that says nothing of an item") as said:
        dataset = Dataset.from_frame(EVENTS, items=frame)
    assert list(dataset.features.kinds) == ["title", "genres", "colour", "year", "tags", "embedding"]
    for what in (
        "'one' holds the same value, 'x', in every row",
        "'code' holds a different value in every row",
        "'none' holds no value",
        "'single' holds the same value",
    ):
        assert what in str(said[0].message)
    with warnings.catch_warnings(), pytest.raises(UserError, match="no column tells one item from another"):
        warnings.simplefilter("ignore")
        Dataset.from_frame(EVENTS, items=frame[["item_id", "one"]])


def test_columns_are_described():
    found = {column.name: column[1:] for column in ItemFeatures.from_frame(movies()).describe()}
    assert found["tags"] == ("set", 3, 3, "a, b") and found["year"] == ("number", 4, 3, "1995.0")
    assert found["embedding"] == ("vector", 3, 3, "2 numbers, 1, 2, ...")


@pytest.mark.parametrize(
    ("changes", "kinds", "message"),
    [
        ({"embedding": [[1.0, 2.0], [1.0], None, [2.0, 2.0], None]}, {}, "row 2: column 'embedding' holds 1 numbers"),
        ({"embedding": [[1.0, np.nan], [1.0, 1.0], None, None, None]}, {}, r"row 1: vector 'embedding' holds NaN or"),
        ({"year": [1, 2, np.inf, 4, 5]}, {}, "row 3: column 'year' holds inf, but a number must be finite"),
        ({"item_id": [2, 3, 5, 3, 2]}, {}, r"item 3 stands in rows 2 and 4 \(2 rows repeat an item\); keep one"),
        ({"item_id": ["a", None, "c", "d", "e"]}, {}, "row 2: column 'item_id' holds nothing, but an id may not"),
        ({"title": ["1", "2", "x", "4", "5"]}, {"title": "number"}, "row 3: column 'title' holds 'x', which is no"),
        ({}, {"colour": "colour"}, "the kind of column 'colour' is 'colour'; choose one of category, set, number"),
        ({}, {"title": "words:|"}, "the kind of column 'title' is 'words:|'; choose one of"),
        ({}, {"titel": "words"}, "no column 'titel'; did you mean 'title'?"),
        ({}, {"year": "set"}, "column 'year' has type double, but a set is a list or a text"),
        ({}, {"colour": "vector"}, "column 'colour' holds no vectors"),
        ({}, {"title": "id", "year": "id"}, "columns title, year are all said to hold the item ids; mark one"),
        ({"item_id": [91, 92, 93, 94, 95]}, {}, "none of its 5 item ids, such as 91, is an item of 'frame', such as 5"),
        ({"tags": [{"a": 1}] * 5}, {}, r"column 'tags' has type struct<a: int64>, which is no feature; .*tags=skip"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(changes, kinds, message):
    with pytest.raises(UserError, match=message.replace("|", r"\|").replace("?", r"\?")):
        Dataset.from_frame(EVENTS, items=movies().assign(**changes), item_kinds=kinds)


def test_tables_that_are_none_of_items_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"no column 'movieId' or 'item_id' with the item ids; .* --item-kind COLUMN=id in a shell"
    ):
        ItemFeatures.from_frame(movies().rename(columns={"item_id": "x"}), item="movieId")
    with pytest.raises(UserError, match="there is no column beside the item ids, 'item_id'"):
        ItemFeatures.from_frame(movies()[["item_id"]])
    with pytest.raises(UserError, match="there are no rows; give one per item"):
        ItemFeatures.from_frame(movies().iloc[:0])
    with pytest.raises(UserError, match=r"nothing\.csv: no such file"):
        ItemFeatures.read(tmp_path / "nothing.csv")
    with pytest.raises(UserError, match=r"a\.npy; give one table with item ids"):
        ItemFeatures.read("a.npy")
    (tmp_path / "a.npy").write_bytes(b"no array")
    write(tmp_path / "ids.csv", movies())
    with pytest.raises(UserError, match=r"a\.npy: is not an array of numbers"):
        ItemFeatures.read([tmp_path / "ids.csv", tmp_path / "a.npy"], kinds={"embedding": "skip"})
    for kinds in (["title"], ["title="], ["=words"]):
        with pytest.raises(UserError, match="cannot be read; write COLUMN=KIND, such as title=words"):
            DataConfig(items=("x.csv",), item_kinds=tuple(kinds))
    with pytest.raises(UserError, match="item_kinds has no effect without items"):
        DataConfig(item_kinds=("title=words",))


def test_frames_of_other_libraries_are_read():
    columns = {
        "item_id": ["2", "5"],
        "tags": pa.array([["a"], ["b"]], pa.large_list(pa.large_string())),
        "v": pa.array([[1, 2], None], pa.list_(pa.float32(), 2)),
        "c": pa.array(["x", "y"]).dictionary_encode(),
    }
    table = pa.table(columns)
    features = ItemFeatures.from_frame(table)
    assert features.kinds == {"tags": "set", "v": "vector", "c": "category"} and column(features, "v") == [[1, 2], None]


def test_parquet_columns_that_are_skipped_are_not_read(tmp_path):
    table = pa.table({"item_id": [1, 2], "x": [1.0, 2.0], "s": pa.array([{"a": 1}, {"a": 2}])})
    pq.write_table(table, tmp_path / "x.parquet")
    assert ItemFeatures.read(tmp_path / "x.parquet", kinds={"s": "skip"}).kinds == {"x": "number"}
