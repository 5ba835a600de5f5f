"""The model card of a finished run: what it is, how well it ranks under which protocol, and what it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recbft.evaluation.metrics import SETTINGS, protocol_lines
from recbft.runs.folder import RunFolder
from recbft.system.files import write_atomic

CARD_FILE = "card.md"
_LIMITS = """\
It knows the items of its training data; new ones can be given to a model that was trained with item features alone.
The figures above rank one held-out event of each user among all items, offline: they do not say what users do with the
lists. The table says how much of the catalogue the lists show, how unevenly (Gini), and how often the items they show
occur in training.
"""


def write_card(run: RunFolder, metrics: Mapping[str, Any]) -> None:
    """Write ``card.md`` into a run's folder, from its other files and the metrics that are to finish it."""
    write_atomic(run.path / CARD_FILE, card_text(run.protocol, metrics, run.environment).encode())


def card_text(protocol: Mapping[str, Any], metrics: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The card as Markdown.

    Args:
        protocol, metrics, environment: the content of the run's files of these names.
    """
    config, calibrated = protocol["config"], metrics.get("probability") or {}
    name = f"{config['model']} ({config['arm']})"
    trained_by = metrics.get("trained_by", f"recbft {protocol['recbft_version']}")
    facts = {
        "model": f"{name}, mixer {config['mixer']}" if config.get("mixer") else name,
        "data set": f"{protocol['dataset']}: {protocol['users']:,} users, {protocol['items']:,} items, "
        f"{protocol['events']:,} events, content {protocol['content_hash'][:12]}",
        "trained by": f"{trained_by}, {environment.get('date', 'day unknown')}, seed {protocol['seed']}"
        + (f", {metrics['epochs']} epochs, the best {metrics['best_epoch']}" if metrics.get("epochs") else ""),
        "probabilities": "calibrated on validation targets" if any(calibrated.values()) else "none",
    }
    return "\n".join(
        [
            f"# {name} on {protocol['dataset']}\n",
            "Ranks the items that a user is likely to choose next, from the user's history.\n",
            *_table(["", "what it is"], [[key, value] for key, value in facts.items()]),
            "\n## Ranking\n",
            *_metrics({f"{part}, {SETTINGS[key]}": row
                       for part in ("test", "validation") for key, row in metrics[part].items()}),
            "",
            *(f"- {line}" for line in protocol_lines(protocol)),
            "\n## Limits\n",
            _LIMITS,
            *_metrics({SETTINGS[key]: row for key, row in (metrics.get("exposure") or {}).items()}),
            "\n## Use\n",
            '    Recommender.load("this folder").recommend({"a user": ["an item", "a later one"]}, k=10)\n',
        ]
    )  # fmt: skip


def _metrics(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return _table(["", *names], [[key, *(_figure(row.get(name)) for name in names)] for key, row in rows.items()])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
