"""Drawings that take a page's colours, and say how to have them where matplotlib is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from recbft.errors import UserError
from recbft.reporting import plots

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    values = {arm: rng.normal(0.1, 0.01, 5) for arm in ("matched", "bft <1>")}
    return plots.seed_scatter("matched", values, "ndcg@10", {"matched": 0, "bft <1>": 1})


def words(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_drawing_is_well_formed_and_named(drawn):
    root = ET.fromstring(drawn)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img" and "seed by seed" in root.get("aria-label")
    assert float(root.get("width")) < 390 and root.get("viewBox")
    assert "NDCG@10 of matched, one point per seed" in words(drawn) and "NDCG@10 of bft <1>" in words(drawn)


def test_colours_are_the_pages_own(drawn):
    assert plots.INK not in drawn and "currentColor" in drawn and "var(--series-1, #0072b2)" in drawn
    assert set(re.findall(r"#[0-9a-f]{6}", drawn)) <= set(plots.PALETTE)
    assert "font-family" not in drawn and "<style" not in drawn and 'id="figure' not in drawn


def test_places_are_rounded_and_words_are_not():
    svg = plots.lines({"a": ([0.0, 1.0], [0.12345, 0.12347])}, "0.123456 of users", "y", "t", ticks=["0.98765", "b"])
    assert "0.123456 of users" in words(svg) and "0.98765" in words(svg)
    places = " ".join(re.findall(r' (?:d|x|y|transform)="([^"]*)"', svg))
    assert re.search(r"\.\d\d\b", places) and not re.search(r"\.\d{3}", places)


def test_a_file_of_its_own_has_plain_colours(drawn):
    alone = plots.standalone(drawn)
    ET.fromstring(alone.encode())
    assert "var(" not in alone and "currentColor" not in alone and "#0072b2" in alone


def test_equal_values_give_equal_bytes(drawn):
    rng = np.random.default_rng(0)
    values = {arm: rng.normal(0.1, 0.01, 5) for arm in ("matched", "bft <1>")}
    assert plots.seed_scatter("matched", values, "ndcg@10", {"matched": 0, "bft <1>": 1}) == drawn


def test_equal_points_and_constant_curves_can_be_drawn():
    values = {"matched": np.zeros(3), "bft": np.zeros(3)}
    assert "<svg" in plots.seed_scatter("matched", values, "hr@10", {"matched": 0, "bft": 1})
    assert "<svg" in plots.training_curves({"bft": [([1.0], [0.0])]}, "validation HR@10", {"bft": 0})
    assert "<svg" in plots.intervals([], "x", "t")
    assert "<svg" in plots.lines({"a": ([0.0, 0.0], [0.0, 0.0])}, "x", "y", "t", diagonal=True)


def test_every_name_stands_in_the_legend_as_it_is_written():
    names = ["_hidden", "cost $\\frac$", "a$b$c"]
    drawings = [
        plots.seed_scatter("matched", {n: np.ones(2) for n in ["matched", *names]}, "hr@10", dict.fromkeys(names, 1)),
        plots.training_curves({n: [([1.0], [0.0])] for n in names}, "validation HR@10", dict.fromkeys(names, 0)),
        plots.lines({n: ([0.0, 1.0], [0.0, 1.0]) for n in names}, "x", "y", "t"),
    ]
    for svg in drawings:
        written = [word.lstrip("\u200b") for word in words(svg)]
        assert all(name in written for name in names)


def test_a_missing_matplotlib_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=re.escape("install it with: pip install 'recbft[report]'")):
        plots.check_available()


def test_importing_a_report_needs_no_matplotlib():
    code = "import sys, recbft.reporting.report; sys.exit(any('matplotlib' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
