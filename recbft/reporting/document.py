"""A comparison's figures for readers: what was done, the arms, and each arm's difference from each baseline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from recbft.comparing import provenance
from recbft.comparing.results import cells_of, is_constant, user_samples
from recbft.evaluation.paired import EXACT_SEEDS, holm
from recbft.evaluation.protocol import SETTINGS, headline_setting
from recbft.experiments.lists import counted, seeds_text
from recbft.reporting.text_tables import Row, markdown_table, markdown_words, text_table

Table = Callable[[Row, Sequence[Row]], str]
Result = Mapping[str, Any]


def comparison_document(result: Result, *, markdown: bool) -> str:
    """The text of ``comparison.md``, or the same for a terminal.

    Args:
        result: what ``write_comparison`` returns.
    """
    table: Table = markdown_table if markdown else text_table
    parts = [head(result, markdown=markdown), table(*_arm_cells(result))]
    for baseline, against in result["comparisons"].items():
        tests = sum(len(metrics) for settings in against.values() for metrics in settings.values())
        parts.append(
            f"Difference from {baseline}, paired by seed: would training again show it? p by two-sided paired t-test, "
            f"by sign flips, and by Holm over the {counted(tests, 't-test')} of this table; the last "
            "but one column is the smallest difference that so many seeds would have found four times in five, the "
            "last one the same runs' difference on validation, by which their epochs were chosen, with its own p."
            f"{without_spread(is_constant(cell['over_seeds']) for *_, cell in cells_of(against))}"
        )
        parts.append(table(*_seed_cells(against)))
        over_users = [cell["over_users"] for *_, cell in cells_of(against) if "over_users" in cell]
        if over_users:
            least = out_of_reach(len(over_users), user_samples(over_users[0]["num_users"]))
            parts.append(
                f"Difference from {baseline} over users, seeds averaged away: another claim, that with these trained "
                "models other users would show it too. Bootstrap interval and sign-flip p over users, by itself and by "
                f"Holm over the tests of this table.{least}"
            )
            parts.append(table(*_user_cells(against)))
    text = "\n\n".join(parts) + "\n"
    return markdown_words(text) if markdown else text


def head(result: Result, *, markdown: bool) -> str:
    """Command, date, device, versions, data, seeds, protocol and notes."""
    p = result["protocol"]
    lines = ("  \n" if markdown else "\n").join(provenance.lines(result["made"]))
    said = (
        f"Seeds {seeds_text(result['seeds'])}; test target of leave-one-out ranked among all {p['items']:,} items, "
        f"ties against the target; early stopping on {_setting(p)}; mean and standard deviation over seeds."
    )
    notes = list(result["notes"])
    if len(result.get("environments", ())) > 1:
        notes.append(f"the runs come from {len(result['environments'])} different environments")
    return "\n\n".join([lines, said, *(["\n".join(f"- note: {note}" for note in notes)] if notes else [])])


def out_of_reach(tests: int, samples: int) -> str:
    """What a caption adds where Holm over so many tests by so many drawn sign patterns cannot reach 0.05.

    >>> out_of_reach(100, 2000)
    ''
    """
    if tests / (1 + samples) <= 0.05:
        return ""
    return (
        f" Where more than {EXACT_SEEDS} users differ p is of {samples:,} drawn sign patterns, {1 / (1 + samples):.2g} "
        f"at the least, and cannot reach 0.05 by Holm over {tests:,} tests whatever the difference; over a smaller "
        "family it could."
    )


def difference_cells(d: Mapping[str, Any]) -> list[str]:
    """Difference, relative change and 95 % interval; the same difference in every seed has no spread to judge by."""
    relative = d.get("relative")
    return [
        unsigned_zero(f"{d['difference']:+.4f}"),
        "" if relative is None else percent(relative),
        "" if is_constant(d) else interval_text(d["interval"], "+.4f"),
    ]


def without_spread(are_constant: Iterable[bool]) -> str:
    """What a caption adds where one of its differences over seeds is the same in every seed.

    >>> without_spread([False, False])
    ''
    """
    if not any(are_constant):
        return ""
    return (
        " A difference without an interval is the same in every seed: there is no spread to judge by, and p is the "
        "sign flips'."
    )


def interval_text(ends: Sequence[Any], spec: str) -> str:
    """An interval; an end that rounds to zero keeps its sign, which says on which side of zero the interval ends."""
    return " to ".join(format(end, spec) if end else unsigned_zero(format(end, spec)) for end in ends)


def unsigned_zero(number: str) -> str:
    """A written number, without its sign if all of its digits are 0.

    >>> unsigned_zero("-0.0000"), unsigned_zero("-0.0001")
    ('0.0000', '-0.0001')
    """
    return number if number.strip("+-0.") else number.lstrip("+-")


def percent(share: float) -> str:
    """A share with its sign, such as "+1.7 %".

    >>> percent(0.0171), percent(0.0)
    ('+1.7 %', '0.0 %')
    """
    return f"{unsigned_zero(f'{100 * share:+.1f}')} %"


def on_validation(d: Mapping[str, Any] | None) -> str:
    """A difference on validation with its p, such as "+1.7 % (p = 0.033)"; nothing where it is not known."""
    if d is None:
        return ""
    relative = d["relative"]
    said = unsigned_zero(f"{d['difference']:+.4f}") if relative is None else percent(relative)
    return f"{said} (p {p_equals(d['p_t'])})"


def p_text(p: float) -> str:
    """A p-value to three digits, or as many as show on which side of 0.05 it lies.

    >>> p_text(0.0333), p_text(0.00001), p_text(0.0497), p_text(0.0503)
    ('0.033', '< 0.001', '0.0497', '0.050')
    """
    if p < 0.001:
        return "< 0.001"
    digits = next((digits for digits in range(3, 9) if (round(p, digits) < 0.05) == (p < 0.05)), 9)
    return f"{p:.{digits}f}"


def p_equals(p: float) -> str:
    """A p-value with its sign, to stand after the letter.

    >>> p_equals(0.0333), p_equals(0.00001)
    ('= 0.033', '< 0.001')
    """
    return p_text(p) if p < 0.001 else f"= {p_text(p)}"


def mean_sd(figures: Mapping[str, Any]) -> str:
    """Mean and standard deviation over seeds; the mean alone where there is one set of ranks for all of them."""
    return spread_text(figures["mean"], figures["sd"])


def spread_text(mean: float, sd: float | None) -> str:
    """A mean and, where there is one, its standard deviation.

    >>> spread_text(0.0571, 0.0023), spread_text(0.0571, None)
    ('0.0571 ± 0.0023', '0.0571')
    """
    return f"{mean:.4f}" if sd is None else f"{mean:.4f} ± {sd:.4f}"


def _setting(protocol: Mapping[str, Any]) -> str:
    metric = protocol["config"].get("training.valid_metric")
    judged = "each arm's validation metric" if metric is None else f"validation {metric.upper()}"
    setting = SETTINGS[headline_setting(protocol["filter_seen"])]
    epochs = protocol["config"].get("training.epochs")
    within = f" within {counted(epochs, 'epoch')}" if epochs else ""
    return f"{judged} ({setting}){within}"


def _arm_cells(result: Result) -> tuple[list[str], list[list[str]]]:
    columns = [(setting, metric) for setting in SETTINGS for metric in result["metrics"]]
    names = ["arm", *(f"{metric.upper()} {SETTINGS[setting]}" for setting, metric in columns), "epochs (best)", "s/run"]
    rows = []
    for arm, figures in result["arms"].items():
        known = figures["metrics"]
        cells = [mean_sd(known[setting][metric]) if setting in known else "" for setting, metric in columns]
        trained = ["", ""]
        if figures["epochs"]:
            trained = [
                f"{statistics.mean(figures['epochs']):.0f} ({_mean_of_known(figures['best_epochs'])})",
                f"{statistics.mean(figures['training_seconds']):.1f}",
            ]
        rows.append([arm, *cells, *trained])
    return names, rows


def _mean_of_known(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.0f}" if known else "-"


def _seed_cells(against: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    names = ["arm", "metric", "items", "difference", "relative", "95 % interval", "p", "p flips", "p Holm", "wins"]
    rows = []
    for arm, setting, metric, cell in cells_of(against):
        d = cell["over_seeds"]
        wins = f"{d['wins']} of {d['num_seeds']}"
        size = "" if d["cohen_d"] is None else f"{d['cohen_d']:+.2f}"
        ps = [p_text(d[name]) for name in ("p_t", "p_sign_flip", "p_holm")]
        # Without a spread (equal arms have none either) nothing says what so many seeds could show.
        shows = f"{d['smallest_effect']:.4f}" if d["smallest_effect"] else ""
        held = on_validation(cell.get("on_validation"))
        rows.append([arm, metric.upper(), SETTINGS[setting], *difference_cells(d), *ps, wins, size, shows, held])
    return [*names, "Cohen's d", "could show", "on validation"], rows


def _user_cells(against: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    found = [(*key, cell["over_users"]) for *key, cell in cells_of(against) if "over_users" in cell]
    adjusted = holm([d["p_sign_flip"] for *_, d in found])
    rows = []
    for (arm, setting, metric, d), p_holm in zip(found, adjusted, strict=True):
        difference, _, interval = difference_cells(d)
        ps = [p_text(p) for p in (d["p_sign_flip"], p_holm)]
        rows.append([arm, metric.upper(), SETTINGS[setting], difference, interval, *ps, f"{d['num_users']:,}"])
    return ["arm", "metric", "items", "difference", "95 % interval", "p", "p Holm", "users"], rows
