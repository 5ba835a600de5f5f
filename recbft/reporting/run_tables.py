"""What one run says: its metrics with the protocol they were made under, and what its lists show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbft.evaluation.evaluate import lists_of
from recbft.evaluation.metrics import SETTINGS, protocol_lines
from recbft.reporting.tables import text_table


def format_metrics(rows: Mapping[str, Mapping[str, float]], protocol: Mapping[str, Any]) -> str:
    """Metrics as a table for a terminal, one line per row, and the protocol they were made under.

    Args:
        rows: metrics by name for each label, such as an evaluation's ``metrics``; "unfiltered" and "filtered" are spelt
            out.
    """
    names = list(dict.fromkeys(name for metrics in rows.values() for name in metrics))
    cells = [[SETTINGS.get(label, label), *map(metrics.get, names)] for label, metrics in rows.items()]
    return "\n".join([text_table(["", *(name.upper() for name in names)], cells), *protocol_lines(protocol)])


def format_exposure(found: Mapping[str, Mapping[str, float]], targets: float, protocol: Mapping[str, Any]) -> str:
    """What lists show as a table for a terminal.

    Args:
        found: ``exposure`` by setting.
        targets: mean training count of the targets.
        protocol: of the same pass, whose users and items say whose lists these are.
    """
    k = usual_cutoff(next(iter(found.values())))
    rows: list[list[object]] = []
    for setting, measures in found.items():
        popularity = measures.get(f"popularity@{k}")
        often = None if popularity is None else f"{popularity:.1f}"
        rows.append([SETTINGS[setting], measures.get(f"coverage@{k}"), measures.get(f"gini@{k}"), often])
    rows.append(["the targets", "", "", f"{targets:.1f}"])
    table = text_table([f"lists of {k} show", "COVERAGE", "GINI", "POPULARITY"], rows)
    some = lists_of(protocol.get("users_tested", protocol["users"]), protocol["items"])
    return f"{table}\nlists of {some}, drawn from a fixed seed" if some else table


def format_join(joined: Mapping[str, Any]) -> str:
    """The weights of a join as a table for a terminal, and which of them were fitted elsewhere.

    Args:
        joined: the entry of a run's protocol.
    """
    names = [f"{number} ({each['model']} {each['arm']})" for number, each in enumerate(joined["runs"], start=1)]
    rows = [
        [row["bin"], f"{row['items']:,}", f"{row['targets']:,}", f"{row['first']:.3g}", f"{row['second']:.3g}"]
        for row in joined["bins"]
    ]
    lines = [text_table(["training count", "items", "targets", *(f"weight of {name}" for name in names)], rows)]
    lines += [
        f"{row['bin']}: no target to fit on, so the weights of {row['weights_of']}"
        for row in joined["bins"]
        if row["weights_of"] != row["bin"]
    ]
    if worth := joined.get("prior_targets"):
        lines.append(f"prior: as if each bin had {worth:.3g} more targets that ask for the weights of all")
    if rare := joined.get("for_rare"):
        of_all, own = ("{:.4f} to {:.4f}".format(*rare[name]) for name in ("ndcg", "ndcg_rare"))
        lines.append(
            f"items with fewer than {rare['fewer_than']} training events: {rare['level']:g} added to their scores; "
            f"NDCG@10 of unseen validation targets from {of_all}, of these items' from {own}"
        )
    return "\n".join(lines)


def usual_cutoff(found: Mapping[str, float]) -> int:
    """The k of a table of ``exposure``: 10 where it was measured, else the largest."""
    ks = [int(name.partition("@")[2]) for name in found]
    return 10 if 10 in ks else max(ks)
