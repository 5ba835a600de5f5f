"""Every format gives the same table; every damage gives one line that names the file and the row."""

from __future__ import annotations

import csv
import gzip
import json
import re

import pandas as pd
import pytest

from recbft.datasets import Dataset, Preparation, formats, read_table
from recbft.datasets.formats import column_names, reading
from recbft.errors import RunError, UserError

ROWS = [("zoë b", "007", 5), ("zoë b", 'q"uote', 6), ("甲", "7", 7), ("zoë b", "Ünï", 8)]
WANTED = ["user_id", "item_id", "timestamp"]


def as_lines(separator, newline="\n", header=None):
    lines = [separator.join(map(str, row)) for row in ROWS]
    return newline.join([*([header] if header else []), *lines, ""])


def as_csv(newline="\n"):
    quoted = ['"q""uote"' if '"' in item else item for _, item, _ in ROWS]
    lines = [f"{user},{item},x,{time}" for (user, _, time), item in zip(ROWS, quoted, strict=True)]
    return newline.join(["user_id,item_id,other,timestamp", *lines, ""])


ATOMIC_HEADER = "user_id:token\titem_id:token\ttimestamp:float"
OBJECTS = "\n".join(json.dumps(dict(zip(WANTED, row, strict=True), extra=[1, 2])) for row in ROWS)
FILES = {
    "a.inter": as_lines("\t", header=ATOMIC_HEADER),
    "crlf.inter": as_lines("\t", "\r\n", header=ATOMIC_HEADER),
    "bom.inter": "\ufeff" + as_lines("\t", header=ATOMIC_HEADER),
    "cr.inter": as_lines("\t", "\r", header=ATOMIC_HEADER),
    "UPPER.INTER.GZ": as_lines("\t", header=ATOMIC_HEADER),
    "a.csv": as_csv(),
    "crlf.csv": as_csv("\r\n"),
    "cr.csv": as_csv("\r"),
    "bom.csv": "\ufeff" + as_csv(),
    "ratings.2019.v1.0.csv": as_csv(),
    "UPPER.CSV.GZ": as_csv(),
    "a.tsv": as_csv().replace(",", "\t"),
    "a.json": OBJECTS,
    "bom.jsonl": "\ufeff" + OBJECTS,
    "crlf.jsonl": OBJECTS.replace("\n", "\r\n"),
    "a.jsonl.gz": OBJECTS,
    "blank_lines.jsonl": "\n \n" + OBJECTS.replace("\n", "\n\n"),
}


def write(path, content):
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return path


def rows_of(table):
    return [(user, item, int(time)) for user, item, time in zip(*(c.to_pylist() for c in table.columns), strict=True)]


@pytest.mark.parametrize("name", FILES)
def test_every_named_format_gives_the_same_rows_and_names_its_columns(tmp_path, name):
    path = write(tmp_path / name, FILES[name])
    assert rows_of(read_table(path, WANTED)) == ROWS
    assert [column for column in column_names(path) if column in WANTED] == WANTED


def test_names_of_columns_are_quoted_in_csv_alone(tmp_path):
    assert column_names(write(tmp_path / "a.csv", 'user_id,"item, one"\n1,2\n')) == ["user_id", "item, one"]
    assert column_names(write(tmp_path / "a.inter", '"user_id:token\titem_id\n1\t2\n')) == ['"user_id', "item_id"]
    assert column_names(write(tmp_path / "a.txt", "user_id item_id\n")) == []
    assert column_names(tmp_path / "gone.csv") == []


def test_quotes_around_an_id_of_an_atomic_file_belong_to_it(tmp_path):
    path = write(tmp_path / "a.inter", 'user_id:token\titem_id:token\nu\t"a"\nu\t"b\nu\tc\n')
    assert read_table(path, ["user_id", "item_id"])["item_id"].to_pylist() == ['"a"', '"b', "c"]


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t"), ("a.dat", ","), ("a.txt", ",")])
def test_columns_alone_leave_the_separator_to_the_ending(tmp_path, name, separator):
    path = write(tmp_path / name, f"u{separator}a\nv{separator}b\n")
    table = read_table(path, ["user_id", "item_id"], columns=["user_id", "item_id"])
    assert table.to_pydict() == {"user_id": ["u", "v"], "item_id": ["a", "b"]}


def test_parquet_gives_the_columns_as_they_are(tmp_path):
    frame = pd.DataFrame(ROWS, columns=WANTED).assign(other=1)
    frame.to_parquet(tmp_path / "a.parquet")
    assert rows_of(read_table(tmp_path / "a.parquet", WANTED)) == ROWS
    assert column_names(tmp_path / "a.parquet") == [*WANTED, "other"]
    with pytest.raises(UserError, match=r"a\.parquet: no column 'gone'; choose one of item_id, other, "):
        read_table(tmp_path / "a.parquet", ["user_id", "gone"])


@pytest.mark.parametrize("separator", ["::", ",", "\t", "\\t", "|", " || ", "¦"])
@pytest.mark.parametrize("prefix", ["", "\ufeff"])
def test_a_file_without_header_is_read_by_given_columns_and_separator(tmp_path, separator, prefix):
    content = prefix + as_lines(separator.replace("\\t", "\t")).replace('"', "")
    table = read_table(write(tmp_path / "ratings.dat", content), WANTED, separator=separator, columns=WANTED)
    assert rows_of(table) == [(user, item.replace('"', ""), time) for user, item, time in ROWS]


def test_the_two_plain_text_forms_give_the_same_rows(tmp_path):
    pairs = write(tmp_path / "pairs.txt", "\ufeffann 007\r\nann 7\r\n\r\nbob  7 \r\nann x\u00a0y\r\n")
    sequences = write(tmp_path / "sequences.txt.gz", "ann 007 7\tx\u00a0y\nbob 7")
    old = write(tmp_path / "old.txt", "ann 007\rann 7\r\rbob 7\rann x\u00a0y\r")
    expected = {("ann", "007"), ("ann", "7"), ("ann", "x\u00a0y"), ("bob", "7")}
    for path in (pairs, sequences, old):
        table = read_table(path, ["user_id", "item_id"])
        assert set(zip(*(column.to_pylist() for column in table.columns), strict=True)) == expected
    assert read_table(sequences, ["user_id", "item_id"])["item_id"].to_pylist() == ["007", "7", "x\u00a0y", "7"]


def test_a_folder_stands_for_the_atomic_file_in_it(tmp_path):
    folder = tmp_path / "ml"
    folder.mkdir()
    write(folder / "ml.inter", FILES["a.inter"])
    write(folder / "a.inter", "junk")
    assert rows_of(read_table(folder, WANTED)) == ROWS
    (folder / "ml.inter").rename(folder / "third.inter")
    with pytest.raises(UserError, match=r"holds 2 \.inter files, and none is called ml\.inter; name a file"):
        read_table(folder, WANTED)
    with pytest.raises(UserError, match=r"the folder holds no file of events \(\.inter, \.parquet, .*\); name a file"):
        read_table(tmp_path, WANTED)
    (folder / "third.inter").rename(folder / "a.inter")  # over the junk: the only one, whatever it is called
    assert rows_of(read_table(folder, WANTED)) == ROWS


def test_ids_that_look_like_dates_or_missing_values_stay_text(tmp_path):
    odd = ["2020-01-01", "NA", "null", "nan", "1e5", "0x10", "True"]
    csv = write(tmp_path / "a.csv", "user_id,item_id\n" + "".join(f"u,{item}\n" for item in odd))
    lines = write(tmp_path / "a.jsonl", "\n".join(json.dumps({"user_id": "u", "item_id": item}) for item in odd))
    for path in (csv, lines):
        assert read_table(path, ["user_id", "item_id"])["item_id"].to_pylist() == odd


def test_json_numbers_may_mix_whole_and_float_times(tmp_path):
    rows = [{"user_id": 1, "item_id": i, "timestamp": t} for i, t in enumerate([3, 4.0, 5])]
    path = write(tmp_path / "a.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, rows)))
    assert Dataset.load(path, time="timestamp").times.tolist() == [3, 4, 5]


UTF8 = r": cannot be read: .*(?i:utf-?8).*; check that the file is whole, may be read and is UTF-8"
DAMAGED = {
    "empty.csv": ("", ": the file is empty"),
    "empty.txt": ("\n  \n", ": the file is empty"),
    "empty.inter.gz": ("", ": the first line is blank, but it must name the columns"),
    "empty.jsonl": ("\n\n", ": line 1: is not JSON"),
    "blank.csv": ("\nuser_id,item_id\n", ": the first line is blank, but it must name the columns"),
    "column.csv": ("user_id,itemid\n1,2\n", r": no column 'item_id'; did you mean 'itemid'\? \(columns: user_id, it"),
    "column.jsonl": ('{"user_id": 1, "itemid": 2}\n', ": line 1: no column 'item_id'; did you mean 'ite"),
    "blank.jsonl": ('{"user_id": 1, "item_id": 2}\n{"user_id": 1}\n', ": row 2: column 'item_id' holds nothing"),
    "nan.jsonl": ('{"user_id": NaN, "item_id": 1}\n{"user_id": "u", "item_id": 2}\n', ": row 1: column 'user_id'"),
    "semicolons.inter": ("user_id;item_id\n1;2\n", ": no column 'user_id'; there is one column, 'user_id;item_id': if"),
    "seq.inter": ("user_id:token\titem_id:token_seq\n1\t2 3\n", ": column 'item_id' is of type token_seq, a list in e"),
    "wide.json": ('{"user_id": {"0": 1}, "item_id": {"0": 2}}', ": line 1 holds whole columns; write one row per line"),
    "index.json": ('{"0": {"user_id": 1, "item_id": 2}}', ": line 1 holds whole columns; write one row per line"),
    "long.json": ('{"user_id": [1, 1], "item_id": [2, 3]}', ": line 1 holds whole columns; write one row per line"),
    "cells.csv": ('user_id,item_id\nu,"[\'a\', \'b\']"\n', ": column 'item_id' holds lists as text, such as"),
    "cell.csv": ("user_id,item_id\nu,a b\nv,c d e\n", ": no user .*items such as 'a b' look like lists: wri"),
    "headless.csv": ("ann,tea,1\nann,milk,2\n", ": no column 'user_id'; choose .* for a file without a header give"),
    "twice.csv": ("user_id,item_id,item_id\n1,2,3\n", ": column 'item_id' occurs 2 times; rename all but one"),
    "ragged.csv": ("user_id,item_id\n1,2\n1\n1,3\n", ": cannot be read: CSV parse error: .*3: Expected 2 columns"),
    "latin.csv": (b"user_id,item_id\n1,2\n1,caf\xe9\n", UTF8),
    "latin_header.csv": (b"user_id,item_id,caf\xe9\n1,2,3\n", UTF8),
    "latin.txt": (b"a b\na \xe9\n", UTF8),
    "latin.jsonl": (b'{"user_id": 1, "caf\xe9": 2}\n', UTF8),
    "utf16.csv": ("user_id,item_id\n1,2\n".encode("utf-16"), UTF8),
    "packed.csv": (gzip.compress(b"user_id,item_id\n1,2\n"), UTF8),
    "commas.txt": ("user_id,item_id\n", ": line 1: user 'user_id,item_id' has no item; .* what stands between the"),
    "lonely.txt": ("a b\n\nc\n", ": line 3: user 'c' has no item; write 'user item'"),
    "timed.txt": ("a b 1\na c 2\n", ": line 2: user 'a' has a line already"),
    "list.json": ('[{"user_id": 1}]', ": line 1: is not a JSON object; write one object per line"),
    "broken.jsonl": ('{"user_id": 1, "item_id": 2}\n{"user_id": \n', ": line 2: is not JSON"),
    "mixed.jsonl": ('{"user_id": 1, "item_id": 2}\n{"user_id": 1, "item_id": "b"}\n', ".* type int, str"),
    "lists.jsonl": ('{"user_id": [1], "item_id": 1}\n', ".*column 'user_id' has type list"),
    "damaged.parquet": ("PAR1 and then nothing", ": cannot be read: .*; check that the file is whole"),
    "what.xyz": ("1 2\n", r": unknown file ending '\.xyz'; known are \.inter, .*give its separator"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(tmp_path, name):
    content, complaint = DAMAGED[name]
    with pytest.raises(UserError, match=rf"{name}.*{complaint}") as raised:
        Dataset.load(write(tmp_path / name, content))
    assert "\n" not in str(raised.value)


def test_a_missing_file_or_one_that_may_not_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.csv: no such file; check the path"):
        read_table(tmp_path / "gone.csv", ["user_id", "item_id"])
    with pytest.raises(UserError, match=r"a\.csv: cannot be read: .*denied; check"), reading(tmp_path / "a.csv"):
        raise PermissionError(13, "denied")


def test_bytes_that_are_not_utf8_may_stand_in_a_column_that_is_not_read(tmp_path):
    path = write(tmp_path / "a.csv", b"user_id,item_id,name\n1,2,caf\xe9\n")
    assert read_table(path, ["user_id", "item_id"]).num_rows == 1


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_is_not_whole_is_refused(tmp_path, name):
    path = write(tmp_path / name, {"a.csv.gz": as_csv() * 200, "a.jsonl.gz": (OBJECTS + "\n") * 200}.get(name, ""))
    if name == "a.parquet":
        pd.DataFrame(ROWS, columns=WANTED).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-100])
    for read in (read_table, lambda path, _: Dataset.load(path)):
        with pytest.raises(UserError, match=f"{name}: cannot be read: .*; check that the file is whole"):
            read(path, WANTED)


def test_settings_that_do_not_fit_the_format_are_refused(tmp_path):
    write(tmp_path / "a.inter", FILES["a.inter"])
    with pytest.raises(UserError, match=r"separator and column names are for delimited files, not \.inter; leave them"):
        read_table(tmp_path / "a.inter", WANTED, separator=",")
    write(tmp_path / "a.txt", "a b\n")
    with pytest.raises(UserError, match="a plain text history has no column 'timestamp'; give separator and column"):
        read_table(tmp_path / "a.txt", WANTED)
    for separator in ("", "\n"):
        with pytest.raises(UserError, match=r"the separator is '.*'; give the text between two fields, such as ',' or"):
            read_table(tmp_path / "a.txt", WANTED, separator=separator)


def test_a_quoted_field_may_hold_separators_and_line_breaks(tmp_path):
    path = write(tmp_path / "a.csv", 'user_id,note,item_id\nu,"a,\nb",x\nu,"c\r\nd",y\n')
    assert read_table(path, ["user_id", "item_id"])["item_id"].to_pylist() == ["x", "y"]


@pytest.mark.parametrize(
    ("titles", "line"),
    [
        ({5: '"Heat (1995)'}, 7),  # open to the end
        ({5: '"Heat (1995)', 9: '"Casino'}, 7),  # open to the next quote
        ({3: '"a\nb"', 6: '"c"d'}, 9),  # beside a value of two lines any quote must be in order
        ({5: '"Heat (1995)', 8: "x" * 2**21}, 7),  # open beyond what is read at once
        ({5: "too", 6: '"Heat, two'}, 8),  # the row looks too short
    ],
)
def test_a_quote_that_is_not_closed_is_named_and_swallows_no_rows(titles, line, tmp_path):
    rows = [f"{n // 4},{n},{titles.get(n, 'title')}\n" for n in range(12)]
    path = write(tmp_path / "a.csv.gz", "user_id,item_id,title\n" + "".join(rows))
    longest = csv.field_size_limit()
    with pytest.raises(UserError, match=rf"csv.gz: line {line}: a quote is opened and not closed before the next"):
        read_table(path, ["user_id", "item_id"])
    assert csv.field_size_limit() == longest  # of the whole process


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (["u,a", "u,b", 'u,"c'], 4),  # the last value would take the end of the file, and no line less is read
        (["u,a", "u,b", 'u,"c', "", "", ""], 4),
        (["u,a", 'u,"b', "u,c", 'u,"d', "u,e"], 3),  # two that are open, of which the first takes the rows between
    ],
)
def test_an_open_quote_is_found_whatever_ends_a_line(rows, line, end, tmp_path):
    path = write(tmp_path / "a.csv", end.join(["user_id,item_id", *rows, ""]).encode())
    with pytest.raises(UserError, match=f"line {line}: a quote is opened and not closed"):
        read_table(path, ["user_id", "item_id"])


@pytest.mark.parametrize("note", ["x" * 3_000_000, '"' + "two\nlines" * 300_000 + '"'], ids=["line", "lines"])
def test_a_row_may_be_long_in_one_file_after_another(note, tmp_path):
    path = write(tmp_path / "a.csv", f"user_id,item_id,note\nu,a,{note}\nu,b,\n")
    for _ in range(5):
        assert read_table(path, ["user_id", "item_id"])["item_id"].to_pylist() == ["a", "b"]


def test_quotes_within_a_line_need_not_be_in_order(tmp_path):
    path = write(tmp_path / "a.csv", 'user_id,item_id,title\n1,2,a "good" one\n1,3,"b"\n\n1,4,5" disc\n')
    assert read_table(path, ["user_id", "item_id"]).num_rows == 3
    write(path, 'user_id,item_id,title\n1,2,"c"d\n1,3,x\n')
    assert read_table(path, ["user_id", "item_id"]).num_rows == 2


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["7", "-1", "0"], [7, -1, 0]),
        (["7", "007", "1"], ["7", "007", "1"]),
        (["7", "b", "1"], ["7", "b", "1"]),
        (["7", "1.0", " 1"], ["7", "1.0", " 1"]),
        ([str(2**63), "1", "2"], [str(2**63), "1", "2"]),
    ],
)
def test_ids_of_a_text_file_are_whole_numbers_where_the_whole_column_is(tmp_path, written, read):
    files = {
        "a.csv": "user_id,item_id\n" + "".join(f'u,"{item}"\n' for item in written),
        "a.inter": "user_id:token\titem_id:token\n" + "".join(f"u\t{item}\n" for item in written),
    }
    for name, content in files.items():
        dataset = Dataset.load(write(tmp_path / name, content))
        assert dataset.decode(dataset.items).tolist() == read and dataset.user_ids.tolist() == ["u"]
        frame = pd.DataFrame({"user_id": "u", "item_id": read})
        assert dataset.content_hash == Dataset.from_frame(frame).content_hash


def write_parts(folder, ending):
    """Ten parts of the rows, a user's events spread over them, and files that are none of them."""
    folder.mkdir()
    for number in range(1, 11):
        part = pd.DataFrame({"user_id": ["u", "v"], "item_id": [number, 100 + number], "timestamp": [number, 5]})
        path = folder / f"part-{number}{ending}"
        part.to_parquet(path) if ending == ".parquet" else part.to_csv(path, index=False)
    (folder / "_SUCCESS").write_text("")
    (folder / f"part-11{ending}").write_text("")
    (folder / f".part-1{ending}.crc").write_text("")


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".csv.gz"])
@pytest.mark.parametrize("form", ["{}", "{}/part-*", "{}/**/*-[1-9]{ending}"])
def test_a_folder_or_pattern_of_parts_is_read_as_one_table(tmp_path, ending, form):
    write_parts(tmp_path / "events", ending)
    path, last = form.format(tmp_path / "events", ending=ending), 10 if "[1-9]" in form else 11
    for time in (None, "timestamp"):
        dataset = Dataset.load(path, time=time)
        assert dataset.decode(dataset.items).tolist() == [*range(1, last), *range(101, 100 + last)], "10 after 9"
        assert dataset.name == "events"
    assert column_names(path) == WANTED


def test_a_folder_or_pattern_that_is_no_table_says_what_was_seen(tmp_path):
    write_parts(tmp_path / "events", ".csv")
    with pytest.raises(UserError, match=r"events/x\*\.csv: no file has such a name; check the pattern"):
        Dataset.load(tmp_path / "events" / "x*.csv")
    pd.DataFrame({"user_id": [1.5], "item_id": [1]}).to_parquet(tmp_path / "events" / "b.parquet")
    with pytest.raises(
        UserError, match=r"files that end in \.csv, \.parquet; name one kind, such as '.*events/\*\.csv'"
    ):
        Dataset.load(tmp_path / "events")
    pd.DataFrame({"user_id": ["u"], "item_id": [1]}).to_parquet(tmp_path / "events" / "c.parquet")
    with pytest.raises(
        UserError, match=r"c\.parquet: column 'user_id' has type .*string, and double in .*b\.parquet; w"
    ):
        Dataset.load(tmp_path / "events" / "*.parquet")
    for address in ("https://example.com/log.csv?a=1", "s3://bucket/log.parquet"):
        with pytest.raises(UserError, match=f"^{re.escape(address)}: is an address, and nothing is downloaded: fetch"):
            Dataset.load(address)


@pytest.mark.parametrize("separator", ["\t", ";", "|", "::", " "])
@pytest.mark.parametrize("ending", [".csv", ".dat"])
def test_what_separates_the_fields_is_seen_where_nobody_says_it(tmp_path, separator, ending):
    lines = as_lines(separator).replace('"', "").replace("zoë b", "zoë")
    wanted = [(user.replace("zoë b", "zoë"), item.replace('"', ""), time) for user, item, time in ROWS]
    path = write(tmp_path / f"a{ending}", lines)
    assert rows_of(read_table(path, WANTED, columns=WANTED)) == wanted
    if separator != " " and ending == ".csv":
        write(path, separator.join(WANTED) + "\n" + lines)
        assert rows_of(read_table(path, WANTED)) == wanted and column_names(path) == WANTED
    words = {"\t": "tab", ";": "semicolon", "|": "Pipe", " ": "space", "::": "::"}
    write(path, lines)
    assert rows_of(read_table(path, WANTED, columns=WANTED, separator=words[separator])) == wanted


@pytest.mark.parametrize("form", ["frame", "a.parquet", "a.jsonl"])
def test_lists_in_cells_are_read_as_histories(tmp_path, form):
    frame = pd.DataFrame({"user_id": ["u", "v", "u"], "item_id": [["a", "b"], ["c", "a", "b"], ["d"]]})
    frame["timestamp"] = [[3, 4], [1, 2, 3], [1]]
    frame["day"] = [2, 5, 3]
    frame.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(frame.to_json(orient="records", lines=True))

    def read(**how):
        return Dataset.from_frame(frame, **how) if form == "frame" else Dataset.load(tmp_path / form, **how)

    for time, wanted in ((None, "abdcab"), ("timestamp", "dabcab"), ("day", "abdcab")):
        dataset = read(time=time)
        assert "".join(dataset.decode(dataset.items)) == wanted
    assert "".join(read(preparation=Preparation(where="day<5")).item_ids) == "abd"
    frame["timestamp"] = [[3, 4], [1, 2], [1]]
    with pytest.raises(UserError, match="row 2: column 'item_id' holds a list of 3 and 'timestamp' one of 2; write li"):
        Dataset.from_frame(frame, time="timestamp")


def test_a_message_about_a_file_has_a_length_that_can_be_read(tmp_path):
    wide = {str(number): number for number in range(50_000)}
    (tmp_path / "wide.json").write_text(json.dumps({"user_id": 1, "item_id": wide}))
    with pytest.raises(UserError, match=r"column 'item_id' has type struct<0: int64, .*but ids must be") as raised:
        Dataset.load(tmp_path / "wide.json")
    assert len(str(raised.value)) < 500
    for error in (UserError, RunError):
        assert len(str(error("x" * 10**6))) < 2000


def test_a_small_gzip_file_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "UNPACKED_AT_LEAST", 2**20)
    monkeypatch.setattr(formats, "UNPACKED_RATIO", 50)
    rows = {".csv.gz": (b"user_id,item_id\n", b"1,2\n"), ".json.gz": (b"", b'{"user_id": 1, "item_id": 2}\n')}
    for suffix, (header, row) in rows.items():
        path = tmp_path / f"log{suffix}"
        path.write_bytes(gzip.compress(header + row * (12_000_000 // len(row))))
        with pytest.raises(UserError, match=r"log.*\.gz unpacks to more than .* GiB, 50 times its size"):
            read_table(path, ["user_id", "item_id"])
