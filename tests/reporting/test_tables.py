"""One table in five forms."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from recbft.reporting.tables import (
    Column,
    Table,
    comma_separated,
    digits_for,
    distinct,
    html,
    latex,
    markdown,
    markdown_table,
    slug,
    table,
    text,
    write_tables,
)

TABLE = Table(
    name="demo",
    title="A & B",
    caption="50 % of <all> users_",
    columns=[
        Column("arm"), Column("users", "count"), Column("mean", "spread"), Column("difference", "signed"),
        Column("95 %", "interval"), Column("p", "p"), Column("targets", "count", "page"),
    ],
    rows=[
        ["a|b <x>", 1429, (0.05604, 0.00192), 0.00171234, (-0.00112, 0.0045), 0.03333, 7],
        ["c_d", 2, (0.1, 0.0), None, None, 0.0000123, 0],
    ],
)  # fmt: skip


def test_a_terminal_gets_aligned_columns_without_details():
    lines = text(TABLE).splitlines()
    assert lines[2:5] == [
        "arm      users             mean  difference                95 %        p",
        "a|b <x>  1,429  0.0560 ± 0.0019     +0.0017  -0.0011 to +0.0045    0.033",
        "c_d          2  0.1000 ± 0.0000           -                   -  < 0.001",
    ]
    assert lines[0] == "A & B" and lines[-1] == "50 % of <all> users_"


def test_csv_keeps_all_digits_and_gives_pairs_two_columns():
    header, first, second = csv.reader(io.StringIO(comma_separated(TABLE)))
    assert header == ["arm", "users", "mean mean", "mean sd", "difference", "95 % low", "95 % high", "p", "targets"]
    assert [float(cell) for cell in first[1:]] == [1429, 0.05604, 0.00192, 0.00171234, -0.00112, 0.0045, 0.03333, 7]
    assert second == ["c_d", "2", "0.1", "0.0", "", "", "", "1.23e-05", "0"]


def test_markdown_escapes_the_bar_and_hands_on_no_tag():
    lines = markdown(TABLE).splitlines()
    assert lines[2].startswith("| arm | users |") and lines[3].startswith("| --- | ---: |")
    assert lines[4].startswith(r"| a\|b &lt;x> | 1,429 |") and lines[-1] == "50 % of &lt;all> users_"


def test_a_row_of_latex_that_begins_with_a_bracket_or_a_star_is_not_the_end_of_the_row_before():
    rows = [["[a]", 0.5], ["*a", 0.5], ["a[b]*", 0.5]]
    made = latex(Table(name="x", title="t", caption="c", columns=[Column("arm"), Column("v", "value")], rows=rows))
    assert [line.partition(" &")[0] for line in made.split("\n") if "0.5" in line] == ["{}[a]", "{}*a", "a[b]*"]


def test_latex_is_booktabs_with_every_special_letter_escaped():
    made = latex(TABLE)
    assert r"\caption{A \& B. 50 \% of \textless{}all\textgreater{} users\_}" in made
    assert r"a|b \textless{}x\textgreater{} & 1,429 & 0.0560 $\pm$ 0.0019" in made and r"c\_d & 2" in made
    rules = [line for line in made.splitlines() if line.endswith("rule")]
    assert rules == [r"\toprule", r"\midrule", r"\bottomrule"] and r"\begin{tabular}{lrrrrrr}" in made


def test_html_escapes_scrolls_in_its_own_box_and_has_columns_that_a_phone_leaves_out():
    made = html(TABLE)
    assert "a|b &lt;x&gt;" in made and "<x>" not in made and '<div class="scroll"' in made
    assert '<th class="n w" scope=col>targets</th>' in made and "show all 7 columns" in made
    assert "show all" not in html(TABLE.without("targets"))
    opened: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag, attrs):
            opened.extend([tag] * (tag not in ("input", "wbr")))

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Balanced().feed(made)
    assert opened == []


def test_an_interval_that_ends_beside_zero_says_on_which_side():
    rows: list[list[object]] = [[(-0.0011, -0.00002)], [(-0.0011, 0.0)]]
    written = markdown(Table(name="t", title="t", caption="", columns=[Column("i", "interval")], rows=rows))
    assert "-0.0011 to -0.0000" in written and "-0.0011 to 0.0000" in written


def test_zero_has_no_sign_and_no_number_is_not_a_number():
    row = Table(
        name="t", title="", caption="", columns=[Column("d", "signed"), Column("r", "percent")], rows=[[-1e-9, -0.0]]
    )
    assert row.texts() == [["0.0000", "0.0 %"]]
    with pytest.raises(AssertionError, match="no number"):
        Table(name="t", title="", caption="", columns=[Column("d", "signed")], rows=[[float("nan")]]).texts()
    with pytest.raises(AssertionError, match="a row of t has other columns"):
        Table(name="t", title="", caption="", columns=[Column("d")], rows=[["a", "b"]])


def test_a_table_has_digits_for_the_smallest_difference_that_its_tests_found():
    columns = [Column("mean", "spread"), Column("value", "value"), Column("d", "signed"), Column("i", "interval")]
    rows = [[(0.1, None), 0.25, 0.00004, (0.00001, 0.00007)]]
    made = Table(name="t", title="t", caption="", columns=columns, rows=rows)
    assert made.texts() == [["0.1000", "0.2500", "0.0000", "+0.0000 to +0.0001"]]
    more = replace(made, digits=digits_for([(0.00004, 0.049), (0.03, 0.001), (1e-9, 0.05), (0.0, 0.01)]))
    assert more.texts() == [["0.100000", "0.250000", "+0.000040", "+0.000010 to +0.000070"]]


def test_tables_of_one_name_get_numbers():
    names = ["a", "A", "b", "a", "a-2"]
    made = distinct([replace(TABLE, name=name) for name in names])
    assert [table.name for table in made] == ["a", "A-2", "b", "a-3", "a-2-2"]
    assert {table.title for table in made} == {TABLE.title} and distinct([]) == []


def test_tables_are_written_as_files(tmp_path):
    written = write_tables([TABLE], tmp_path / "new" / "folder", ("md", "latex", "csv"))
    assert [path.name for path in written] == ["tables.md", "tables.tex", "demo.csv"]
    assert all(path.stat().st_size for path in written)
    assert slug("a/b[c=1]+d") == "a-b-c-1-d"
    assert len(f"seeds-against-{slug('語' * 300)}.csv".encode()) < 255


def test_a_page_may_break_a_long_name_of_a_row_and_no_other():
    rows = [["target never in training"], ["bft[core.a_b=credibility,c=10]"]]
    made = html(Table(name="t", title="T", caption="C", columns=[Column("stratum")], rows=rows))
    assert "<th scope=row>target never in training</th>" in made
    assert "<th class=long scope=row>bft[<wbr>core.<wbr>a_<wbr>b=credibility,<wbr>c=10]</th>" in made


def test_plain_cells_make_a_table_of_text_or_markdown():
    assert markdown_table(["a|b"], [["c|d"]]).splitlines() == ["| a\\|b |", "| --- |", "| c\\|d |"]
    assert table(["name", "kind", "n"], [["x", "yy", 1200], ["long", "z", None]]).splitlines() == [
        "name  kind      n", "x     yy    1,200", "long  z         -"
    ]  # fmt: skip
