"""What ``recbft probe`` found, as lines of text: how precision flows, and whether it knows when it is right."""

from __future__ import annotations

from typing import Any

from recbft.reporting.text_tables import table


def mechanism_lines(found: dict[str, Any]) -> list[str]:
    """What happens inside, layer by layer."""
    lines = [f"MECHANISM: {found['num_tokens']:,} tokens of {found['num_users']:,} {found['part']} histories"]
    if not found["tracks_precision"]:
        lines += ["", "This model tracks no precision: there is none to probe, only what attention itself says."]
    names = [row["name"] for row in found["bins"]]
    counts = ["training count", *(row["counts"] for row in found["bins"]), "", ""]
    for layer in found["layers"]:
        header = [f"layer {layer['layer']}", *names, "rho", "p"]
        rows = [counts] + [
            [name.replace("_", " "), *map(short, row["bins"]), signed(row["rho"]), _p(row["p"])]
            for name, row in layer["quantities"].items()
        ]
        lines += ["", table(header, rows)]
        lines += _layer_words(layer, found["cap"])
    if found["layers"]:
        lines += [
            "",
            "Means over tokens, by how often the token's item occurs in training (Q0 rarest). rho: Spearman's with",
            "that count, over items.",
        ]
    if found["tracks_precision"]:
        lines.append("Gain: the share of what attention found that a position takes up.")
    return [*lines, *_initial_words(found), *_first_position(found["layers"]), ""]


def _layer_words(layer: dict[str, Any], cap: float) -> list[str]:
    lines = []
    if layer["saturated"] is not None:
        shares = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in layer["saturated"].items())
        lines.append(f"coordinates at the cap of {cap:g}: {shares}")
    parts = []
    if layer["process_noise"] is not None:
        parts.append(
            f"process noise {short(layer['process_noise']['mean'])} (largest {short(layer['process_noise']['max'])})"
        )
    if "jacobian_used" in layer["quantities"]:
        parts.append(f"Jacobian in use: {layer['jacobian_mode'].replace('_', ' ')}")
    if layer["recency_decay"] is not None:
        parts.append(f"recency decay {layer['recency_decay']:.3f} per position")
    return [*lines, "; ".join(parts)] if parts else lines


def _initial_words(found: dict[str, Any]) -> list[str]:
    initial = found["initial_precision"]
    if initial is None:
        return []
    names = [row["name"] for row in found["bins"] if row["name"] != "mask"]
    means = ["mean over items", *map(short, initial["bins"]), signed(initial["rho"]), _p(initial["p"])]
    lines = ["", table(["initial precision of items", *names, "rho", "p"], [means])]
    for end, place in (("at_floor", "floor"), ("at_cap", "cap")):
        if initial[end]:
            lines.append(
                f"{initial[end]:.1%} of the items lie at the {place} of the range, where nothing is learned any more"
            )
    if initial["levels"] is not None:
        rows = [[f"{row['reliability']:g}", row["num_items"], short(row["mean"])] for row in initial["levels"]]
        lines += ["", table(["planted reliability", "items", "initial precision"], rows)]
        lines.append(
            f"Spearman's rho of an item's initial precision with its planted reliability: "
            f"{signed(initial['rho_reliability'])} (p {_p(initial['p_reliability'])})"
        )
    by_user = found["user_reliability"]
    if by_user is not None:
        lines.append(
            f"of a user's posterior precision with the user's planted reliability: {signed(by_user['rho'])} "
            f"(p {_p(by_user['p'])})"
        )
    return lines


def _first_position(layers: list[dict[str, Any]]) -> list[str]:
    rows = [
        [f"{layer['layer']}", f"{row['head']}", short(row["share"]), short(row["uniform"]), short(row["gain"]),
         signed(row["rho"]), _p(row["p"]), signed(row["rho_given_keys"]), _p(row["p_given_keys"])]
        for layer in layers for row in layer["first_position"] or ()
    ]  # fmt: skip
    if not rows:
        return []
    header = ["layer", "head", "on first token", "if even", "gain", "rho", "p", "rho at equal length", "p"]
    return [
        "", table(header, rows),
        "Attention of each user's last token on the history's first token, beside an even spread; rho: with the head's",
        "gain, over users. Above the even share, the first token serves as a sink.",
    ]  # fmt: skip


def uncertainty_lines(found: dict[str, Any]) -> list[str]:
    """Whether confidence goes with being right."""
    k = found["k"]
    lines = [
        f"UNCERTAINTY: right means the target among the first {k} of {found['num_items']:,} items: "
        f"{found['hit_rate']:.1%} of {found['num_users']:,} users",
        "",
    ]
    rows = []
    for name, row in found["confidences"].items():
        above = row.get("reference_above")
        rows.append(
            [name.replace("_", " "), _three(row["auroc"]), _range(row["auroc_interval"]), _three(row["aurc"]),
             _three(row["excess_aurc"]), row["num_distinct"],
             "" if above is None else f"{signed(above['auroc'])} {_range(above['interval'])}"]
        )  # fmt: skip
    lines.append(table(["confidence", "AUROC", "interval", "AURC", "excess", "values", "precision above it"], rows))
    lines += [f"{name.replace('_', ' ')}: {row['verdict']}" for name, row in found["confidences"].items()]
    lines.append(
        f"AUROC 0.5 says nothing, 1 all. AURC: mean share of misses as ever more users are served, surest first; "
        f"{found['random_aurc']:.4f} if unsorted, {found['optimal_aurc']:.4f} at best."
    )
    if found["saturation"] is None:
        lines.append("This model tracks no precision: there is none to judge by.")
    else:
        s = found["saturation"]
        lines.append(
            f"At the cap of {s['cap']:g}: {s['coordinates']:.1%} of the coordinates, and every coordinate of "
            f"{s['users']:.1%} of the users; {s['num_distinct']:,} distinct precisions."
        )
    return [*lines, "", *_calibration(found["calibration"]), f"Intervals: {found['intervals']}.", ""]


def _calibration(found: dict[str, Any]) -> list[str]:
    ways = {"before": "as trained", "after": "fitted"}
    nll = [[way, f"{found['nll'][when]:.4f}", _range(found["nll"][f"{when}_interval"])] for when, way in ways.items()]
    rows = [
        [way, name, f"{one['ece']:.4f}", _range(one["interval"]), f"{one['floor']:.4f}",
         f"{one['mean_probability']:.4f}", f"{one['hit_rate']:.4f}"]
        for when, way in ways.items() for name, one in found[when].items()
    ]  # fmt: skip
    return [
        table(["probabilities", "NLL of the target", "interval"], nll),
        f"Fitted: at temperature {found['temperature']:.3f} and lapse rate {found['lapse']:.3f}, fitted on the "
        f"{found['fitted_on']} targets of {found['fitted_users']:,} users among all items;",
        "lists that leave seen items out have a fit of their own. "
        f"Equal probabilities have {found['nll']['uniform']:.4f}.",
        "",
        table(["probabilities", "of", "ECE", "interval", "by chance", "claimed", "happened"], rows),
        "claimed: the probability of the first items together. ECE: how far claimed and happened lie apart over ten",
        "groups of users; by chance: what it would be if every claim were true (its interval has that much on top).",
    ]


def short(value: float | None) -> str:
    """Three digits that matter, or so; a dash for none."""
    if value is None or value != value:
        return "-"
    size = abs(value)
    digits = 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}" if size >= 0.1 or size == 0 else f"{value:.2g}"


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def signed(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:+.3f}"


def _p(value: float | None) -> str:
    from recbft.reporting.document import p_text

    return "-" if value is None else p_text(value)


def _range(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
