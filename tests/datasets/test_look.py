"""What a file holds is guessed so that the settings read it, whoever wrote it."""

from __future__ import annotations

import gzip
import json
import shlex

import numpy as np
import pandas as pd
import pytest

from recbft.datasets import Dataset
from recbft.datasets.look import look
from recbft.errors import UserError

USERS, EVENTS = 12, 6
RNG = np.random.default_rng(0)
LOG = pd.DataFrame(
    {
        "user": np.repeat([f"u{n}" for n in RNG.permutation(USERS)], EVENTS),
        "item": RNG.integers(0, 30, USERS * EVENTS),
        "rating": RNG.integers(1, 6, USERS * EVENTS),
        "seconds": 1_700_000_000 + 1000 * np.tile(np.arange(EVENTS), USERS),
    }
)
LOG["when"] = pd.to_datetime(LOG.seconds, unit="s").dt.strftime("%Y-%m-%d %H:%M:%S")
LOG["day"] = LOG.when.str[:10]
LOG["half"], LOG["none"] = LOG.rating / 2, ""
LOG["action"] = np.where(LOG.rating > 1, "buy", "view")


def text(columns, separator=",", header=None):
    rows = LOG[columns].astype(str).agg(separator.join, axis=1)
    return "\n".join([*([separator.join(header)] if header else []), *rows, ""])


JSON = LOG.rename(columns={"user": "customer", "item": "sku"})[["when", "sku", "customer"]].to_json(
    orient="records", lines=True
)
ALL = ["user", "item", "rating", "seconds"]
FILES = {
    "plain.csv": (text(ALL, ",", ["user_id", "item_id", "rating", "timestamp"]), {"time": "timestamp"}),
    "shop.csv": (
        text(["day", "item", "user", "when"], ";", ["date", "Stock Code", "Customer ID", "InvoiceDate"]),
        {"separator": ";", "user": "Customer ID", "item": "Stock Code", "time": "InvoiceDate"},
    ),
    "u.data": (
        text(ALL, "\t"),
        {"separator": "\t", "columns": ("user_id", "item_id", "rating", "timestamp"), "time": "timestamp"},
    ),
    "ratings.dat": (
        text(ALL, "::"),
        {"separator": "::", "columns": ("user_id", "item_id", "rating", "timestamp"), "time": "timestamp"},
    ),
    "halves.csv": (
        text(["user", "item", "half", "seconds"]),
        {"columns": ("user_id", "item_id", "rating", "timestamp"), "time": "timestamp"},
    ),
    "blank.csv": (
        text(["user", "item", "seconds", "none", "none"], ",", ["userId", "movieId", "timestamp", "", ""]),
        {"user": "userId", "item": "movieId", "time": "timestamp"},
    ),
    "headless.csv": (
        text(["user", "item", "when"]),
        {"columns": ("user_id", "item_id", "timestamp"), "time": "timestamp"},
    ),
    "spaces.txt": (
        text(["user", "item", "rating"], " "),
        {"separator": " ", "columns": ("user_id", "item_id", "rating")},
    ),
    "pairs.txt": (text(["user", "item"], " "), {}),
    "a.inter": (
        text(["user", "item", "seconds"], "\t", ["user_id:token", "item_id:token", "timestamp:float"]),
        {"time": "timestamp"},
    ),
    "log.jsonl": (JSON, {"user": "customer", "item": "sku", "time": "when"}),
    "log.jsonl.gz": (JSON, {"user": "customer", "item": "sku", "time": "when"}),
    "visits.csv": (text(["user", "item"], ",", ["session_id", "item_id"]), {"session": "session_id"}),
    "orders.csv": (
        LOG.assign(row=range(len(LOG)))
        .rename(columns={"row": "item_id", "user": "user_id", "item": "sku"})[["item_id", "user_id", "sku"]]
        .to_csv(index=False),
        {"item": "sku"},
    ),
    "odd.tsv": (text(["user", "item"], "\t", ["none", "a: b"]), {"user": "none", "item": "a: b"}),
}


@pytest.mark.parametrize("name", FILES)
def test_the_settings_that_read_a_file_are_found_and_printed(tmp_path, name):
    content, settings = FILES[name]
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    found = look(path)
    assert found.problem is None
    seen = {key: getattr(found.config, key) for key in ("user", "item", "time", "session", "separator", "columns")}
    assert {key: value for key, value in seen.items() if value is not None} == settings
    assert (found.dataset.num_users, found.dataset.num_events) == (USERS, USERS * EVENTS)
    words = shlex.split(found.command())
    assert words[:4] == ["recbft", "train", "-d", str(path)]
    options = {option.removeprefix("--"): value for option, value in zip(words[4::2], words[5::2], strict=True)}
    assert options.keys() == settings.keys()
    if "columns" in options:
        options["columns"] = options["columns"].split(",")
    assert Dataset.load(path, **options).content_hash == found.dataset.content_hash
    assert len(found.sample) == 10


@pytest.mark.parametrize("form", ["{}", "{}/*.parquet"])
def test_a_folder_of_parts_is_looked_at_as_one(tmp_path, form):
    (tmp_path / "log").mkdir()
    for number in range(2):
        part = LOG.iloc[36 * number : 36 * number + 36].rename(columns={"user": "visitor_id", "item": "product_id"})
        part[["visitor_id", "product_id", "when"]].to_parquet(tmp_path / "log" / f"{number}.parquet")
    found = look(form.format(tmp_path / "log"))
    assert found.form == "2 files, Parquet" and found.dataset.num_events == 72
    assert (found.config.user, found.config.item, found.config.time) == ("visitor_id", "product_id", "when")


@pytest.mark.parametrize(
    ("at", "fault", "message"),
    [
        (50, "unknown", "row 51: column 'day' holds 'unknown', but write all dates alike"),
        (50, "2024-01-31T12:30:00", "row 51: column 'day' holds '2024-01-31T12:30:00', but write"),
        (0, "", "row 1: column 'day' holds '', but a time may not be blank"),
    ],
)
def test_a_faulty_date_does_not_leave_the_rows_unordered(tmp_path, at, fault, message):
    days = [f"2024-01-{1 + n % 28:02}T12:30:00Z" for n in range(len(LOG))]
    days[at] = fault
    LOG[["user", "item"]].assign(day=days).to_csv(tmp_path / "a.csv", index=False)
    found = look(tmp_path / "a.csv")
    assert found.config.time == "day" and message in found.problem


def test_dates_that_are_not_read_are_noted_whatever_their_column_is_called(tmp_path):
    LOG[["user", "item"]].assign(day="13/03/2025 17:13").to_csv(tmp_path / "a.csv", index=False)
    assert (
        "column 'day' looks like one of times, and '13/03/2025 17:13' is not read" in look(tmp_path / "a.csv").notes[0]
    )


def test_what_is_worth_knowing_is_noted(tmp_path):
    LOG.assign(date="31.01.2024", session_id=1)[["user", "date", "action", "item", "session_id"]].to_csv(
        tmp_path / "a.csv", index=False
    )
    notes = "\n".join(look(tmp_path / "a.csv").notes)
    assert "column 'date' is called as one of times, and '31.01.2024' is not read as one; write it like" in notes
    assert "column 'action' holds buy, view: to train on one of these add --set 'where=action = buy'" in notes
    assert "column 'session_id' holds sessions: add --session session_id to train on these" in notes
    LOG[["rating", "user", "item"]].set_axis(["stars", "a", "b"], axis=1).to_csv(tmp_path / "b.csv", index=False)
    found = look(tmp_path / "b.csv")
    assert "column 'stars' is taken for the users by its place alone" in found.notes


def test_what_cannot_be_read_is_said(tmp_path):
    (tmp_path / "short.csv").write_text("user_id,item_id\n1,2\n2,3\n")
    found = look(tmp_path / "short.csv")
    assert found.dataset is None and "no user has 3 events" in found.problem
    (tmp_path / "one.csv").write_text("user_id\n1\n")
    with pytest.raises(
        UserError, match=r"one\.csv: its columns are user_id, and a file of events has one of users and o"
    ):
        look(tmp_path / "one.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(UserError, match=r"empty\.csv: the file is empty"):
        look(tmp_path / "empty.csv")
    (tmp_path / "cut.jsonl").write_text(json.dumps({"a": 1}) + "\nnot JSON\n")
    with pytest.raises(UserError, match=r"cut\.jsonl: its columns are a, and a file of events has"):
        look(tmp_path / "cut.jsonl")
    (tmp_path / "array.json").write_text(json.dumps([{"user_id": 1, "item_id": 2}]))
    with pytest.raises(UserError, match=r"array\.json: none of its first lines is a JSON object"):
        look(tmp_path / "array.json")


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl", ".item"])
def test_a_table_of_items_is_told_from_events(tmp_path, ending):
    items = pd.DataFrame({"item_id": range(8), "genre": list("abababab"), "vector": [[0.5, 1.5]] * 8})
    path = tmp_path / f"items{ending}"
    if ending == ".parquet":
        items.to_parquet(path)
    elif ending == ".jsonl":
        items.to_json(path, orient="records", lines=True)
    elif ending == ".csv":
        items[["item_id", "genre"]].to_csv(path, index=False)
    else:
        path.write_text("item_id:token\tgenre:token_seq\n1\ta b\n2\tc\n")
    found = look(path)
    assert len(found.sample) >= 2 and (ending == ".item") == (found.problem is not None)
    said = found.problem or "\n".join(found.notes)
    assert ("holds features of items" if found.problem else "a table of items is given with --items") in said
