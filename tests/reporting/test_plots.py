"""Drawings that take a page's colours, and say how to have them where matplotlib is missing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from recbft.evaluation.paired import compare_seeds
from recbft.evaluation.strata import Level, StratumResult
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


def test_equal_points_and_constant_curves_can_be_drawn():
    values = {"matched": np.zeros(3), "bft": np.zeros(3)}
    assert "<svg" in plots.seed_scatter("matched", values, "hr@10", {"matched": 0, "bft": 1})
    assert "<svg" in plots.training_curves({"bft": [([1.0, 2.0], [0.0, 0.0])]}, "validation HR@10", {"bft": 0})
    assert "<svg" in plots.intervals([], "x", "t")
    assert "<svg" in plots.lines({"a": ([0.0, 0.0], [0.0, 0.0])}, "x", "y", "t", diagonal=True)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_epochs_are_counted_in_whole_numbers_and_one_is_a_dot(epochs):
    runs = [(list(range(1, epochs + 1)), [0.5] * epochs)]
    svg = plots.training_curves({"bft": runs}, "validation HR@10", {"bft": 1})
    assert ("fill: var(--series-1" in svg) == (epochs == 1)
    before = words(svg)[: words(svg).index("epoch")]
    assert before == [str(n + 1) for n in range(epochs)]


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


LONG = "bft[core.initial=empirical_bayes,core.prior_scale=per_layer,training.learning_rate=0.0005]"


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_long_name_is_broken_and_leaves_the_drawing_its_room(number):
    names = [f"{n}{LONG}" for n in range(number)]
    values = {name: np.linspace(0.1, 0.2, 3) for name in ("matched", *names)}
    colours = {name: n for n, name in enumerate(values)}
    found = compare_seeds([0.1, 0.2, 0.15], [0.11, 0.22, 0.15])
    drawings = [
        plots.seed_scatter("matched", values, "hr@10", colours),
        plots.intervals([(f"{name}, HR@10", [(1, found)]) for name in names], f"difference from {LONG}", "t"),
        plots.training_curves({name: [([1.0], [0.0])] for name in values}, "validation HR@10", colours),
    ]
    for svg in drawings:
        assert float(ET.fromstring(svg).get("width")) < 560
        assert all(name in "".join(words(svg)) for name in names)
        assert max(map(len, words(svg))) <= 2 * plots.LETTERS


@pytest.mark.parametrize("settings", [1, 4, 12])
def test_names_of_many_lines_stand_below_one_another(settings):
    name = f"bft[{','.join([LONG[4:34]] * settings)}]"
    found = compare_seeds([0.1, 0.2, 0.15], [0.11, 0.22, 0.15])
    svg = plots.intervals([(f"{name}, {metric}", [(1, found)]) for metric in ("HR@10", "NDCG@10", "MRR") * 4], "x", "t")
    heights = sorted(float(y) for y in re.findall(r"translate\([-\d.]+ ([-\d.]+)\)", svg))
    assert len(heights) > 12 * settings and min(np.diff(heights)) > 10  # letters are 9 high


def test_every_series_of_many_looks_different_and_none_is_the_baseline():
    looks = [(plots._series(n), plots._marker(n)) for n in range(20)]
    curves = [(plots._series(n), plots._dashes(n)) for n in range(20)]
    assert len(set(looks)) == len(set(curves)) == 20
    assert not [look for look in looks[1:] if looks[0][0] in look or looks[0][1] in look]


def stratum(name, bounds, mean, too_small=""):
    levels = {arm: Level(mean=mean, interval=(mean - 2, mean + 2)) for arm in ("matched", "bft")}
    return StratumResult(
        name=name, bounds=bounds, num_users=400, num_targets=9, mean_target_frequency=1.0, levels=levels,
        differences={}, holm_p={}, too_small=too_small,
    )  # fmt: skip


def test_bars_have_a_full_legend_whiskers_within_the_metric_and_bounds_that_do_not_meet():
    rows = [stratum("Q0", "0-2.13 min", 0.1, "3 hits"), stratum("Q1", "2.15 min-5.55 min", 0.2)]
    svg = plots.strata_bars(rows, "time since the event before", "ndcg@10", {"matched": 0, "bft": 1})
    for place in ("2.15 min-", "5.55 min", "0-", "2.13 min"):
        assert place in words(svg)
    scale = [float(word) for word in words(svg) if re.fullmatch(r"[\d.]+", word)]
    assert 0.9 < max(scale) <= 1.2  # no NDCG is above 1, whatever a t interval over two seeds says
    swatches = re.findall(r'style="fill: var\(--series[^"]*"', svg)[-2:]
    assert not any("opacity" in swatch for swatch in swatches) and "opacity: 0.35" in svg
    short = plots.strata_bars([stratum("Q0", "8-19", 0.1)], "training events", "ndcg@10", {"matched": 0, "bft": 1})
    assert "8-19" in words(short)


def test_a_difference_without_an_interval_is_hollow():
    values = np.array([0.1, 0.2, 0.15])
    for other, hollow in ((values + 0.01, True), (values * 1.1, False)):
        svg = plots.intervals([("bft, HR@10", [(1, compare_seeds(values, other))])], "x", "t")
        assert ("fill-opacity: 0" in svg) == hollow


def test_letters_that_matplotlib_has_no_font_for_are_drawn_without_a_warning(recwarn):
    assert "日本語" in words(plots.lines({"日本語": ([0.0, 1.0], [0.0, 1.0]), "b": ([0.0], [0.0])}, "x", "y", "t"))
    assert not [one for one in recwarn if "Glyph" in str(one.message)]


def test_a_plot_in_a_file_and_on_a_page_and_in_print_has_the_same_colours():
    sheet = (Path(plots.__file__).parent / "page.css").read_text()
    for part in (sheet.split("@media")[0], sheet.split("@media print")[1]):
        found = dict(re.findall(r"--series-(\d): (#\w+)", part))
        assert [found[str(number)] for number in range(len(plots.PALETTE))] == list(plots.PALETTE)
