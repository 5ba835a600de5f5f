"""The table of pooled comparisons."""

from __future__ import annotations

from typing import Any

from recbft.evaluation.protocol import SETTINGS
from recbft.reporting.document import head, p_text, percent
from recbft.reporting.text_tables import markdown_table, markdown_words, text_table


def pooled_document(pooled: dict[str, Any], *, markdown: bool) -> str:
    """The pooled figures as a table, and how each comparison was made."""
    table = markdown_table if markdown else text_table
    names = ["arm", "metric", "items", *pooled["data"], "mean", "better on", "Fisher's p", "p Holm"]
    rows = [
        [
            one["arm"], one["metric"].upper(), SETTINGS[one["setting"]],
            *("" if r is None else percent(r) for r in (*one["relative"], one["mean_relative"])),
            f"{one['better_on']} of {len(pooled['data'])}", p_text(one["p_fisher"]), p_text(one["p_holm"]),
        ]
        for one in pooled["pooled"]
    ]  # fmt: skip
    constant = ""
    if any(one["constant_on"] for one in pooled["pooled"]):
        constant = " Where a difference is the same in every seed of a data set its p there is the sign flips'."
    absent = ", ".join(pooled.get("left_out", []))
    text = (
        f"Relative difference from {pooled['baseline']} per data set, and Fisher's pooled p of the paired t-tests over "
        f"seeds, by itself and by Holm over the {len(rows)} rows. A small p says that there is a difference somewhere; "
        f"read its direction from the data sets.{constant}\n\n"
        f"{table(names, rows)}\n" + (f"\nLeft out, not in every comparison: {absent}\n" if absent else "")
    )
    text += "".join(f"\n{head(each, markdown=markdown)}\n" for each in pooled["made_of"])
    return markdown_words(text) if markdown else text
