"""The page in a real browser, where one is installed: nothing overflows, everything shows, the console is clean."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from recbft.reporting.report import make_report, write_report

pytest.importorskip("matplotlib")
_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)
PROGRAM = browser.find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")

# What is wider than the page and not inside a box that scrolls.
SPILLED = """[...document.querySelectorAll('body *')].filter(element => {
  const box = element.getBoundingClientRect();
  return (box.right > innerWidth + 0.5 || box.left < -0.5) && !element.closest('.scroll, pre, svg');
}).map(element => element.outerHTML.slice(0, 80))"""
DRAWINGS = """[...document.querySelectorAll('main svg')].map(element => {
  const box = element.getBoundingClientRect();
  return {width: box.width, height: box.height, parts: element.querySelectorAll('path, use').length,
          text: Math.min(...[...element.querySelectorAll('text')].map(t => t.getBoundingClientRect().height))};
})"""
# The lightest and the darkest of text and ground, by the relative luminance of WCAG 2.
CONTRAST = """(() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => {
    v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const shown = 'p, td, th, figcaption, h1, h2, a, svg text, svg :not(defs) > path[style*="--series"]';
  return [...document.querySelectorAll(shown)].map(element => {
    const style = getComputedStyle(element);
    const drawn = element.closest('svg') ? (style.fill !== 'none' ? style.fill : style.stroke) : style.color;
    return ratio(light(drawn), ground); }).reduce((a, b) => Math.min(a, b)); })()"""


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory):
    (path,) = write_report(make_report(comparison), tmp_path_factory.mktemp("page"), ("html",))
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_shows_everything_and_is_silent(chromium, page, width, dark):
    chromium.open(page, width=width, dark=dark)
    assert chromium.value("innerWidth") == width
    assert chromium.value("document.documentElement.scrollWidth") == width
    assert chromium.value("document.querySelectorAll('details').forEach(one => one.open = true)") is None
    assert chromium.value(SPILLED) == []
    pictures = chromium.value("[...document.images].map(image => image.naturalWidth)")
    assert all(natural > 0 for natural in pictures)
    drawings = chromium.value(DRAWINGS)
    assert len(drawings) == page.read_text().count("<svg")
    assert all(one["width"] > 250 and one["height"] > 60 and one["parts"] > 3 for one in drawings), drawings
    assert all(one["text"] > 6 for one in drawings), "text in a drawing is too small to read"
    assert chromium.value(CONTRAST) > 3
    assert chromium.complaints() == []


# Tables that scroll inside their box, of those that are not folded.
WIDER = """[...document.querySelectorAll('section > figure .scroll')]
  .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.parentElement.id)"""


def test_a_phone_shows_the_main_columns_and_all_when_asked(chromium, page):
    chromium.open(page, width=390)
    assert chromium.value(WIDER) == []
    chromium.value("document.getElementById('all-seeds-against-matched').click()")
    assert chromium.value(WIDER) == ["table-seeds-against-matched"]
    chromium.open(page, width=1280)
    assert chromium.value("[...document.querySelectorAll('section > figure .w')].every(cell => cell.offsetWidth > 0)")


def test_a_long_name_leaves_the_numbers_beside_it_in_sight(chromium, comparison, tmp_path):
    name = "bft[core.initial=empirical_bayes,core.prior_scale=per_layer,training.learning_rate=0.0005]"
    arm = replace(comparison.arms["bft"], name=name)
    renamed = replace(comparison, arms={"matched": comparison.arms["matched"], name: arm})
    (path,) = write_report(make_report(renamed), tmp_path, ("html",))
    chromium.open(path, width=390)
    names = chromium.value("[...document.querySelectorAll('tbody th')].map(one => one.getBoundingClientRect().width)")
    assert max(names) < 200 and min(names) > 20
    assert chromium.value("document.documentElement.scrollWidth") == 390
    texts = chromium.value(DRAWINGS)
    assert all(one["text"] > 5 for one in texts), texts


def test_light_and_dark_are_two(chromium, page):
    grounds = []
    for dark in (False, True):
        chromium.open(page, width=390, dark=dark)
        colour = chromium.value("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(map(int, re.findall(r"\d+", colour)[:3])))
    assert grounds[0] > 700 and grounds[1] < 120


def test_print_shows_what_is_folded_within_the_sheet(chromium, page, tmp_path):
    chromium.open(page, width=718)  # A4 less its margins
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.value("document.documentElement.scrollWidth") == 718
    heights = chromium.value(
        "[...document.querySelectorAll('details table')].map(t => t.getBoundingClientRect().height)"
    )
    assert heights and min(heights) > 20
    assert chromium.value("[...document.querySelectorAll('table')].every(t => t.getBoundingClientRect().right < 720)")
    chromium.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
