"""What a comparison says, as numbers: every arm against each baseline, over seeds and over users.

Over seeds asks: would training again show the difference? Over users, seeds averaged away, asks another question: would
other users show it, with these trained models? The second is usually the easier one to answer with yes, and does not
stand for the first.

On validation is for the sceptic: the same runs on each user's event before the tested one. A gain of the method shows
there too; one of these test events does not.

Holm's adjustment is over the family that the table itself declares: every arm, metric and setting that is tested
against one baseline. Give fewer metrics to declare a smaller family.

The same comparison made on several data sets has one answer (``pool``), Fisher's pooled p:

    X = -2 sum_k log p_k  ~  chi-square with 2 k degrees of freedom where nothing differs on any data set         (a)

(a) asks whether there is a difference somewhere, whichever way: a gain here and a loss there add up to a small p too.
So the number of data sets on which the arm is better stands beside it. Holm's adjustment is over the rows of the table.

Source: Fisher, Statistical Methods for Research Workers (1925), section 21.1.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from recbft.comparing.comparison import COMPARISON_FILE, Comparison
from recbft.comparing.provenance import notes_on_machines
from recbft.errors import UserError
from recbft.evaluation.metrics import SETTINGS
from recbft.evaluation.paired import compare_seeds, compare_users, fisher, holm
from recbft.evaluation.strata import MIN_USERS
from recbft.experiments.lists import counted
from recbft.experiments.plan import has_decay
from recbft.runs.folder import RunFolder
from recbft.system.files import make_folder, read_json, write_atomic, write_json

FORMAT = 1
METRICS = ("hr@10", "ndcg@10", "mrr")
SECOND_BASELINE = "matched+recency"  # what is left over it is what precision brought, see docs/protocol.md
_USER_SAMPLES, _MANY_USERS = (10_000, 2_000), 10_000  # resamples up to so many users, and beyond

Cells = dict[str, dict[str, dict[str, dict[str, Any]]]]  # arm -> setting -> metric -> figures


def results_of(comparison: Comparison, *, metrics: Sequence[str] = METRICS) -> dict[str, Any]:
    """Every figure of a comparison, ready for JSON.

    Args:
        metrics: names that ``one_from_ranks`` knows; with the arms and settings they are the family of tests.
    """
    comparisons, others = {}, list(comparison.arms)
    for baseline in _baselines(comparison):
        others = [name for name in others if name != baseline]  # a pair of baselines is compared once
        if others:
            comparisons[baseline] = _against(comparison, baseline, others, metrics)
    notes = [*comparison.notes, *notes_on_machines(comparison), *_decay_alone(comparison)]
    notes += [*_constant(comparison, metrics), *_few(len(comparison.seeds), comparison.num_users)]
    return {
        "baseline": comparison.baseline,
        "seeds": list(comparison.seeds),
        "metrics": list(metrics),
        "protocol": comparison.protocol,
        "notes": list(dict.fromkeys(notes)),
        "arms": {name: _arm(comparison, name, metrics) for name in comparison.arms},
        "comparisons": comparisons,
    }


def cells_of(against: Mapping[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Arm, setting, metric and figures of every comparison with one baseline."""
    return [
        (arm, setting, metric, cell)
        for arm, settings in against.items()
        for setting, metrics in settings.items()
        for metric, cell in metrics.items()
    ]


def is_constant(d: Mapping[str, Any]) -> bool:
    """Whether a difference over seeds is the same in each, and so without a spread to judge by."""
    return d.get("smallest_effect") == 0  # which only differences over seeds have


def user_samples(num_users: int) -> int:
    """Resamples of so many users, and sign patterns of their differences."""
    return _USER_SAMPLES[num_users > _MANY_USERS]


def write_comparison(
    comparison: Comparison,
    folder: Path,
    *,
    made: Mapping[str, Any],
    external: Mapping[str, Path] | None = None,
    metrics: Sequence[str] = METRICS,
) -> dict[str, Any]:
    """Write ``comparison.json``, which ``load_comparison`` reads, and return its content.

    Args:
        made: the header of ``provenance``.
        external: the files behind external arms; copied to ``folder/external``.
    """
    make_folder(folder)
    result = {
        "format": FORMAT,
        "made": dict(made),
        **results_of(comparison, metrics=metrics),
        "environments": _environments(comparison),
    }
    # Read before one is written: the copy of an earlier comparison may be given as another arm of this one.
    ranks = {name: (file.suffix.lower(), file.read_bytes()) for name, file in (external or {}).items()}
    kept: set[str] = set()
    for name, arm in comparison.arms.items():
        runs = {str(seed): os.path.relpath(run.resolve(), folder.resolve())
                for seed, run in zip(arm.seeds, arm.runs, strict=True) if run is not None}  # fmt: skip
        copied = _keep(folder / "external", name, *ranks[name], kept) if name in ranks else None
        result["arms"][name] |= {"runs": runs, "external": copied}
    write_json(folder / COMPARISON_FILE, result)
    return result


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


def _baselines(comparison: Comparison) -> list[str]:
    """The comparison's own and, where it is another arm that takes part, the plain layer with the decay."""
    of_model, _, baseline = comparison.baseline.rpartition("/")
    second = f"{of_model}/{SECOND_BASELINE}" if of_model else SECOND_BASELINE
    has_second = baseline != SECOND_BASELINE and second in comparison.arms and comparison.arms[second].has_spread
    return [comparison.baseline, second] if has_second else [comparison.baseline]


def _arm(comparison: Comparison, name: str, metrics: Sequence[str]) -> dict[str, Any]:
    """Mean and standard deviation (None without spread) per metric, and how long the arm trained."""
    arm = comparison.arms[name]
    figures: dict[str, dict[str, Any]] = {}
    for setting in comparison.settings(name):
        figures[setting] = {}
        for metric in metrics:
            figures[setting][metric] = _level(comparison.values(name, setting, metric).tolist(), arm.has_spread)
    ran = [RunFolder(run).metrics for run in arm.runs if run is not None]
    return {
        "metrics": figures,
        "exposure": _exposure(ran, arm.has_spread) if len(ran) == len(arm.runs) else {},
        # What RecBole trained does not say.
        **{key: [one[key] for one in ran if key in one] for key in ("epochs", "training_seconds")},
        "best_epochs": [one["best_epoch"] for one in ran if "best_epoch" in one],
        "config": {**arm.config, "seed": "each of the seeds"} if arm.config else {},
    }


def _exposure(ran: Sequence[Mapping[str, Any]], has_spread: bool) -> dict[str, dict[str, Any]]:
    """What the lists of every run show, by setting and measure; a measure that some run lacks is left out."""
    found = [one.get("exposure", {}) for one in ran]
    return {
        setting: {
            name: _level([one[setting][name] for one in found], has_spread)
            for name in first
            if all(name in one[setting] for one in found)
        }
        for setting, first in found[0].items()
    }


def _level(values: Sequence[float], has_spread: bool) -> dict[str, Any]:
    sd = float(np.std(values, ddof=1)) if has_spread else None
    return {"mean": float(np.mean(values)), "sd": sd, "values": list(values)}


def _against(comparison: Comparison, baseline: str, others: Sequence[str], metrics: Sequence[str]) -> Cells:
    samples = user_samples(comparison.num_users)
    found: Cells = {}
    for name in others:
        found[name] = {}
        for setting in comparison.settings(baseline, name):
            found[name][setting] = {}
            for metric in metrics:
                pair = [comparison.values(arm, setting, metric) for arm in (baseline, name)]
                cell: dict[str, Any] = {"over_seeds": asdict(compare_seeds(*pair))}
                if comparison.num_users > 1:
                    pair = [comparison.per_user(arm, setting, metric) for arm in (baseline, name)]
                    cell["over_users"] = asdict(compare_users(*pair, samples=samples))
                held = [comparison.arms[arm].validation.get(setting, {}).get(metric) for arm in (baseline, name)]
                if held[0] is not None and held[1] is not None:
                    cell["on_validation"] = asdict(compare_seeds(held[0], held[1]))
                found[name][setting][metric] = cell
    cells = [cell for settings in found.values() for each in settings.values() for cell in each.values()]
    for cell, p in zip(cells, holm([cell["over_seeds"]["p_t"] for cell in cells]), strict=True):
        cell["over_seeds"]["p_holm"] = p
    return found


def _constant(comparison: Comparison, metrics: Sequence[str]) -> list[str]:
    """Metrics that are one value throughout, so that a comparison by them says nothing."""
    return [
        f"{metric.upper()} ({setting}) is {float(values[0]):g} for every arm and seed: it cannot tell the arms apart"
        for setting in comparison.settings(*comparison.arms)
        for metric in metrics
        if np.ptp(values := np.concatenate([comparison.values(a, setting, metric) for a in comparison.arms])) == 0
    ]


def _decay_alone(comparison: Comparison) -> list[str]:
    """Arms whose lead may be the recency decay's, since the baseline has none and no plain layer here has it."""
    configs = {name: arm.config for name, arm in comparison.arms.items() if arm.config}
    decay = {name: config for name, config in configs.items() if has_decay(config)}
    plain = {config["model"] for config in decay.values() if config["core"] is None}
    if comparison.baseline not in configs or comparison.baseline in decay:
        return []
    return [
        f"{name} has the recency decay and {comparison.baseline} has not, so a difference between them may be the "
        f"decay's alone; {SECOND_BASELINE} as another arm tells"
        for name, config in decay.items()
        if config["model"] not in plain
    ]


def _few(seeds: int, users: int) -> list[str]:
    """What so few seeds cannot show however large the difference, and the rule of strata for users."""
    notes, smallest = [], 2 / 2**seeds
    if smallest > 0.05:
        notes.append(
            f"with {seeds} seeds no sign-flip p can be below {smallest:g}; 6 seeds are the fewest that can reach 0.05"
        )
    if users < MIN_USERS:
        few = counted(users, "user")
        notes.append(f"with {few} intervals over users are too narrow; {MIN_USERS} are the fewest, as in strata")
    return notes


def _environments(comparison: Comparison) -> list[dict[str, Any]]:
    """The environments that the runs were made in, each once, on the day of the first."""
    seen: dict[str, dict[str, Any]] = {}
    for arm in comparison.arms.values():
        for run in arm.runs:
            file = None if run is None else RunFolder(run).environment_file
            if file is not None and file.is_file():
                one = read_json(file)
                one.pop("trained_together", None)  # says which runs shared a process, and not where
                seen.setdefault(json.dumps({**one, "date": None}, sort_keys=True), one)
    return list(seen.values())


def _keep(folder: Path, name: str, ending: str, ranks: bytes, taken: set[str]) -> str:
    """Keep what a file of ranks holds beside the comparison, so that the two stay together; its path from there.

    Args:
        taken: what other arms' files are called, as a file system that knows no capitals reads it; this one joins them.
    """
    folder.mkdir(exist_ok=True)
    numbers = ("", *(f"-{n}" for n in range(2, len(taken) + 2)))
    file = next(file for n in numbers if (file := f"{name}{n}{ending}").casefold() not in taken)
    taken.add(file.casefold())
    write_atomic(folder / file, ranks)
    return os.path.relpath(folder / file, folder.parent)


def _check_different_events(protocols: Sequence[dict[str, Any]]) -> None:
    """UserError where one file's events were prepared in two ways: their p-values are not independent.

    Rows chosen by two filters ``where`` are other data, those of one filter a part of all. Of equal filters other
    content is another file of that size.
    """
    seen: dict[str, list[dict[str, Any]]] = {}
    for protocol in protocols:
        preparation = protocol.get("preparation", {})
        filters = dict(preparation.get("filters", {}))
        others = seen.setdefault(repr((protocol["dataset"], preparation.get("before"))), [])
        for other in others:
            differ = sorted(key for key in filters.keys() | other.keys() if filters.get(key) != other.get(key))
            are_others = "where" in differ and None not in (filters.get("where"), other.get("where"))
            if differ and not are_others:
                raise UserError(
                    f"two comparisons are on the events of {protocol['dataset']}, prepared with other "
                    f"{', '.join(differ)}; pooled p-values must come from different data sets"
                )
        others.append(filters)


def _left_out(there: set[tuple[str, str, str]], shared: set[tuple[str, str, str]]) -> list[str]:
    """Arms that not every comparison has, and of the others the metrics that not every one has."""
    arms = {arm for arm, _, _ in shared}
    return sorted(
        {
            f"{arm} {metric.upper()} ({SETTINGS[setting]})" if arm in arms else arm
            for arm, setting, metric in there - shared
        }
    )


def _pooled(key: tuple[str, str, str], each: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
