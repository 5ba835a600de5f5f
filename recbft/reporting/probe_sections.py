"""What ``recbft probe`` found in the runs of a comparison: how precision flows, and whether it tells hits from misses.

Figures are means over the probed seeds of an arm. An interval is over seeds (t) where several were probed, otherwise
the probe's own, over users (bootstrap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recbft.comparing.comparison import Comparison
from recbft.comparing.finished_runs import weights_of
from recbft.evaluation.paired import seed_interval
from recbft.experiments.lists import seeds_text
from recbft.reporting import plots
from recbft.reporting.document import percent
from recbft.reporting.sections import Plot, Section
from recbft.reporting.tables import Cell, Column, Table
from recbft.system.files import read_json

PROBE_FILE = "probe.json"
Probes = Mapping[str, Mapping[int, Mapping[str, Any]]]  # arm -> seed -> content of probe.json
_MISSING = "No run of this comparison has been probed: recbft probe RUN makes this section, for each RUN of it."


def load_probes(comparison: Comparison) -> tuple[Probes, list[str]]:
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
    older = "lapse" not in uncertainty["calibration"]
    if older or protocol["recbft_version"] != comparison.protocol["recbft_version"]:
        return "of another version"
    if protocol["content_hash"] != comparison.protocol["content_hash"]:
        return "of other data"
    if protocol["part"] != comparison.protocol["part"]:
        return f"of the {protocol['part']}, not the {comparison.protocol['part']}"
    for users in (mechanism["num_users"], uncertainty["num_users"]):
        if users != len(comparison.users):
            return f"of {users:,} of the {len(comparison.users):,} users"
    probed, now = protocol.get("weights"), weights_of(run)
    return "of other weights than the run has now" if None not in (probed, now) and probed != now else ""


def mechanism_section(probes: Probes, *, draw: bool) -> Section:
    """Gain, precision and noise by item frequency."""
    parts = {arm: {seed: probe["mechanism"] for seed, probe in each.items()} for arm, each in probes.items()}
    tracking = {arm: each for arm, each in parts.items() if any(one["tracks_precision"] for one in each.values())}
    title = "What precision does inside"
    if not tracking:
        why = _MISSING if not probes else "No probed arm tracks precision, so there is nothing to show."
        return Section(name="mechanism", title=title, words=[why])
    words = [line for arm, each in tracking.items() for line in _saturation(arm, list(each.values()))]
    sinks = _first_position(tracking)
    return Section(
        name="mechanism",
        title=title,
        words=words,
        plots=_frequency_plots(tracking) if draw else [],
        tables=[_frequency_table(tracking)],
        folded=[sinks] if sinks.rows else [],
    )


def uncertainty_section(probes: Probes, *, draw: bool) -> Section:
    """Whether the model knows when it is right."""
    parts = {arm: {seed: probe["uncertainty"] for seed, probe in each.items()} for arm, each in probes.items()}
    title = "Does it know when it is right?"
    if not parts:
        return Section(name="uncertainty", title=title, words=[_MISSING])
    words = [line for arm, each in parts.items() for line in _verdicts(arm, each)]
    return Section(
        name="uncertainty",
        title=title,
        words=words,
        plots=_uncertainty_plots(parts) if draw else [],
        tables=[_confidence_table(parts), _calibration_table(parts)],
    )


def _frequency_table(parts: Mapping[str, Mapping[int, Any]]) -> Table:
    rows: list[list[Cell]] = []
    # All arms have the same items; one whose model reads a mask has a bin more.
    bins = max((one["bins"] for each in parts.values() for one in each.values()), key=len)
    for arm, each in parts.items():
        ones = list(each.values())
        if ones[0]["initial_precision"] is not None:
            initial = [one["initial_precision"] for one in ones]
            rows.append([arm, "before 1", "initial precision", *_by_bin(initial, bins)])
        for number, layer in enumerate(ones[0]["layers"]):
            for quantity in layer["quantities"]:
                found = [one["layers"][number]["quantities"][quantity] for one in ones]
                rows.append([arm, str(layer["layer"]), quantity.replace("_", " "), *_by_bin(found, bins)])
    return Table(
        name="mechanism",
        title="By how often the item occurs in training",
        caption=f"Means over tokens, and over the probed seeds ({_probed(parts)}). "
        "Bins hold equal numbers of items as far as ties allow: "
        + ", ".join(f"{row['name']} {row['counts']} training events" for row in bins if row["name"] != "mask")
        + ("; mask: the token that stands for the item asked for" if any(row["name"] == "mask" for row in bins) else "")
        + ". rho: Spearman's with the training count, over items; last column: seeds in which its p is below 0.05.",
        columns=[Column("arm"), Column("layer"), Column("quantity"), *(Column(row["name"], "short") for row in bins),
                 Column("rho", "short"), Column("p < 0.05")],
        rows=rows,
    )  # fmt: skip


def _by_bin(found: Sequence[Any], bins: Sequence[Any]) -> list[Cell]:
    by_bin = [_mean([one["bins"][n] if n < len(one["bins"]) else None for one in found]) for n in range(len(bins))]
    p_values = [one["p"] for one in found if one["p"] is not None]
    shown = f"{sum(p < 0.05 for p in p_values)} of {len(p_values)}" if p_values else None
    return [*by_bin, _mean([one["rho"] for one in found]), shown]


def _saturation(arm: str, ones: Sequence[Any]) -> list[str]:
    shares = [one["layers"][-1]["saturated"] for one in ones if one["layers"] and one["layers"][-1]["saturated"]]
    at_cap = _mean([share.get("last_token") for share in shares])
    if at_cap is None:
        return []
    share, cap = percent(at_cap).lstrip("+"), ones[0]["cap"]
    return [f"{arm}: {share} of the precision at users' last tokens lies at its cap of {cap:g}."]


def _first_position(parts: Mapping[str, Mapping[int, Any]]) -> Table:
    rows: list[list[Cell]] = []
    for arm, each in parts.items():
        ones = list(each.values())
        for number, layer in enumerate(ones[0]["layers"]):
            for head, first in enumerate(layer["first_position"] or ()):
                found = [one["layers"][number]["first_position"][head] for one in ones]
                keys = ("share", "uniform", "gain", "rho", "rho_given_keys")
                rows.append(
                    [arm, str(layer["layer"]), str(first["head"]), *(_mean([o[key] for o in found]) for key in keys)]
                )
    return Table(
        name="first-position",
        title="Attention on the first position",
        caption="Share of each user's last token's attention on the history's first token, beside an even spread; "
        "rho: of that share and the head's gain over users, and the same at equal history length. Means over the "
        "probed seeds.",
        columns=[Column("arm"), Column("layer"), Column("head"), Column("share", "short"), Column("if even", "short"),
                 Column("gain", "short"), Column("rho", "short"), Column("rho at equal length", "short")],
        rows=rows,
    )  # fmt: skip


def _confidence_table(parts: Mapping[str, Mapping[int, Any]]) -> Table:
    rows: list[list[Cell]] = []
    for arm, each in parts.items():
        ones = list(each.values())
        for name in ones[0]["confidences"]:
            found = [one["confidences"][name] for one in ones]
            above = [one["reference_above"] for one in found if "reference_above" in one]
            rows.append(
                [arm, name.replace("_", " "), _mean([one["auroc"] for one in found]),
                 _interval([(one["auroc"], one["auroc_interval"]) for one in found]),
                 _mean([one["aurc"] for one in found]), _mean([one["excess_aurc"] for one in found]),
                 _mean([one["auroc"] for one in above]),
                 _interval([(one["auroc"], one["interval"]) for one in above])]
            )  # fmt: skip
    first = next(iter(next(iter(parts.values())).values()))
    return Table(
        name="uncertainty",
        title=f"Does a confidence tell hits (target among the first {first['k']} of all items) from misses?",
        caption="AUROC 0.5 says nothing, 1 all. AURC: mean share of misses as ever more users are served, surest first "
        f"(unsorted {first['random_aurc']:.4f}, at best {first['optimal_aurc']:.4f} in the first probe); excess: above "
        f"the best. Last columns: how far the precision's AUROC lies above this one's. {_interval_words(parts)}",
        columns=[Column("arm"), Column("confidence"), Column("AUROC", "value"), Column("95 % interval", "range"),
                 Column("AURC", "value"), Column("excess", "value"), Column("precision above it", "signed"),
                 Column("95 % interval", "interval")],
        rows=rows,
    )  # fmt: skip


def _calibration_table(parts: Mapping[str, Mapping[int, Any]]) -> Table:
    rows: list[list[Cell]] = []
    for arm, each in parts.items():
        ones = [one["calibration"] for one in each.values()]
        for when in ("before", "after"):
            name = list(ones[0][when])[-1]
            own = [one[when][name] for one in ones]
            numbers = [_mean([one[key] for one in ones]) for key in ("temperature", "lapse")]
            rows.append(
                [arm, *([1.0, 0.0] if when == "before" else numbers), _mean([one["nll"][when] for one in ones]), name,
                 *(_mean([one[key] for one in own]) for key in ("ece", "floor", "mean_probability", "hit_rate"))]
            )  # fmt: skip
    one = next(iter(next(iter(parts.values())).values()))["calibration"]
    return Table(
        name="calibration",
        title="Are its probabilities true?",
        caption="Over all items, as trained (temperature T = 1, lapse rate u = 0) and with T and u fitted on "
        f"{one['fitted_on']}; lists that leave seen items out have a T and u of their own. NLL: of the target (equal "
        f"probabilities: {one['nll']['uniform']:.4f}). ECE: how far claimed and happened lie apart over "
        "ten groups of users; if true: what chance alone would show. Means over the probed seeds.",
        columns=[Column("arm"), Column("T", "value"), Column("u", "value"), Column("NLL", "value"), Column("of"),
                 Column("ECE", "value"), Column("if true", "value"), Column("claimed", "value"),
                 Column("happened", "value")],
        rows=rows,
    )  # fmt: skip


def _verdicts(arm: str, each: Mapping[int, Any]) -> list[str]:
    """What the precision says about being right: over the seeds, and each seed in the probe's own words."""
    found = {seed: one["confidences"]["precision"] for seed, one in each.items() if "precision" in one["confidences"]}
    if not found:
        return [f"{arm} tracks no precision; what its scores say is judged below."]
    by_verdict: dict[str, list[int]] = {}
    for seed, one in found.items():
        by_verdict.setdefault(one["verdict"], []).append(seed)
    known = {seed: one["auroc"] for seed, one in found.items() if one["auroc"] is not None}
    words = []
    inside = seed_interval(list(known.values()))
    if inside is not None:
        words.append(
            f"Posterior precision of {arm}: AUROC {_mean(list(known.values())):.3f} on average over seeds "
            f"{seeds_text(list(known))}, 95 % interval over seeds {inside[0]:.3f} to {inside[1]:.3f}; 0.5 says nothing."
        )
    alone = ", taken alone" if len(found) > 1 else ""
    return words + [
        f"Posterior precision of {arm}, seed{'s' if len(seeds) > 1 else ''} {seeds_text(seeds)}{alone}: {said}."
        for said, seeds in by_verdict.items()
    ]


def _frequency_plots(parts: Mapping[str, Mapping[int, Any]]) -> list[Plot]:
    drawn = []
    one = next(iter(next(iter(parts.values())).values()))
    bins = [row for row in one["bins"] if row["name"] != "mask"]
    ticks = [f"{row['name']}\n{row['counts']}" for row in bins]
    for quantity in ("gain", "incoming_precision"):
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for arm, each in parts.items():
            for number, layer in enumerate(next(iter(each.values()))["layers"]):
                found = [o["layers"][number]["quantities"].get(quantity) for o in each.values()]
                values = [_mean([f["bins"][n] for f in found if f is not None]) for n in range(len(bins))]
                kept = [(float(n), value) for n, value in enumerate(values) if value is not None]
                if kept:
                    curves[f"{arm}, layer {layer['layer']}"] = ([n for n, _ in kept], [value for _, value in kept])
        if curves:
            name = quantity.replace("_", " ")
            svg = plots.lines(
                curves, "training events of the item", f"mean {name}", f"{name} by frequency", ticks=ticks
            )
            drawn.append(
                Plot(
                    name=f"mechanism-{quantity.replace('_', '-')}",
                    svg=svg,
                    caption=f"Mean {name} by item frequency, over the probed seeds.",
                )
            )
    return drawn


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


def _probed(parts: Mapping[str, Mapping[int, Any]]) -> str:
    return "; ".join(f"{arm} {seeds_text(list(each))}" for arm, each in parts.items())


def _interval_words(parts: Mapping[str, Mapping[int, Any]]) -> str:
    several = [len(each) > 1 for each in parts.values()]
    how = "bootstrap over users"
    if any(several):
        how = "t over seeds" if all(several) else f"t over seeds where several are probed, {how} where one is"
    return f"Probed seeds: {_probed(parts)}; intervals: {how}."


def _interval(found: Sequence[tuple[float | None, Sequence[float] | None]]) -> tuple[float, float] | None:
    """Over seeds where several have a value, else the one's own over users."""
    known = [(value, own) for value, own in found if value is not None]
    if len(known) > 1:
        return seed_interval([value for value, _ in known])
    own = known[0][1] if known else None
    return None if own is None else (own[0], own[1])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
