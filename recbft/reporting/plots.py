"""Plots as SVG that stands inside a page: its text and axes take the page's colour, its series the page's palette.

matplotlib draws with stand-in colours; ``svg`` puts ``currentColor`` and ``var(--series-N)`` in their place, so that
one drawing reads on light and dark ground. The palette is Okabe and Ito's, which the colour-blind can tell apart; the
baseline is grey, and series differ in marker or line as well as in colour. Every figure is as wide as a phone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recbft.errors import UserError
from recbft.evaluation.paired import SeedComparison
from recbft.evaluation.strata import StratumResult
from recbft.reporting.comparison_tables import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # stands in for the page's text colour
PALETTE = ("#7a7a7a", "#0072b2", "#d55e00", "#009e73", "#b5548a", "#8a7400", "#3a91c4")
MARKERS = "osD^vP*"
WIDTH = 5.0  # inches of 72 px: a phone's width less its margins
LETTERS = 30  # of a line of a name; longer ones would take the room of the drawing
INSTALL = "plots need matplotlib; install it with: pip install matplotlib"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "axes.titlesize": 9, "legend.frameon": False, "legend.fontsize": 8.5, "axes.grid": True, "grid.color": INK,
    "grid.alpha": 0.12, "axes.axisbelow": True, "lines.linewidth": 1.4, "hatch.linewidth": 0.6,
    "text.parse_math": False,  # an arm's name may hold a dollar sign
}  # fmt: skip


def check_available() -> None:
    """UserError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(INSTALL) from None


def differences(found: Sequence[Finding], colours: Mapping[str, int]) -> str:
    """Every arm's relative difference from the baseline with its interval, metric by metric."""
    rows = [
        (f"{one.arm}, {one.metric.upper()}", [(colours[one.arm], one.seeds)])
        for one in found
        if one.seeds.mean_baseline
    ]
    said = f"difference from {found[0].baseline}, % (95 % interval)"
    return intervals(rows, said, "Relative differences from the baseline with 95 % intervals")


def intervals(
    rows: Sequence[tuple[str, Sequence[tuple[int, SeedComparison]]]],
    x_label: str,
    title: str,
    names: Mapping[int, str] | None = None,
) -> str:
    """Relative differences in per cent with their intervals; a row has one or more, each in a series of ``names``."""
    labels = [_broken(label) for label, _ in reversed(rows)]
    height = 0.3 + 0.13 * (max((len(row) for _, row in rows), default=1) - 1)
    height = max([height, *(0.21 * (label.count("\n") + 1) for label in labels)])  # 0.15 a line, on 0.77 of the figure
    with _figure(0.6 + height * len(rows)) as (figure, axes):
        for place, (_, row) in enumerate(reversed(rows)):
            for number, (series, found) in enumerate(row):
                at = place + 0.26 * ((len(row) - 1) / 2 - number)
                middle, low, high = (100 * end / found.mean_baseline for end in (found.difference, *found.interval))
                colour = _series(series)
                filled = "none" if found.is_constant else colour
                axes.plot([low, high], [at, at], color=colour, linewidth=0 if found.is_constant else 2)
                axes.plot(middle, at, _marker(series), color=colour, markerfacecolor=filled)
        for series, name in (names or {}).items():
            axes.plot([], [], f"{_marker(series)}-", color=_series(series), linewidth=2, label=_label(name))
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel(_broken(x_label, 2 * LETTERS))
        _legend(axes, (names or {}).values())
        return svg(figure, title)


def seed_scatter(
    baseline: str, values: Mapping[str, NDArray[np.float64]], metric: str, colours: Mapping[str, int]
) -> str:
    """A point per seed: the baseline's value against each arm's; above the diagonal the arm is better."""
    with _figure(3.4) as (figure, axes):
        others = [arm for arm in values if arm != baseline]
        everything = np.concatenate(list(values.values()))
        pad = 0.06 * float(np.ptp(everything)) or 0.01 * float(np.abs(everything).max()) or 0.01
        ends = (float(everything.min()) - pad, float(everything.max()) + pad)
        axes.plot(ends, ends, color=INK, linewidth=0.8)
        for arm in others:
            colour = _series(colours[arm])
            axes.plot(values[baseline], values[arm], _marker(colours[arm]), color=colour, alpha=0.85, label=_label(arm))
        axes.set_xlim(ends)
        axes.set_ylim(ends)
        axes.locator_params(nbins=5)  # more labels of four digits run into each other
        axes.set_xlabel(_broken(f"{metric.upper()} of {baseline}, one point per seed", 2 * LETTERS))
        axes.set_ylabel(_broken(f"{metric.upper()} of {others[0] if len(others) == 1 else 'the arm'}", 40))
        _legend(axes, others)
        return svg(figure, f"{metric.upper()} of each arm against {baseline}, seed by seed")


def strata_bars(results: Sequence[StratumResult], unit: str, metric: str, colours: Mapping[str, int]) -> str:
    """Every arm's level in every stratum with its interval; strata too small to say anything are pale."""
    arms = [arm for arm in colours if arm in results[0].levels]
    width = 0.8 / len(arms)
    with _figure(2.7) as (figure, axes):
        for number, arm in enumerate(arms):
            for place, row in enumerate(results):
                level = row.levels[arm]
                at = place + (number - (len(arms) - 1) / 2) * width
                alpha = 0.35 if row.too_small else 1.0
                axes.bar(at, level.mean, width * 0.92, color=_series(colours[arm]), alpha=alpha)
                if level.interval is not None:
                    low, high = max(0.0, level.interval[0]), min(1.0, level.interval[1])
                    axes.plot([at, at], [low, high], color=INK, linewidth=0.8, alpha=max(alpha, 0.5))
            # For the legend, which shows no arm pale.
            axes.bar(0, 0, 0, color=_series(colours[arm]), label=_label(arm))
        long = any(len(row.bounds) > 10 for row in results)
        bounds = [row.bounds.replace("-", "-\n", 1) if long else row.bounds for row in results]
        ticks = [f"{row.name}\n{b}\n{row.num_users:,} users" for row, b in zip(results, bounds, strict=True)]
        axes.set_xticks(range(len(results)), ticks)
        axes.tick_params(axis="x", length=0, labelsize=7.5)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(metric.upper())
        axes.set_xlabel(unit)
        _legend(axes, arms)
        return svg(figure, f"{metric.upper()} of each arm by {unit}")


def training_curves(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]], label: str, colours: Mapping[str, int]
) -> str:
    """A validation metric by epoch: one thin line per run, a dot where there is one epoch, one colour per arm."""
    with _figure(2.7) as (figure, axes):
        for arm, runs in curves.items():
            for number, (epochs, values) in enumerate(runs):
                thin = max(1, len(epochs) // 100)
                axes.plot(
                    epochs[::thin], values[::thin], color=_series(colours[arm]), linewidth=0.9, alpha=0.8,
                    linestyle=_dashes(colours[arm]), marker="." if len(epochs) == 1 else None,
                    label=_label(arm) if number == 0 else None,
                )  # fmt: skip
        axes.set_xlabel("epoch")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)  # for two it would part one epoch
        axes.set_ylabel(label)
        _legend(axes, curves)
        return svg(figure, f"{label} by epoch")


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    title: str,
    *,
    diagonal: bool = False,
    ticks: Sequence[str] | None = None,
) -> str:
    """Named curves in one field; ``ticks`` name the places of x from 0."""
    with _figure(2.8) as (figure, axes):
        if diagonal:
            end = max(max(values) for pair in series.values() for values in pair)
            axes.plot([0, end], [0, end], color=INK, linewidth=0.8)
        for number, (name, (x, y)) in enumerate(series.items(), start=1):
            marker = _marker(number) if ticks is not None or 2 < len(x) <= 15 else None
            axes.plot(
                x, y, color=_series(number), linestyle=_dashes(number), marker=marker, markersize=4, label=_label(name)
            )  # fmt: skip
        if ticks is not None:
            axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _legend(axes, series)
        return svg(figure, title)


def svg(figure: Figure, title: str) -> str:
    """The drawing as an SVG element of the page; ``title`` is what a screen reader says."""
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": title}), warnings.catch_warnings():
        # Letters are drawn by the page, which has fonts that matplotlib has not.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.DOTALL
    )  # a style would be the page's
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # two drawings in a page must not share ids; no group is referred to
    # Letters are the page's; releases of matplotlib write "font" or "font-size" and "font-family".
    drawn = re.sub(r"font: (?:\w+ )*([\d.]+px)[^;\"]*", r"font-size: \1", drawn)
    drawn = re.sub(r"font-family: [^;\"]*;? ?", "", drawn)
    drawn = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda places: re.sub(r"(\.\d\d)\d+", r"\1", places[0]), drawn)
    drawn = drawn.replace(INK, "currentColor")
    for number, colour in enumerate(PALETTE):
        drawn = drawn.replace(colour, f"var(--series-{number}, {colour})")
    drawn = re.sub(r">\s+<", "><", drawn)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', drawn)
    assert size is not None, "matplotlib writes the size in points"
    # Points as pixels: text then has the size that it was given.
    drawn = drawn.replace(size[0], f'width="{float(size[1]):.0f}" height="{float(size[2]):.0f}"', 1)
    named = f'<svg role="img" aria-label="{escape(title)}" style="stroke-linejoin: round; stroke-linecap: butt"'
    return drawn.replace("<svg", named, 1)


def standalone(drawn: str) -> str:
    """A drawing of ``svg`` as a file of its own: black on whatever it is put on, the series in the printed palette."""
    plain = re.sub(r"var\(--series-\d+, (#\w+)\)", r"\1", drawn).replace("currentColor", "#000000")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{plain}\n'


@contextmanager
def _figure(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one field under the page's style, with no window and no global state left behind."""
    check_available()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height))
        yield figure, figure.add_subplot()


def _legend(axes: Axes, names: Iterable[str]) -> None:
    widths = [max(map(len, _broken(name).split("\n"))) for name in names]
    if len(widths) > 1:
        columns = max(1, min(len(widths), 3, 2 * LETTERS // (max(widths) + 4)))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)


def _label(name: str) -> str:
    """A name as the legend shows it; one that begins with an underscore matplotlib would leave out."""
    return f"\N{ZERO WIDTH SPACE}{_broken(name)}" if name.startswith("_") else _broken(name)


def _broken(name: str, letters: int = LETTERS) -> str:
    """A name in lines of at most ``letters`` letters, broken after a comma, bracket or space where there is one.

    >>> _broken("bft[core.initial=count,backbone.dropout=0.3]")
    'bft[core.initial=count,\\nbackbone.dropout=0.3]'
    """
    pieces = re.split(r"(?<=[,\[ ])", name)
    parts = [piece[at : at + letters] for piece in pieces for at in range(0, len(piece), letters)]
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part.rstrip()) > letters:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() if len(lines) > 1 else line for line in lines)


def _series(number: int) -> str:
    """The baseline's grey is its own: the others share the rest."""
    return PALETTE[1 + (number - 1) % (len(PALETTE) - 1)] if number else PALETTE[0]


def _marker(number: int) -> str:
    """Where colours begin again, markers do not."""
    others = len(MARKERS) - 1
    return MARKERS[1 + (number - 1 + (number - 1) // others) % others] if number else MARKERS[0]


def _dashes(number: int) -> str:
    """Where colours and dashes would begin again together, with the thirteenth, dashes go on by one."""
    return ("-", "--", "-.", ":")[(number - 1 + (number - 1) // 12) % 4] if number else "-"
