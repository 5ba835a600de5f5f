"""One answer from several data sets: Fisher's pooled p of the same comparison made on each.

    X = -2 sum_k log p_k  ~  chi-square with 2 k degrees of freedom where nothing differs on any data set         (a)

(a) asks whether there is a difference somewhere, whichever way: a gain here and a loss there add up to a small p too.
So the number of data sets on which the arm is better stands beside it. Holm's adjustment is over the rows of the table.

Source: Fisher, Statistical Methods for Research Workers (1925), section 21.1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recbft.comparing.comparison import COMPARISON_FILE
from recbft.comparing.results import cells_of, is_constant
from recbft.errors import UserError
from recbft.evaluation.paired import fisher, holm
from recbft.evaluation.protocol import SETTINGS
from recbft.system.files import read_json

Cell = tuple[str, str, str]  # arm, setting, metric


def read_results(path: Path) -> dict[str, Any]:
    """The figures in a folder written by ``recbft compare``."""
    file = path / COMPARISON_FILE
    if not file.is_file():
        raise UserError(f"{path} holds no {COMPARISON_FILE}; --pool takes folders written by recbft compare")
    try:
        read: dict[str, Any] = read_json(file)
    except ValueError:
        raise UserError(f"{file} is damaged; make it again with recbft compare") from None
    return read


def pool(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pool comparisons made on different data sets.

    Raises:
        UserError: fewer than two, two on the same data or on one file's events, different baselines or models, or no
            comparison in common.
    """
    if len(results) < 2:
        raise UserError("pooling needs at least 2 comparisons; give more folders")
    # The content of a data set has another hash with its times than without; its targets have not.
    hashes = [[result["protocol"][of] for result in results] for of in ("content_hash", "target_hash")]
    if any(len(set(found)) < len(found) for found in hashes):
        raise UserError("two comparisons are on the same data; pooled p-values must come from different data sets")
    _check_different_events([result["protocol"] for result in results])
    baselines = {result["baseline"] for result in results}
    if len(baselines) > 1:
        raise UserError(f"the comparisons have baselines {', '.join(sorted(baselines))}; give --baseline to each alike")
    baseline = baselines.pop()
    each = [{cell[:3]: cell[3] for cell in cells_of(result["comparisons"].get(baseline, {}))} for result in results]
    models = {str(result["protocol"].get("config", {}).get("model")) for result in results}
    if len(models) > 1:
        raise UserError(f"the comparisons are of {', '.join(sorted(models))}; pool those of one model")
    shared = [key for key in each[0] if all(key in one for one in each)]
    if not shared:
        raise UserError("the comparisons have no arm and metric in common; compare the same arms on each data set")
    pooled = [_pooled(key, [one[key]["over_seeds"] for one in each]) for key in shared]
    for row, p in zip(pooled, holm([row["p_fisher"] for row in pooled]), strict=True):
        row["p_holm"] = p
    return {
        "baseline": baseline,
        "data": [result["protocol"]["dataset"] for result in results],
        "made_of": [{key: result[key] for key in ("made", "seeds", "protocol", "notes")} for result in results],
        "pooled": pooled,
        "left_out": _left_out({key for one in each for key in one}, set(shared)),
    }


def _check_different_events(protocols: Sequence[dict[str, Any]]) -> None:
    """UserError where one file's events were prepared in two ways: their p-values are not independent.

    Rows chosen by another ``where`` are other data. Of equal filters other content is another file of that size.
    """
    seen: dict[str, dict[str, Any]] = {}
    for protocol in protocols:
        preparation = protocol.get("preparation", {})
        filters = dict(preparation.get("filters", {}))
        events = repr((protocol["dataset"], preparation.get("before"), filters.pop("where", None)))
        other = seen.setdefault(events, filters)
        differ = sorted(key for key in filters.keys() | other.keys() if filters.get(key) != other.get(key))
        if differ:
            raise UserError(
                f"two comparisons are on the events of {protocol['dataset']}, prepared with other {', '.join(differ)}; "
                "pooled p-values must come from different data sets"
            )


def _left_out(there: set[Cell], shared: set[Cell]) -> list[str]:
    """Arms that not every comparison has, and of the others the metrics that not every one has."""
    arms = {arm for arm, _, _ in shared}
    return sorted(
        {
            f"{arm} {metric.upper()} ({SETTINGS[setting]})" if arm in arms else arm
            for arm, setting, metric in there - shared
        }
    )


def _pooled(key: Cell, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    arm, setting, metric = key
    relative = [one["relative"] for one in each]
    known = [value for value in relative if value is not None]
    return {
        "arm": arm,
        "setting": setting,
        "metric": metric,
        "relative": relative,
        "mean_relative": statistics.mean(known) if known else None,
        "constant_on": sum(map(is_constant, each)),
        "better_on": sum(one["difference"] > 0 for one in each),
        "p_fisher": fisher([one["p_t"] for one in each]),
        "p_fisher_sign_flip": fisher([one["p_sign_flip"] for one in each]),
    }
