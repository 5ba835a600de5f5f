"""The tables of probes: how precision flows through a model, and whether it tells hits from misses.

A terminal shows one probe, a page those of several arms and seeds; the tables are the same. Figures are means over the
probed seeds of an arm. An interval is over seeds (t) where several were probed, otherwise the probe's own, over users
(bootstrap).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recbft.evaluation.mechanism import BY_LENGTH
from recbft.evaluation.paired import seed_interval
from recbft.evaluation.trace import SATURATED
from recbft.experiments.lists import seeds_text
from recbft.reporting.tables import Cell, Column, Table, p_equals, signed, text

Parts = Mapping[str, Mapping[int, Mapping[str, Any]]]  # arm -> seed -> one part of probe.json
_WAYS = {"before": "as trained", "after": "fitted"}
OF_CONTENT = {"bins": "share of content", "weights": "weight of alike content"}  # keys of ``item_belief``
_LEARNED = {"temperature": "a", "shrinkage": "nu"}  # what is learned, by ``core.read_out``


def mechanism_lines(found: Mapping[str, Any]) -> list[str]:
    """What one probe says of the layers, for a terminal."""
    lines = [f"MECHANISM: {found['num_tokens']:,} tokens of {found['num_users']:,} {found['part']} histories"]
    if not found["tracks_precision"]:
        lines += ["", "This model tracks no precision: there is none to probe, only what attention itself says."]
    parts = {"": {0: found}}
    return [*lines, *in_a_terminal(mechanism_tables(parts)), *mechanism_words(parts), ""]


def uncertainty_lines(found: Mapping[str, Any]) -> list[str]:
    """What one probe says of being right, for a terminal."""
    lines = [
        f"UNCERTAINTY: right means the target among the first {found['k']} of {found['num_items']:,} items: "
        f"{found['hit_rate']:.1%} of {found['num_users']:,} users"
    ]
    parts = {"": {0: found}}
    verdicts = [line for name in found["confidences"] for line in verdict_words(parts, name)]
    saturation = found["saturation"]
    if saturation is None:
        cap = "This model tracks no precision: there is none to judge by."
    else:
        cap = (
            f"At the cap of {saturation['cap']:g}: {saturation['coordinates']:.1%} of the coordinates, and every "
            f"coordinate of {saturation['users']:.1%} of the users; {saturation['num_distinct']:,} distinct precisions."
        )
    if out := found.get("read_out"):
        cap += f" Scores read it: core.read_out {out['kind']}, {_LEARNED[out['kind']]} {out['learned']:.3g}."
    tables = in_a_terminal(uncertainty_tables(parts))
    return [*lines, *tables, *verdicts, cap, f"Intervals: {found['intervals']}.", ""]


def mechanism_tables(parts: Parts) -> list[Table]:
    """Quantities by item frequency, layer by layer; what else a layer says; the first position; planted reliability."""
    made = [_frequency_table(parts), _layer_table(parts), _length_table(parts), _first_position_table(parts),
            _planted_table(parts)]  # fmt: skip
    return [table for table in made if table is not None]


def mechanism_words(parts: Parts) -> list[str]:
    """What the initial precision of the items says besides its table."""
    lines = []
    for arm, seed, one in each_probe(parts):
        lines += [
            f"{f'{arm}, seed {seed}: ' if arm else ''}{share:.0%} of the observation precisions of layer "
            f"{layer['layer']} lie at the cap, where they have no gradient and tell no token from another."
            for layer in one["layers"]
            if (share := (layer["saturated"] or {}).get("observation", 0)) > SATURATED
        ]
        initial, of = one["initial_precision"], f"{arm}, seed {seed}: " if arm else ""
        if initial is None:
            continue
        lines += [
            f"{of}{initial[end]:.1%} of the items lie at the {place} of the range of the initial precision, where "
            "nothing is learned any more."
            for end, place in (("at_floor", "floor"), ("at_cap", "cap")) if initial[end]
        ]  # fmt: skip
        planted = [("an item's initial precision", "item", initial["rho_reliability"], initial["p_reliability"])]
        if by_user := one["user_reliability"]:
            planted.append(("a user's posterior precision", "user", by_user["rho"], by_user["p"]))
        if initial["levels"] is not None:
            lines += [
                f"{of}Spearman's rho of {what} with the {whose}'s planted reliability: {signed(rho)} "
                f"(p {'-' if p is None else p_equals(p)})"
                for what, whose, rho, p in planted
            ]
    return lines


def uncertainty_tables(parts: Parts) -> list[Table]:
    """Whether each confidence tells hits from misses, and whether the probabilities are true."""
    return [_confidence_table(parts), _calibration_table(parts)]


def verdict_words(parts: Parts, name: str) -> list[str]:
    """What one confidence says about being right, in the probes' own words, those of equal words together."""
    lines = []
    for arm, each in parts.items():
        by_verdict: dict[str, list[int]] = {}
        for seed, one in each.items():
            if name in one["confidences"]:
                by_verdict.setdefault(one["confidences"][name]["verdict"], []).append(seed)
        alone = ", taken alone" if sum(map(len, by_verdict.values())) > 1 else ""
        for said, seeds in by_verdict.items():
            of = f" of {arm}, seed{'s' if len(seeds) > 1 else ''} {seeds_text(seeds)}{alone}" if arm else ""
            lines.append(f"{_spelt(name)}{of}: {said}")
    return lines


def mean_of(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def means_of(found: Sequence[Mapping[str, Any]], *keys: str) -> list[float | None]:
    """``mean_of`` of each key."""
    return [mean_of([one[key] for one in found]) for key in keys]


def widest_bins(parts: Parts) -> Sequence[Mapping[str, Any]]:
    """The bins of item frequency; all arms have the same, and one whose model reads a mask has one more."""
    found: Sequence[Mapping[str, Any]] = max((one["bins"] for _, _, one in each_probe(parts)), key=len)
    return found


def _frequency_table(parts: Parts) -> Table | None:
    rows: list[list[Cell]] = []
    bins, alone = widest_bins(parts), not _is_several(parts)
    for arm, ones in by_arm(parts):
        if ones[0]["initial_precision"] is not None:
            initial = [one["initial_precision"] for one in ones]
            rows.append([arm, "items", "initial precision", *_by_bin(initial, bins, alone)])
        for key, quantity in OF_CONTENT.items():
            known = [found[key] for one in ones if (found := one.get("item_belief")) and found.get(key)]
            if known:
                plain = [{"bins": values, "rho": None, "p": None} for values in known]
                rows.append([arm, "items", quantity, *_by_bin(plain, bins, alone)])
        for number, layer in enumerate(ones[0]["layers"]):
            for quantity in layer["quantities"]:
                found = [one["layers"][number]["quantities"][quantity] for one in ones]
                rows.append([arm, f"layer {layer['layer']}", _spelt(quantity), *_by_bin(found, bins, alone)])
    if not rows:
        return None
    has_content = any(row[2] in OF_CONTENT.values() for row in rows)
    counts = ", ".join(f"{row['name']} {row['counts']}" for row in bins if row["name"] != "mask")
    mask = "; mask: the token that stands for the item asked for" if any(row["name"] == "mask" for row in bins) else ""
    return probe_table(
        parts,
        name="mechanism",
        title="Inside the layers, by how often an item occurs in training",
        caption=f"Means over tokens{over_seeds(parts)}. Each bin holds about as many items as the next; training count "
        f"of their items: {counts}{mask}. rho: Spearman's correlation with that count, over items"
        f"{'' if alone else '; p < 0.05: seeds in which its p is below 0.05'}. Gain: the share of what attention found "
        "that a position takes up. Effective sample size: how many tokens the attention weights amount to. Jacobian: "
        "how strongly the feed-forward network passes a change on (used: what stands for it in the precision)."
        + (" Share of content: how much of an item's vector is still its content. Weight of alike content: how much a "
           "score counts that an item's content is like the history's." if has_content else ""),
        columns=[Column("layer"), Column("quantity"),
                 *(Column(row["name"], "short", "phone" if n in (0, len(bins) - 1) else "terminal")
                   for n, row in enumerate(bins)),
                 Column("rho", "change", "terminal"),
                 Column("p", "p", "terminal") if alone else Column("p < 0.05", "text", "terminal")],
        rows=rows,
    )  # fmt: skip


def _by_bin(found: Sequence[Any], bins: Sequence[Any], alone: bool) -> list[Cell]:
    by_bin = [mean_of([one["bins"][n] if n < len(one["bins"]) else None for one in found]) for n in range(len(bins))]
    p_values = [one["p"] for one in found if one["p"] is not None]
    shown = f"{sum(p < 0.05 for p in p_values)} of {len(p_values)}" if p_values else None
    return [*by_bin, mean_of([one["rho"] for one in found]), mean_of(p_values) if alone else shown]


def _layer_table(parts: Parts) -> Table | None:
    places = ("incoming", "observation", "outgoing", "last_token")
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        for number, layer in enumerate(ones[0]["layers"]):
            each = [one["layers"][number] for one in ones]
            if layer["jacobian_mode"] is None and layer["recency_decay"] is None:
                continue
            at_cap = [mean_of([(one["saturated"] or {}).get(place) for one in each]) for place in places]
            noise = [mean_of([(one["process_noise"] or {}).get(of) for one in each]) for of in ("mean", "max")]
            jacobian = _spelt(layer["jacobian_mode"]) if "jacobian_used" in layer["quantities"] else None
            decay = mean_of([one["recency_decay"] for one in each])
            rows.append([arm, f"layer {layer['layer']}", *at_cap, *noise, jacobian, decay])
    if not rows:
        return None
    caps = dict.fromkeys(f"{one['cap']:g}" for _, _, one in each_probe(parts) if one["cap"] is not None)
    at = f"At cap: share of the coordinates at {' or '.join(caps)}, the largest precision there is. " if caps else ""
    return probe_table(
        parts,
        name="layers",
        title="What else each layer does",
        caption=f"{at}Last token: of the outgoing precision at users' last tokens, which score the items. Process "
        f"noise: the variance that a layer adds. Recency decay: the factor by which attention falls per position"
        f"{over_seeds(parts)}.",
        columns=[Column("layer"), *(Column(f"at cap: {_spelt(place)}", "share", "terminal" if place != "last_token"
                                           else "phone") for place in places),
                 Column("noise, mean", "short", "terminal"), Column("largest", "short", "terminal"),
                 Column("Jacobian used", "text", "terminal"), Column("recency decay", "short")],
        rows=rows,
    )  # fmt: skip


def _length_table(parts: Parts) -> Table | None:
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        for number, layer in enumerate(ones[0]["layers"]):
            for place, row in enumerate(layer.get("by_length") or ()):  # probes of earlier versions have none
                each = [one["layers"][number].get("by_length") or () for one in ones]
                found = [lengths[place] for lengths in each if place < len(lengths)]
                rows.append([arm, str(layer["layer"]), row["keys"], row["num_tokens"], *means_of(found, *BY_LENGTH)])
    if not rows:
        return None
    return probe_table(
        parts,
        name="lengths",
        title="Inside the layers, by how many tokens are read",
        caption="Means over the tokens that read so many. Optimal gain: that of a Kalman filter with the precision "
        f"before the layer and the observation's, which other update rules do not use{over_seeds(parts)}.",
        columns=[Column("layer"), Column("tokens read"), Column("tokens", "count", "terminal"),
                 Column("effective sample size", "short", "terminal"), Column("observation precision", "short"),
                 Column("gain", "short"), Column("optimal gain", "short")],
        rows=rows,
    )  # fmt: skip


def _first_position_table(parts: Parts) -> Table | None:
    keys, alone = ("share", "uniform", "gain", "rho", "p", "rho_given_keys", "p_given_keys"), not _is_several(parts)
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        for number, layer in enumerate(ones[0]["layers"]):
            for head, first in enumerate(layer["first_position"] or ()):
                found = [one["layers"][number]["first_position"][head] for one in ones]
                rows.append([arm, str(layer["layer"]), str(first["head"]), *means_of(found, *keys)])
    if not rows:
        return None
    table = probe_table(
        parts,
        name="first-position",
        title="Attention on the first position",
        caption="How much of its attention each user's last token gives to the first token of the history. Above the "
        "even share, the first token serves as a sink. rho: of that share and the head's gain, over users; at equal "
        f"length: the same with the length of the history held fixed{over_seeds(parts)}.",
        columns=[Column("layer"), Column("head"), Column("on first", "short"), Column("if even", "short"),
                 Column("gain", "short", "terminal"), Column("rho", "change", "terminal"), Column("p", "p", "terminal"),
                 Column("rho at equal length", "change", "terminal"), Column("its p", "p", "terminal")],
        rows=rows,
    )  # fmt: skip
    return table if alone else table.without("p").without("its p")  # a mean of p-values says nothing


def _planted_table(parts: Parts) -> Table | None:
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        levels = [(one["initial_precision"] or {}).get("levels") for one in ones]
        for number, level in enumerate(levels[0] or ()):
            found = [one[number]["mean"] for one in levels if one]
            rows.append([arm, f"{level['reliability']:g}", level["num_items"], mean_of(found)])
    if not rows:
        return None
    return probe_table(
        parts,
        name="planted",
        title="Initial precision by planted reliability",
        caption=f"The data set was generated with items of these reliabilities{over_seeds(parts)}.",
        columns=[Column("planted reliability"), Column("items", "count"), Column("initial precision", "short")],
        rows=rows,
    )


def _confidence_table(parts: Parts) -> Table:
    rows: list[list[Cell]] = []
    for arm, ones in by_arm(parts):
        for name in ones[0]["confidences"]:
            found = [one["confidences"][name] for one in ones]
            above = [one["reference_above"] for one in found if "reference_above" in one]
            risk = [one for one in above if "aurc" in one]  # probes of earlier versions lack it
            rows.append(
                [arm, _spelt(name), *means_of(found, "auroc"), interval_of(found, "auroc", "auroc_interval"),
                 *means_of(found, "aurc", "excess_aurc"), round(statistics.mean(o["num_distinct"] for o in found)),
                 *means_of(above, "auroc"), interval_of(above, "auroc", "interval"),
                 *means_of(risk, "aurc"), interval_of(risk, "aurc", "aurc_interval")]
            )  # fmt: skip
    first = next(each_probe(parts))[2]
    return probe_table(
        parts,
        name="uncertainty",
        title=f"Does a confidence tell hits (target among the first {first['k']} of all items) from misses?",
        caption="AUROC: how often a hit has more confidence than a miss; 0.5 says nothing, 1 is perfect. AURC: the "
        "share of misses as ever more users are served, surest first, on average; "
        f"{first['random_aurc']:.4f} if unsorted and {first['optimal_aurc']:.4f} at best"
        f"{' in the first probe' if _is_several(parts) else ''}; excess: above the best. Values: how many different "
        f"ones there are. Precision above it: how far the precision's AUROC lies above this one's; its AURC above: "
        f"likewise, the better the further below 0."
        f"{interval_words(parts)}",
        columns=[Column("confidence"), Column("AUROC", "value"), Column("95 % interval", "range"),
                 Column("AURC", "value", "terminal"), Column("excess", "value", "terminal"),
                 Column("values", "count", "terminal"), Column("precision above it", "signed", "terminal"),
                 Column("its interval", "interval", "terminal"), Column("its AURC above", "signed", "terminal"),
                 Column("interval", "interval", "terminal")],
        rows=rows,
    )  # fmt: skip


def _calibration_table(parts: Parts) -> Table:
    rows: list[list[Cell]] = []
    for arm, each in by_arm(parts):
        ones = [one["calibration"] for one in each]
        for when, way in _WAYS.items():
            fit = [1.0, 0.0] if when == "before" else means_of(ones, "temperature", "lapse")
            nll = [one["nll"] for one in ones]
            for name in ones[0][when]:
                own = [one[when][name] for one in ones]
                rows.append(
                    [arm, way, name, *means_of(own, "mean_probability", "hit_rate", "ece"),
                     interval_of(own, "ece", "interval"), *means_of(own, "floor"), *means_of(nll, when),
                     interval_of(nll, when, f"{when}_interval"), *fit]
                )  # fmt: skip
    one = next(each_probe(parts))[2]["calibration"]
    return probe_table(
        parts,
        name="calibration",
        title="Are its probabilities true?",
        caption="Claimed: the probability that the model gives to its first items together; happened: how often the "
        "target was among them. ECE: how far the two lie apart over ten groups of users; by chance: what it would be "
        "if every claim were true (its interval has that much on top). NLL: of the target; equal probabilities have "
        f"{one['nll']['uniform']:.4f}. As trained: temperature T = 1 and lapse rate u = 0; fitted: with T and u "
        f"fitted on the {one['fitted_on']} targets of {one['fitted_users']:,} users among all items. Lists that leave "
        f"seen items out have a T and u of their own.{interval_words(parts)}",
        columns=[Column("fit"), Column("of"), Column("claimed", "value"), Column("happened", "value"),
                 Column("ECE", "value", "terminal"), Column("95 % interval", "range", "terminal"),
                 Column("by chance", "value", "terminal"), Column("NLL", "value", "terminal"),
                 Column("its interval", "range", "terminal"), Column("T", "value", "terminal"),
                 Column("u", "value", "terminal")],
        rows=rows,
    )  # fmt: skip


def probe_table(parts: Parts, *, columns: Sequence[Column], **table: Any) -> Table:
    """With a column of arms first, unless there is one probe alone, which needs none."""
    made = Table(columns=[Column("arm"), *columns], **table)
    return made.without("arm") if list(parts) == [""] else made


def in_a_terminal(tables: Sequence[Table]) -> list[str]:
    """The lines of tables."""
    return [line for table in tables for line in ("", text(table))] + [""]


def each_probe(parts: Parts) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Arm, seed and figures of every probe."""
    yield from ((arm, seed, one) for arm, each in parts.items() for seed, one in each.items())


def by_arm(parts: Parts) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Every arm with the figures of its probes."""
    yield from ((arm, list(each.values())) for arm, each in parts.items())


def _is_several(parts: Parts) -> bool:
    return list(parts) != [""]


def over_seeds(parts: Parts) -> str:
    """Over which seeds the means are."""
    return f"; means over the probed seeds ({_probed(parts)})" if _is_several(parts) else ""


def _probed(parts: Parts) -> str:
    return "; ".join(f"{arm} {seeds_text(list(each))}" for arm, each in parts.items())


def interval_words(parts: Parts) -> str:
    """What the intervals of a table are over."""
    if not _is_several(parts):
        return ""
    several = [len(each) > 1 for each in parts.values()]
    how = "bootstrap over users"
    if any(several):
        how = "t over seeds" if all(several) else f"t over seeds where several are probed, {how} where one is"
    return f" Means over the probed seeds ({_probed(parts)}); intervals: {how}."


def interval_of(found: Sequence[Mapping[str, Any]], key: str, own: str) -> tuple[float, float] | None:
    """Over seeds where several have a value, else the one's own over users."""
    known = [one for one in found if one[key] is not None]
    if len(known) > 1:
        return seed_interval([one[key] for one in known])
    return (known[0][own][0], known[0][own][1]) if known and known[0][own] is not None else None


def _spelt(name: str) -> str:
    return name.replace("_", " ")
