"""Every format gives the same table; every damage gives one line that names the file and the row."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma

import pandas as pd
import pyarrow as pa
import pytest

from recbft.datasets import Dataset, read_table
from recbft.datasets.reading import delimited
from recbft.datasets.reading.formats import column_names
from recbft.datasets.reading.opening import reading
from recbft.errors import UserError

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
    "a.inter.gz": as_lines("\t", header=ATOMIC_HEADER),
    "no_newline_at_end.inter": as_lines("\t", header=ATOMIC_HEADER).rstrip("\n"),
    "cr.inter": as_lines("\t", "\r", header=ATOMIC_HEADER),
    "UPPER.INTER.GZ": as_lines("\t", header=ATOMIC_HEADER),
    "a.csv": as_csv(),
    "crlf.csv": as_csv("\r\n"),
    "cr.csv": as_csv("\r"),
    "bom.csv": "\ufeff" + as_csv(),
    "a.csv.gz": as_csv(),
    "ratings.2019.v1.0.csv": as_csv(),
    "ratings.2019.csv.gz": as_csv(),
    "UPPER.CSV.GZ": as_csv(),
    "a.tsv": as_csv().replace(",", "\t"),
    "cr.tsv": as_csv("\r").replace(",", "\t"),
    "a.json": OBJECTS,
    "a.jsonl": OBJECTS,
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
def test_every_named_format_gives_the_same_rows(tmp_path, name):
    assert rows_of(read_table(write(tmp_path / name, FILES[name]), WANTED)) == ROWS


@pytest.mark.parametrize("name", FILES)
def test_every_named_format_names_its_columns(tmp_path, name):
    names = column_names(write(tmp_path / name, FILES[name]))
    assert [column for column in names if column in WANTED] == WANTED


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
    write(folder / "other.inter", "junk")
    assert rows_of(read_table(folder, WANTED)) == ROWS
    (folder / "ml.inter").rename(folder / "third.inter")
    with pytest.raises(UserError, match=r"holds 2 \.inter files and none is called ml\.inter; name the file"):
        read_table(folder, WANTED)
    with pytest.raises(UserError, match=r"is a folder without an \.inter file; name a file"):
        read_table(tmp_path, WANTED)
    (folder / "third.inter").rename(folder / "other.inter")  # over the junk: the only one, whatever it is called
    assert rows_of(read_table(folder, WANTED)) == ROWS
    write(folder / "a.inter", "junk")
    (folder / "other.inter").rename(folder / "ml.inter")
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


@pytest.mark.parametrize("ids", [[2**63, 5], [5, 2**70], [-(2**63) - 1, 2**64]])
def test_json_ids_beyond_64_bits_are_kept_as_their_text(tmp_path, ids):
    rows = [{"user_id": 1, "item_id": item, "timestamp": 2**64} for item in [*ids, ids[0]]]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert Dataset.load(path).item_ids.tolist() == list(map(str, ids))
    with pytest.raises(UserError, match=r"row 1: .* holds '18446744073709551616', but a time must fit in 64 bits"):
        Dataset.load(path, time="timestamp")


ERRORS = {
    "empty.csv": ("", r"empty\.csv: the file is empty"),
    "empty.parquet": ("", r"empty\.parquet: the file is empty"),
    "empty.txt": ("\n  \n", r"empty\.txt: the file is empty"),
    "empty.inter.gz": ("", r"empty\.inter\.gz: the file is empty"),
    "empty.jsonl": ("\n\n", r"empty\.jsonl: the file is empty"),
    "header.csv": ("user_id,item_id\n", r"header\.csv: the file has a header but no rows"),
    "unended.csv": ("user_id,item_id", r"unended\.csv: the file has a header but no rows"),
    "blank.csv": ("\nuser_id,item_id\n", r"blank\.csv: the first line is blank, but it must name the columns"),
    "column.csv": (
        "user_id,itemid\n1,2\n",
        r"column\.csv: no column 'item_id'; did you mean 'itemid'\? \(columns: user_id, itemid\)",
    ),
    "column.jsonl": ('{"user_id": 1, "itemid": 2}\n', r"column\.jsonl: line 1: no column 'item_id'; did you mean 'ite"),
    "headless.csv": (
        "ann,tea,1\nann,milk,2\n",
        r"headless\.csv: the first line must name the columns, and it holds ann, tea, 1; for a file without a header",
    ),
    "dated.csv": (
        "ann,tea,2024-01-31T12:30:00Z\nann,milk,2024-01-31T12:40:00Z\n",
        r"dated\.csv: the first line must name the columns, and it holds ann, tea, 2024-01-31T12:30:00Z; for a file",
    ),
    "sep.csv": (
        b"\xef\xbb\xbfsep=,\r\nuser_id,item_id\r\n1,2\r\n",
        r"sep\.csv: the first line is 'sep=,', for spreadsheets, but must name the columns; delete it",
    ),
    "capitals.csv": (
        "User_ID,item_id\n1,2\n",
        r"capitals\.csv: no column 'user_id'; did you mean 'User_ID'\? \(columns: User_ID, item_id\)",
    ),
    "twice.csv": (
        "user_id,item_id,item_id\n1,2,3\n",
        r"twice\.csv: column 'item_id' occurs 2 times; rename all but one",
    ),
    "untyped.inter": ("user_id\titem_id\n1\t2\n", r"header field 'user_id' has no type; write NAME:TYPE"),
    "type.inter": ("user_id:token\titem_id:int\n1\t2\n", r"header field 'item_id:int' has no type; write NAME:TYPE"),
    "ragged.csv": ("user_id,item_id\n1,2\n1\n1,3\n", r"ragged\.csv: row 2: 1 fields where 2 are expected"),
    "ragged.inter": (
        "user_id:token\titem_id:token\n1\t2\n1\t3\n1\t2\t3\n",
        r"ragged\.inter: row 3: 3 fields where 2 are expected; check that row, the separator and the column names",
    ),
    "latin.csv": (
        b"user_id,item_id\n1,2\n1,caf\xe9\n",
        r"latin\.csv: line 3: byte 0xe9 is not UTF-8; save the file as UTF-8",
    ),
    "packed.csv": (gzip.compress(b"user_id,item_id\n1,2\n"), r"packed\.csv: is gzipped; let its name end in \.gz, or"),
    "packed.txt": (gzip.compress(b"1 2\n"), r"packed\.txt: is gzipped; let its name end in \.gz, or unpack it"),
    "packed.jsonl": (gzip.compress(b"{}\n"), r"packed\.jsonl: is gzipped; let its name end in \.gz, or unpack it"),
    "latin_ragged.csv": (
        b"user_id,item_id\n1,2\n1\nzo\xeb,2,3\n",
        r"latin_ragged\.csv: line 4: byte 0xeb is not UTF-8; save the file as UTF-8",
    ),
    "latin.inter": (b"user_id:token\titem_id:token\n1\t\xff\n", r"latin\.inter: line 2: byte 0xff is not UTF-8"),
    "latin.txt": (b"a b\na \xe9\n", r"latin\.txt: line 2: byte 0xe9 is not UTF-8"),
    "utf16.csv": ("user_id,item_id\n1,2\n".encode("utf-16"), r"utf16\.csv: line 1: byte 0xff is not UTF-8"),
    "commas.txt": (
        "user_id,item_id\n1,2\n",
        r"commas\.txt: line 1: user 'user_id,item_id' has no item; if ',' stands between its fields, give it as sepa",
    ),
    "lonely.txt": ("a b\n\nc\n", r"lonely\.txt: line 3: user 'c' has no item; write 'user item'"),
    "timed.txt": ("a b 1\na c 2\n", r"timed\.txt: line 2: user 'a' has a line already"),
    "again.txt": ("a b c\nb d\na e\n", r"again\.txt: line 3: user 'a' has a line already"),
    "list.json": ('[{"user_id": 1}]', r"list\.json: starts a JSON list; write one object per line instead"),
    "broken.jsonl": ('{"user_id": 1, "item_id": 2}\n{"user_id": \n', r"broken\.jsonl: line 2: is not JSON"),
    "number.jsonl": (
        '{"user_id": 1, "item_id": 2}\n5\n',
        r"number\.jsonl: line 2: is not a JSON object; write one object",
    ),
    "mixed.jsonl": (
        '{"user_id": 1, "item_id": 2}\n{"user_id": 1, "item_id": "b"}\n',
        r"mixed\.jsonl: row 2: column 'item_id' holds 'b', but row 1 holds an int; use one type per column",
    ),
    "huge.jsonl": (
        f'{{"user_id": 1, "item_id": {10**400}}}\n{{"user_id": 1, "item_id": 1.5}}\n',
        r"huge\.jsonl: row 2: column 'item_id' holds 1\.5, but row 1 holds an int",
    ),
    "lists.jsonl": (
        '{"user_id": 1, "item_id": [1]}\n{"user_id": 1, "item_id": ["b"]}\n',
        r"lists\.jsonl: column 'item_id' holds a list in each row; give numbers or text",
    ),
    "surrogate.jsonl": (
        r'{"user_id": 1, "item_id": "\ud800"}',
        r"surrogate\.jsonl: the text '\\ud800' has no UTF-8; replace it",
    ),
    "digits.jsonl": (f'{{"user_id": 1, "item_id": {"9" * 5000}}}', r"digits\.jsonl: line 1: .*\(a number too long or"),
    "deep.jsonl": (f'{{"user_id": 1, "item_id": {"[" * 100_000}}}', r"deep\.jsonl: line 1: .* a list too deep\)"),
    "wide.csv": (
        f"user_id,item_id,{'x' * 200_000}\n1,2,3\n",
        r"wide\.csv: the header cannot be read \(field larger than .*\); check the separator",
    ),
    "damaged.parquet": ("PAR1 and then nothing", r"damaged\.parquet: is not a whole Parquet file"),
    "what.gz": ("1 2\n", r"what\.gz: unknown file ending '\.gz'; known are \.inter, "),
    "what.xyz": ("1 2\n", r"what\.xyz: unknown file ending '\.xyz'; known are \.inter, .*give its separator"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(tmp_path, name):
    content, complaint = ERRORS[name]
    with pytest.raises(UserError, match=complaint) as raised:
        read_table(write(tmp_path / name, content), ["user_id", "item_id"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gone.csv", "gone.inter", "gone.parquet", "gone.txt", "gone.jsonl.gz"])
def test_a_missing_file_is_refused_by_name(tmp_path, name):
    with pytest.raises(UserError, match=f"{name}: no such file; check the path"):
        read_table(tmp_path / name, ["user_id", "item_id"])


@pytest.mark.parametrize("name", ["latin.csv", "latin.jsonl"])
def test_a_header_that_is_not_utf8_is_refused_before_its_names_are_looked_at(tmp_path, name):
    content = {"latin.csv": b"user_id,item_id,caf\xe9\n1,2,3\n", "latin.jsonl": b'{"user_id": 1, "caf\xe9": 2}\n'}[name]
    with pytest.raises(UserError, match=f"{name}: line 1: byte 0xe9 is not UTF-8; save the file as UTF-8"):
        Dataset.load(write(tmp_path / name, content))


def test_bytes_that_are_not_utf8_may_stand_in_a_column_that_is_not_read(tmp_path):
    path = write(tmp_path / "a.csv", b"user_id,item_id,name\n1,2,caf\xe9\n")
    assert read_table(path, ["user_id", "item_id"]).num_rows == 1


@pytest.mark.parametrize("columns", [None, ["user_id", "item_id"]], ids=["header", "no header"])
@pytest.mark.parametrize("packer", ["bzip2", "xz", "zstd"])
def test_a_file_that_is_packed_otherwise_is_refused_by_its_packer(tmp_path, packer, columns):
    content = b"user_id,item_id\n" + b"".join(b"%d,%d\n" % (row, row * row) for row in range(99))
    path = tmp_path / "events"
    pack = {"bzip2": bz2.compress, "xz": lzma.compress, "zstd": lambda text: pa.compress(text, "zstd", asbytes=True)}
    path.write_bytes(pack[packer](content))
    with pytest.raises(UserError, match=rf"events: is packed by {packer}, which is not read; unpack it, or pack it"):
        read_table(path, ["user_id", "item_id"], separator=",", columns=columns)
    with pytest.raises(UserError, match=rf"events.pack: is packed by {packer}"):  # before its ending, which is unknown
        read_table(path.rename(tmp_path / "events.pack"), ["user_id", "item_id"])


@pytest.mark.parametrize(("name", "start"), [("a.xlsx", b"PK\x03\x04"), ("a.xls", b"\xd0\xcf\x11\xe0")])
def test_a_spreadsheet_is_said_to_be_one(tmp_path, name, start):
    path = write(tmp_path / name, start + b"\xff\x00" * 99)
    for how in ({}, {"separator": ","}):
        with pytest.raises(UserError, match=rf"{name}: is a spreadsheet, which is not read; save it as CSV in UTF-8"):
            read_table(path, ["user_id", "item_id"], **how)
    write(path, b"user_id,item_id\n1,2\n")
    assert read_table(path, ["user_id", "item_id"], separator=",").num_rows == 1, "some call a text so"


def test_a_truncated_gzip_file_is_refused(tmp_path):
    for name in ("a.csv.gz", "a.inter.gz", "a.jsonl.gz"):
        whole = gzip.compress((FILES[name] * 200).encode())
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=f"{name}: the gzip file is damaged"):
            read_table(tmp_path / name, WANTED)
        with pytest.raises(UserError, match=f"{name}: the gzip file is damaged"):
            Dataset.load(tmp_path / name)
    (tmp_path / "b.csv.gz").write_bytes(b"plain text")
    with pytest.raises(UserError, match=r"b\.csv\.gz: the gzip file is damaged"):
        read_table(tmp_path / "b.csv.gz", WANTED)
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"user_id,item_id")[:10] + b"\x01\x08\x00\xf7\xff\xff\xff")
    with pytest.raises(UserError, match=r"c\.csv\.gz: the gzip file is damaged"):
        Dataset.load(tmp_path / "c.csv.gz")


def test_a_truncated_parquet_file_is_refused(tmp_path):
    pd.DataFrame({"user_id": range(1000), "item_id": range(1000)}).to_parquet(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"b\.parquet: is not a whole Parquet file"):
        read_table(tmp_path / "b.parquet", ["user_id", "item_id"])
    (tmp_path / "c.parquet.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(UserError, match=r"c\.parquet\.gz: is a gzipped Parquet file; unpack it"):
        read_table(tmp_path / "c.parquet.gz", ["user_id", "item_id"])


def test_of_a_long_header_a_message_lists_the_first_columns(tmp_path):
    path = write(tmp_path / "wide.csv", ",".join(f"x{number:04}" for number in range(3000)) + "\n")
    with pytest.raises(UserError, match=r"choose one of x0000, .*, x0099 and 2,900 more$"):
        read_table(path, ["user_id", "item_id"])
    with pytest.raises(UserError, match=r"did you mean 'x0007'\? \(columns: x0000, .*, x0099 and 2,900 more\)$"):
        read_table(path, ["X0007", "x0001"])


def test_settings_that_do_not_fit_the_format_are_refused(tmp_path):
    write(tmp_path / "a.inter", FILES["a.inter"])
    with pytest.raises(
        UserError, match=r"separator and column names are for delimited files, not \.inter; leave them out"
    ):
        read_table(tmp_path / "a.inter", WANTED, separator=",")
    write(tmp_path / "a.txt", "a b\n")
    with pytest.raises(
        UserError, match="a plain text history has no column 'timestamp'; give separator and column names"
    ):
        read_table(tmp_path / "a.txt", WANTED)


@pytest.mark.parametrize(
    ("separator", "complaint"),
    [
        ("", "the separator is empty; give the text between two fields, such as ',' or '::'"),
        ("\n", r"the separator is '\\n'; give the text between two fields"),
        ("\r", r"the separator is '\\r'; give"),
        ("\0", r"the separator is '\\x00'; give"),
    ],
)
@pytest.mark.parametrize("columns", [None, ["user_id", "item_id"]])
def test_a_text_that_cannot_part_fields_is_refused_as_a_separator(tmp_path, separator, columns, complaint):
    path = write(tmp_path / "a.dat", "user_id,item_id\n1,2\n")
    with pytest.raises(UserError, match=complaint):
        read_table(path, ["user_id", "item_id"], separator=separator, columns=columns)


def test_what_stands_for_a_long_separator_may_not_stand_in_the_file(tmp_path):
    path = write(tmp_path / "a.dat", "1::2\x1f3\n")
    with pytest.raises(UserError, match=r"a\.dat: holds the character 0x1f, so separator '::' cannot be used"):
        read_table(path, ["user_id", "item_id"], separator="::", columns=["user_id", "item_id"])
    assert read_table(path, ["user_id", "item_id"], separator="\x1f", columns=["user_id", "item_id"]).num_rows == 1


def test_a_separator_that_no_text_holds_is_refused(tmp_path):
    path = write(tmp_path / "a.dat", b"1\xa62\n")
    with pytest.raises(UserError, match=r"the text '\\udca6' has no UTF-8; replace it"):
        read_table(path, ["user_id", "item_id"], separator="\udca6", columns=["user_id", "item_id"])


def test_a_blank_or_bad_value_in_a_file_is_refused_with_file_and_row(tmp_path):
    path = write(tmp_path / "a.csv", "user_id,item_id,timestamp\n1,2,3\n,2,4\n1,2,x\n")
    with pytest.raises(UserError, match=r"a\.csv: row 2: column 'user_id' holds '', but an id may not be blank"):
        Dataset.load(path)
    path = write(tmp_path / "b.csv", "user_id,item_id,timestamp\n1,2,3\n1,2,4\n1,2,x\n")
    with pytest.raises(
        UserError, match=r"b\.csv: row 3: column 'timestamp' holds 'x', but a time must be a whole number"
    ):
        Dataset.load(path, time="timestamp")
    path = write(tmp_path / "c.jsonl", '{"user_id": 1, "item_id": 2}\n{"user_id": 1}\n')
    with pytest.raises(UserError, match=r"c\.jsonl: row 2: column 'item_id' holds nothing, but an id may not be blank"):
        Dataset.load(path)
    (tmp_path / "d.jsonl").write_text('{"user_id": NaN, "item_id": 1}\n{"user_id": "u", "item_id": 2}\n')
    with pytest.raises(UserError, match=r"d\.jsonl: row 1: column 'user_id' holds nothing, but an id may not be blank"):
        Dataset.load(tmp_path / "d.jsonl")


def test_a_quoted_field_may_hold_separators_and_line_breaks(tmp_path):
    path = write(tmp_path / "a.csv", 'user_id,note,item_id\nu,"a,\nb",x\nu,"c\r\nd",y\n')
    assert read_table(path, ["user_id", "item_id"])["item_id"].to_pylist() == ["x", "y"]


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
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
def test_a_quote_that_is_not_closed_is_named_and_swallows_no_rows(titles, line, ending, tmp_path):
    rows = [f"{n // 4},{n},{titles.get(n, 'title')}\n" for n in range(12)]
    path = tmp_path / f"a.{ending}"
    with gzip.open(path, "wt") if ending.endswith("gz") else path.open("w") as file:
        file.write("user_id,item_id,title\n" + "".join(rows))
    longest = csv.field_size_limit()
    with pytest.raises(UserError, match=rf"{ending}: line {line}: a quote is opened and not closed before the next"):
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
def test_a_row_may_be_longer_than_what_is_read_at_once(note, tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", f"user_id,item_id,note\nu,a,{note}\nu,b,\n")
    assert read_table(path, ["user_id", "item_id"])["item_id"].to_pylist() == ["a", "b"]
    write(path, path.read_text() + "u,c,d,e\n")
    with pytest.raises(UserError, match="row 3: 4 fields where 3 are expected"):
        read_table(path, ["user_id", "item_id"])
    monkeypatch.setattr(delimited, "LONGEST_ROW", 2**20)
    with pytest.raises(UserError, match=r"a\.csv: a row is longer than 1 MiB; leave its long values out"):
        read_table(path, ["user_id", "item_id"])


def test_files_with_long_rows_are_read_one_after_another(tmp_path):
    path = write(tmp_path / "a.csv", f"user_id,item_id,note\nu,a,{'x' * 3_000_000}\nu,b,\n")
    for _ in range(30):  # arrow 18 to 22 would stop at one of the first, were they read on several threads
        assert read_table(path, ["user_id", "item_id"]).num_rows == 2


def test_quotes_within_a_line_need_not_be_in_order(tmp_path):
    path = write(tmp_path / "a.csv", 'user_id,item_id,title\n1,2,a "good" one\n1,3,"b"\n\n1,4,5" disc\n')
    assert read_table(path, ["user_id", "item_id"]).num_rows == 3
    write(path, 'user_id,item_id,title\n1,2,"c"d\n1,3,x\n')
    assert read_table(path, ["user_id", "item_id"]).num_rows == 2


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    complaint = r"a\.csv: cannot be read: .*denied; check the file and its permissions"
    with pytest.raises(UserError, match=complaint), reading(tmp_path / "a.csv"):
        raise PermissionError(13, "denied")
