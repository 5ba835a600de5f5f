"""The sections of the page that come from probes: how precision flows, and whether it tells hits from misses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recbft.comparing.comparison import Comparison
from recbft.comparing.finished_runs import weights_of
from recbft.evaluation.paired import seed_interval
from recbft.evaluation.strata import MIN_USERS
from recbft.experiments.lists import seeds_text
from recbft.reporting import plots
from recbft.reporting.new_items_tables import new_items_tables, new_items_words, sweep_curves
from recbft.reporting.page import Plot, Section
from recbft.reporting.probe_tables import (
    Parts,
    mean_of,
    mechanism_tables,
    mechanism_words,
    uncertainty_tables,
    verdict_words,
    widest_bins,
)
from recbft.reporting.tables import percent
from recbft.system.files import read_json

PROBE_FILE = "probe.json"
_PRECISION = (
    "A model that tracks precision knows of each of its vectors how sure it is: the precision, which is 1 / variance. "
    "Gain is the share of new information that a position takes up."
)
_CONFIDENCE = (
    "A model knows when it is right if users whose list holds the target get more confidence than the others. AUROC "
    "measures this: 0.5 is no better than guessing, 1 is perfect."
)
_NEW = (
    "A model may list new items at the cost of known ones, and a constant added to the scores of all new items does so "
    "without knowing anything. So what new targets gain stands beside what known ones lose, and beside that constant."
)
_MISSING = (
    "No run of this comparison has been probed yet. recbft probe RUN makes this section; call it for each folder RUN "
    "of the comparison, then recbft report again."
)


def load_probes(comparison: Comparison) -> tuple[Parts, list[str]]:
    """The probes beside the runs, and a line for each that cannot be used."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    notes = []
    for name, arm in comparison.arms.items():
        for seed, run in zip(arm.seeds, arm.runs, strict=True):
            if run is None or not (run / PROBE_FILE).is_file():
                continue
            try:
                probe = read_json(run / PROBE_FILE)
                wrong = _misfit(probe, comparison, run)
            except (ValueError, KeyError, TypeError):
                wrong = "damaged or of another version"
            if wrong:
                notes.append(f"{run.name}/{PROBE_FILE} is {wrong}, and left out; make it again with: recbft probe RUN")
            else:
                found.setdefault(name, {})[seed] = probe
    return found, notes


def _misfit(probe: Mapping[str, Any], comparison: Comparison, run: Path) -> str:
    """Why a run's probe does not belong to a comparison of the test; "" where it does."""
    protocol, mechanism, uncertainty = probe["protocol"], probe["mechanism"], probe["uncertainty"]
    if protocol["recbft_version"] != comparison.protocol["recbft_version"]:
        return "of another version"
    if protocol["content_hash"] != comparison.protocol["content_hash"]:
        return "of other data"
    if protocol["part"] != comparison.protocol["part"]:
        return f"of the {protocol['part']}, not the {comparison.protocol['part']}"
    for users in (mechanism["num_users"], uncertainty["num_users"]):
        if users != comparison.num_users:
            return f"of {users:,} of the {comparison.num_users:,} users"
    probed, now = protocol.get("weights"), weights_of(run)
    return "of other weights than the run has now" if None not in (probed, now) and probed != now else ""


def mechanism_section(probes: Parts, *, draw: bool) -> Section:
    """Gain, precision and noise by item frequency."""
    parts = {arm: {seed: probe["mechanism"] for seed, probe in each.items()} for arm, each in probes.items()}
    tracking = {arm: each for arm, each in parts.items() if any(one["tracks_precision"] for one in each.values())}
    title = "What precision does inside"
    if not tracking:
        why = _MISSING if not probes else "No probed arm tracks precision, so there is nothing to show."
        return Section(name="mechanism", title=title, words=[why])
    first, *others = mechanism_tables(tracking)
    return Section(
        name="mechanism",
        title=title,
        words=[_PRECISION, *(line for arm, each in tracking.items() for line in _saturation(arm, list(each.values()))),
               *mechanism_words(tracking)],
        plots=_frequency_plots(tracking) if draw else [],
        tables=[first],
        folded=others,
    )  # fmt: skip


def uncertainty_section(probes: Parts, *, draw: bool) -> Section:
    """Whether the model knows when it is right."""
    parts = {arm: {seed: probe["uncertainty"] for seed, probe in each.items()} for arm, each in probes.items()}
    title = "Does it know when it is right?"
    if not parts:
        return Section(name="uncertainty", title=title, words=[_MISSING])
    words = [_CONFIDENCE, *(line for arm, each in parts.items() for line in _verdicts(arm, each))]
    return Section(
        name="uncertainty",
        title=title,
        words=words,
        plots=_uncertainty_plots(parts) if draw else [],
        tables=uncertainty_tables(parts),
    )


def new_items_section(probes: Parts, *, draw: bool) -> Section | None:
    """What new items get and cost; None where no probe has targets of new items of enough users to say anything."""
    parts: dict[str, dict[int, Any]] = {}
    for arm, each in probes.items():
        for seed, probe in each.items():
            found = probe.get("new_items")
            if found is not None and found["users"]["new"] >= MIN_USERS:
                parts.setdefault(arm, {})[seed] = found
    if not parts:
        return None
    key = f"HR@{next(iter(next(iter(parts.values())).values()))['k']}"
    curve = plots.lines(
        sweep_curves(parts), f"{key} of known targets", f"{key} of new targets", "New items: gain and cost"
    ) if draw else ""  # fmt: skip
    caption = "Each curve: a constant added to the scores of all new items. A model is worth more than that where it "
    drawn = Plot(name="new-items", svg=curve, caption=f"{caption}lies above and to the right of the curve.")
    cost, among, sweep = new_items_tables(parts)
    return Section(
        name="new-items",
        title="Items without a training event",
        words=[_NEW, *new_items_words(parts)],
        plots=[drawn] if draw else [],
        tables=[cost, among],
        folded=[sweep],
    )


def _saturation(arm: str, ones: Sequence[Any]) -> list[str]:
    shares = [one["layers"][-1]["saturated"] for one in ones if one["layers"] and one["layers"][-1]["saturated"]]
    at_cap = mean_of([share.get("last_token") for share in shares])
    if at_cap is None:
        return []
    share, cap = percent(at_cap).lstrip("+"), ones[0]["cap"]
    return [f"{arm}: {share} of the precision at users' last tokens lies at its cap of {cap:g}."]


def _verdicts(arm: str, each: Mapping[int, Any]) -> list[str]:
    """What the precision says about being right: over the seeds, and each seed in the probe's own words."""
    found = {seed: one["confidences"]["precision"] for seed, one in each.items() if "precision" in one["confidences"]}
    if not found:
        return [f"{arm} tracks no precision; the table below judges what its scores say."]
    known = {seed: one["auroc"] for seed, one in found.items() if one["auroc"] is not None}
    words = []
    inside = seed_interval(list(known.values()))
    if inside is not None:
        words.append(
            f"Posterior precision of {arm}: AUROC {mean_of(list(known.values())):.3f} on average over seeds "
            f"{seeds_text(list(known))}, 95 % interval over seeds {inside[0]:.3f} to {inside[1]:.3f}."
        )
    return words + [f"Posterior {line}." for line in verdict_words({arm: each}, "precision")]


def _frequency_plots(parts: Mapping[str, Mapping[int, Any]]) -> list[Plot]:
    drawn = []
    bins = [row for row in widest_bins(parts) if row["name"] != "mask"]
    ticks = [f"{row['name']}\n{row['counts']}" for row in bins]
    for quantity in ("gain", "incoming_precision"):
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for arm, each in parts.items():
            for number, layer in enumerate(next(iter(each.values()))["layers"]):
                found = [o["layers"][number]["quantities"].get(quantity) for o in each.values()]
                values = [mean_of([f["bins"][n] for f in found if f is not None]) for n in range(len(bins))]
                kept = [(float(n), value) for n, value in enumerate(values) if value is not None]
                if kept:
                    curves[f"{arm}, layer {layer['layer']}"] = ([n for n, _ in kept], [value for _, value in kept])
        drawn += _by_frequency(quantity, curves, ticks, f"mean {quantity.replace('_', ' ')}")
    of_items = {"initial_precision": "mean precision before the first layer", "item_belief": "share of content"}
    for quantity, label in of_items.items():
        curves = {}
        for arm, each in parts.items():
            known = [found["bins"] for one in each.values() if (found := one.get(quantity)) is not None]
            means = [mean_of([values[n] for values in known]) for n in range(len(bins))]
            if kept := [(float(n), value) for n, value in enumerate(means) if value is not None]:
                curves[arm] = ([n for n, _ in kept], [value for _, value in kept])
        drawn += _by_frequency(quantity, curves, ticks, label)
    return drawn


def _by_frequency(
    quantity: str, curves: Mapping[str, tuple[list[float], list[float]]], ticks: Sequence[str], label: str
) -> list[Plot]:
    """A drawing of what a quantity of ``probe.json`` is on average over the items of each bin; none without curves."""
    if not curves:
        return []
    name = quantity.replace("_", " ")
    svg = plots.lines(curves, "training events of the item", label, f"{name} by frequency", ticks=ticks)
    caption = f"Mean {name} by item frequency, over the probed seeds."
    if quantity == "item_belief":
        caption = "How much of an item's vector is still its content, by item frequency: 1 is all, 0 is events alone."
    return [Plot(name=f"mechanism-{quantity.replace('_', '-')}", svg=svg, caption=caption)]


def _uncertainty_plots(parts: Mapping[str, Mapping[int, Any]]) -> list[Plot]:
    """Curves of one probe: of the first arm that tracks precision, else the first."""
    arm = next(
        (arm for arm, each in parts.items() if "precision" in next(iter(each.values()))["confidences"]),
        next(iter(parts)),
    )
    seed, one = next(iter(parts[arm].items()))
    curves = {
        name.replace("_", " "): (found["curve"]["coverage"], found["curve"]["risk"])
        for name, found in one["confidences"].items()
        if not name.startswith("top_")
    }
    curves["at random"] = ([0.0, 1.0], [1 - one["hit_rate"]] * 2)
    risk = plots.lines(curves, "share of users served, surest first", "share of misses", "Risk and coverage")
    calibration = one["calibration"]
    name = list(calibration["before"])[-1]
    reliability = {
        label: ([b["probability"] for b in bins], [b["hit_rate"] for b in bins])
        for label, bins in (
            ("as trained", calibration["before"][name]["bins"]),
            ("fitted", calibration["after"][name]["bins"]),
        )
    }  # fmt: skip
    drawn = plots.lines(reliability, f"claimed chance of {name}", "share of hits", "Reliability", diagonal=True)
    return [
        Plot(name="risk-coverage", svg=risk, caption=f"Risk and coverage of {arm}, seed {seed}: lower is better."),
        Plot(
            name="reliability",
            svg=drawn,
            caption=f"Reliability of {arm}, seed {seed}: on the line, what is claimed happens.",
        ),
    ]
