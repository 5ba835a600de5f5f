"""One self-contained page: no script, no font, no picture from elsewhere; every text from outside is escaped.

Readable on a phone, in print, on light and dark ground (``page.css``). A table scrolls inside its own box.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from recbft.reporting.sections import Plot, Section
from recbft.reporting.tables import Table, html

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="$generator">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<div class="answer">
$answer
</div>
<nav aria-label="Sections">$contents</nav>
</header>
<main>
$sections
</main>
<footer>$generator</footer>
</body>
</html>
""")


def page(title: str, answer: Sequence[str], sections: Sequence[Section], *, generator: str) -> str:
    """The page's text.

    Args:
        title: what is compared, on what.
        answer: a sentence for each arm, shown first.
        generator: what made the page.
    """
    return _PAGE.substitute(
        title=escape(title),
        style=files("recbft.reporting").joinpath("page.css").read_text(encoding="utf-8"),
        answer="\n".join(map(_paragraph, answer)),
        contents=" ".join(f'<a href="#{escape(s.name)}">{escape(s.title)}</a>' for s in sections),
        sections="\n".join(map(_section, sections)),
        generator=escape(generator),
    )


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>']
    parts += map(_paragraph, section.words)
    if section.plots:
        parts.append(f'<div class="plots">{"".join(map(_plot, section.plots))}</div>')
    parts += map(html, section.tables)
    parts += map(_folded, section.folded)
    parts += (f"<pre>{escape(command)}</pre>" for command in section.commands)
    if section.items:
        rows = "\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in section.items.items())
        parts.append(f"<details><summary>Every field</summary><dl>{rows}</dl></details>")
    return "\n".join([*parts, "</section>"])


def _plot(plot: Plot) -> str:
    # The drawing is our own: see ``plots.svg``, which escapes what it writes.
    return f"<figure>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"


def _folded(table: Table) -> str:
    return f"<details><summary>{escape(table.title)}</summary>{html(table)}</details>"


def _paragraph(words: str) -> str:
    """With a number and what belongs to it on one line."""
    kept = (
        escape(words).replace(" %", "&nbsp;%").replace("p = ", "p&nbsp;=&nbsp;").replace("p &lt; ", "p&nbsp;&lt;&nbsp;")
    )
    return f"<p>{kept}</p>"
