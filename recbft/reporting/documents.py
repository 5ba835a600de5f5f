"""What a terminal and ``.md`` files say of a comparison, of pooled comparisons and of a sweep: a head and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recbft.comparing import provenance
from recbft.comparing.results import is_constant
from recbft.evaluation.protocol import SETTINGS, headline_setting
from recbft.experiments.lists import counted, seeds_text
from recbft.reporting.comparison_tables import (
    findings,
    level_table,
    seed_table,
    training_table,
    user_table,
    without_spread,
)
from recbft.reporting.tables import Cell, Column, Kind, Table, digits_for, markdown_words
from recbft.reporting.tables import markdown as markdown_of
from recbft.reporting.tables import text as text_of


def comparison_document(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The text of ``comparison.md``, or the same for a terminal.

    Args:
        result: what ``write_comparison`` returns.
    """
    tables = [level_table(result), training_table(result)]
    for found in findings(result).values():
        tables += [seed_table(result, found), user_table(result, found)] if found else []
    return _document([head(result, markdown=markdown)], [one for one in tables if one is not None], markdown=markdown)


def pooled_document(pooled: Mapping[str, Any], *, markdown: bool) -> str:
    """The pooled figures as a table, and how each comparison was made."""
    heads = [head(each, markdown=markdown) for each in pooled["made_of"]]
    absent = ", ".join(pooled.get("left_out", []))
    said = [f"Left out, not in every comparison: {absent}"] if absent else []
    return _document([], [_pooled_table(pooled)], [*said, *heads], markdown=markdown)


def sweep_document(result: Mapping[str, Any], *, markdown: bool) -> str:
    """The table of a sweep, and which value validation chooses.

    Args:
        result: what ``sweep_results`` returns, with the header and notes of a comparison.
    """
    default = "the default, " if result["chosen"] == result["default"] else ""
    chosen = (
        f"Chosen by validation: {default}{result['key']}={_value(result['chosen'])}. The test columns played no part "
        "in the choice: report the chosen value on fresh seeds."
    )
    return _document([head(result, markdown=markdown)], [_sweep_table(result)], [chosen], markdown=markdown)


def head(result: Mapping[str, Any], *, markdown: bool) -> str:
    """Command, date, device, versions, data, seeds, protocol and notes."""
    p = result["protocol"]
    lines = ("  \n" if markdown else "\n").join(provenance.lines(result["made"]))
    said = (
        f"Seeds {seeds_text(result['seeds'])}. The last event of each user is the test target; it is ranked among all "
        f"{p['items']:,} items, and ties count against it. Early stopping on {_stopped_by(p)}."
    )
    notes = list(result["notes"])
    if len(result.get("environments", ())) > 1:
        notes.append(f"the runs come from {len(result['environments'])} different environments")
    return "\n\n".join([lines, said, *(["\n".join(f"- note: {note}" for note in notes)] if notes else [])])


def _document(before: list[str], tables: list[Table], after: list[str] | None = None, *, markdown: bool) -> str:
    written = [(markdown_of if markdown else text_of)(table).rstrip("\n") for table in tables]
    words = [markdown_words(part) if markdown else part for part in (*before, *(after or []))]
    return "\n\n".join([*words[: len(before)], *written, *words[len(before) :]]) + "\n"


def _pooled_table(pooled: Mapping[str, Any]) -> Table:
    rows: list[list[Cell]] = [
        [one["arm"], one["metric"].upper(), SETTINGS[one["setting"]], *one["relative"], one["mean_relative"],
         f"{one['better_on']} of {len(pooled['data'])}", one["p_fisher"], one["p_holm"]]
        for one in pooled["pooled"]
    ]  # fmt: skip
    constant = ""
    if any(one["constant_on"] for one in pooled["pooled"]):
        constant = " Where a difference is the same in every seed of a data set, its p there is that of the sign flips."
    return Table(
        name="pooled",
        title=f"Relative difference from {pooled['baseline']} per data set, and Fisher's pooled p",
        caption="Fisher's p pools the paired t-tests over seeds of the data sets; p Holm is the same p, adjusted by "
        f"Holm over the {len(rows)} rows. A small p says that there is a difference on some data set; read its "
        f"direction from the columns of the data sets.{constant}",
        columns=[Column("arm"), Column("metric"), Column("items"),
                 *(Column(name, "percent") for name in pooled["data"]), Column("mean", "percent"),
                 Column("better on"), Column("Fisher's p", "p"), Column("p Holm", "p")],
        rows=rows,
    )  # fmt: skip


def _sweep_table(result: Mapping[str, Any]) -> Table:
    parts = ("validation", "test")
    kinds: dict[str, Kind] = {"mean ± sd": "spread", "difference": "signed", "relative": "percent",
                              "95 % interval": "interval", "p": "p", "p Holm": "p"}  # fmt: skip
    rows: list[list[Cell]] = []
    for row in result["rows"]:
        label = f"{_value(row['value'])}{' (default)' if row['is_default'] else ''}"
        rows.append([label, *(cell for part in parts for cell in _part_cells(row[part]))])
    differences = [d for row in result["rows"] for part in parts if (d := row[part]["difference"]) is not None]
    return Table(
        name="sweep",
        title=f"{result['metric'].upper()}, {SETTINGS[result['setting']]}, by {result['key']}",
        caption=f"Differences from the default {_value(result['default'])} are paired by seed; p: paired t-test; p "
        f"Holm: adjusted by Holm over the {counted(len(rows) - 1, 'other value')}."
        f"{without_spread(map(is_constant, differences))}",
        columns=[Column(result["key"]), *(Column(f"{part} {name}", kind) for part in parts
                                          for name, kind in kinds.items())],
        rows=rows,
        digits=digits_for((d["difference"], d["p_t"]) for d in differences),
    )  # fmt: skip


def _part_cells(part: Mapping[str, Any]) -> list[Cell]:
    d, level = part["difference"], (part["mean"], part["sd"])
    if d is None:
        return [level, None, None, None, None, None]
    interval = None if is_constant(d) else tuple(d["interval"])
    return [level, d["difference"], d["relative"], interval, d["p_t"], d["p_holm"]]


def _stopped_by(protocol: Mapping[str, Any]) -> str:
    metric = protocol["config"].get("training.valid_metric")
    judged = "each arm's validation metric" if metric is None else f"validation {metric.upper()}"
    setting = SETTINGS[headline_setting(protocol["filter_seen"])]
    epochs = protocol["config"].get("training.epochs")
    within = f" within {counted(epochs, 'epoch')}" if epochs else ""
    return f"{judged} ({setting}){within}"


def _value(value: Any) -> str:
    """A value as ``--set`` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
