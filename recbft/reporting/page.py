"""One self-contained page: no script, no font, no picture from elsewhere; every text from outside is escaped.

Readable on a phone, in print, on light and dark ground (``page.css``). A table scrolls inside its own box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template

from recbft.reporting.tables import Table, html, html_words
from recbft.reporting.verdict import Answer

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


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A drawing and the words below it."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands under it; ``folded`` tables open on demand, ``commands`` are set as typed."""

    name: str
    title: str
    words: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    commands: Sequence[str] = ()
    items: Mapping[str, str] = field(default_factory=dict)


def page(
    title: str,
    answers: Sequence[Answer],
    terms: Mapping[str, str],
    sections: Sequence[Section],
    *,
    generator: str,
    notice: str = "",
) -> str:
    """The page's text.

    Args:
        title: what is compared, on what.
        answers: for each arm, shown first.
        terms: what the words of the answers mean.
        generator: what made the page.
        notice: what the page lacks, and how to get it.
    """
    parts = [part for one in answers for part in _answer(one)]
    if terms:
        parts.append(f"<details open><summary>What these words mean</summary>{_definitions(terms)}</details>")
    return _PAGE.substitute(
        title=escape(title),
        style=files("recbft.reporting").joinpath("page.css").read_text(encoding="utf-8"),
        answer="\n".join([*parts, *([_paragraph(notice, "notice")] if notice else [])]),
        contents=" ".join(f'<a href="#{escape(s.name)}">{escape(s.title)}</a>' for s in sections),
        sections="\n".join(map(_section, sections)),
        generator=escape(generator),
    )


def _answer(one: Answer) -> list[str]:
    said = (f"<b>{label}:</b> {html_words(words)}" for label, words in
            (("What to do", one.advice), ("Evidence", one.evidence)))  # fmt: skip
    return [_paragraph(one.sentence, "sentence"), *(f"<p>{each}</p>" for each in said)]


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>']
    parts += map(_paragraph, section.words)
    if section.plots:
        # The drawings are our own: see ``plots.svg``, which escapes what it writes.
        drawn = (f"<figure>{p.svg}<figcaption>{html_words(p.caption)}</figcaption></figure>" for p in section.plots)
        parts.append(f'<div class="plots">{"".join(drawn)}</div>')
    parts += map(html, section.tables)
    parts += (f"<details><summary>{escape(t.title)}</summary>{html(t)}</details>" for t in section.folded)
    parts += (f"<pre>{escape(command)}</pre>" for command in section.commands)
    if section.items:
        parts.append(f"<details><summary>Every field of the protocol</summary>{_definitions(section.items)}</details>")
    return "\n".join([*parts, "</section>"])


def _definitions(items: Mapping[str, str]) -> str:
    return f"<dl>{chr(10).join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in items.items())}</dl>"


def _paragraph(words: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{html_words(words)}</p>"
