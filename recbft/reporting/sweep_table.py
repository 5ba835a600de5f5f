"""The table of a sweep, and which value validation chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recbft.comparing.results import is_constant
from recbft.evaluation.protocol import SETTINGS
from recbft.experiments.lists import counted
from recbft.reporting.document import Table, difference_cells, head, mean_sd, p_text, without_spread
from recbft.reporting.text_tables import markdown_table, markdown_words, text_table


def sweep_document(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The table of a sweep, and which value validation chooses.

    Args:
        result: what ``sweep_results`` returns, with the header and notes of a comparison.
    """
    table: Table = markdown_table if markdown else text_table
    metric = f"{result['metric'].upper()}, {SETTINGS[result['setting']]}"
    cells = ["mean ± sd", "difference", "relative", "95 % interval", "p", "p Holm"]
    names = [result["key"], *(f"{part} {cell}" for part in ("validation", "test") for cell in cells)]
    rows = []
    for row in result["rows"]:
        label = f"{_text(row['value'])}{' (default)' if row['is_default'] else ''}"
        rows.append([label, *(cell for part in ("validation", "test") for cell in _part_cells(row[part]))])
    differences = [row[part]["difference"] for row in result["rows"] for part in ("validation", "test")]
    constant = without_spread(is_constant(d) for d in differences if d is not None)
    chosen = "the default, " if result["chosen"] == result["default"] else ""
    text = (
        f"{head(result, markdown=markdown)}\n\n"
        f"{metric}; differences from the default {_text(result['default'])} are paired by seed, p by paired t-test, "
        f"Holm over the {counted(len(rows) - 1, 'other value')}.{constant}\n\n"
        f"{table(names, rows)}\n\n"
        f"Chosen by validation: {chosen}{result['key']}={_text(result['chosen'])}. The test columns played no part in "
        "the choice: report the chosen value on fresh seeds.\n"
    )
    return markdown_words(text) if markdown else text


def _part_cells(part: Mapping[str, Any]) -> list[str]:
    d = part["difference"]
    if d is None:
        return [mean_sd(part), "", "", "", "", ""]
    return [mean_sd(part), *difference_cells(d), p_text(d["p_t"]), p_text(d["p_holm"])]


def _text(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
