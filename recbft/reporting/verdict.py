"""The answer of a comparison: one sentence for everyone, what to do with it, and the evidence.

    shown        p < 0.05 of the paired t-test over seeds, Holm-adjusted over the arms where there are several
    detectable   the smallest difference that the t-test finds with 80 % power at these seeds' spread

A difference that is shown comes with that of the same runs on validation: a real gain is found there too.
Percentages are of the baseline's mean; the difference and the ends of its interval are divided by the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recbft.evaluation.metrics import SETTINGS, cutoff, meaning
from recbft.evaluation.paired import EXACT_SEEDS
from recbft.experiments.lists import counted
from recbft.reporting.comparison_tables import Finding, on_validation
from recbft.reporting.tables import LEVEL, digits_for, p_equals, p_text, percent

SENTENCES = 8  # arms that have one each, whatever was found
FEWEST_SEEDS = 6  # with which sign flips can reach ``LEVEL``
_PLACES = {1: "first place", 5: "top five", 10: "top ten", 20: "top twenty"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found about one arm, or about several of which nothing is shown."""

    sentence: str
    advice: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.sentence}\nWhat to do: {self.advice}\nEvidence: {self.evidence}"


def answers(
    found: Sequence[tuple[Finding, float]], dataset: str, arms: Mapping[str, Any], same: Collection[str] = ()
) -> list[Answer]:
    """An answer for each arm, of its headline finding and the p adjusted over the arms.

    Where there are more than ``SENTENCES``, those of which nothing is shown share one answer, after the others.

    Args:
        arms: the entry ``arms`` of a comparison's results.
        same: names of the arms with the ranks of the baseline, for every user and seed.
    """

    def alone(one: Finding, p: float) -> Answer:
        return answer(one, dataset, arms, p=p, num_arms=len(found), same_ranks=one.arm in same)

    if len(found) <= SENTENCES:
        return [alone(one, p) for one, p in found]
    said = [alone(one, p) for one, p in found if p < LEVEL]
    alike: dict[tuple[str, int], list[tuple[Finding, float]]] = {}
    for one, p in found:
        if p >= LEVEL:
            alike.setdefault((one.setting, one.seeds.num_seeds), []).append((one, p))
    return said + [
        alone(*group[0]) if len(group) == 1 else _not_shown(group, dataset, len(found)) for group in alike.values()
    ]


def answer(
    found: Finding,
    dataset: str,
    arms: Mapping[str, Any],
    *,
    p: float,
    num_arms: int = 1,
    same_ranks: bool = False,
) -> Answer:
    """What was found about one arm.

    Args:
        p: of the t-test, adjusted over ``num_arms`` arms.
    """
    if same_ranks:
        return Answer(
            sentence=f"{found.arm} and {found.baseline} rank every target of {dataset} alike in every seed.",
            advice="Use either; there is nothing to tell apart.",
            evidence="difference 0, p = 1.",
        )
    if p < LEVEL:
        held = on_validation(found)
        beside = f" On validation the same runs have {held}." if held else ""
        return Answer(
            sentence=_shown(found, dataset, arms), advice=_advice(found, arms),
            evidence=f"{_evidence(found, p, num_arms)}. {_signs(found)}{beside}",
        )  # fmt: skip
    sentence = f"No difference between {found.arm} and {found.baseline} could be shown on {dataset}"
    evidence, more = _evidence(found, p, num_arms), "."
    # Equal differences leave no spread to tell it from, and few of them too little.
    if found.seeds.smallest_effect and found.seeds.num_seeds >= FEWEST_SEEDS:
        sentence += f"; one of {_detectable(found)} or more would probably have been"
        with_power = f"with {counted(found.seeds.num_seeds, 'seed')} a difference of {_detectable(found)} would have"
        alone = " by a test alone, without Holm's adjustment" if num_arms > 1 else ""
        more = f"; {with_power} been found with 80 % power{alone}."
    hits, _ = _hits(found, arms, found.arm)
    hits = f"Both{hits[4:]}" if hits.startswith("both find ") else hits
    return Answer(
        sentence=f"{sentence}.{f' {hits}.' if hits else ''}",
        advice=f"keep {found.baseline}, or train more seeds: four times as many find a difference half as large.",
        evidence=f"{evidence}{more}",
    )


def terms(found: Sequence[Finding], num_arms: int) -> dict[str, str]:
    """What the words of the answers mean, for a reader who meets them here first."""
    if not found:
        return {}
    one = found[0]
    name, _, says = meaning(one.metric).partition(": ")
    told = {
        "arm": f"one of the systems that are compared; {one.baseline} is the baseline, which the others are held "
        "against.",
        "seed": "the number that starts the random generator. Each seed is one repeat of the training, for every arm.",
        "target": "the item that a user really took next. The models have not seen it.",
        name: f"{says}; the mean over users. It rises when targets stand higher in the lists.",
        SETTINGS[one.setting]: "the target is ranked among all items of the data set."
        if one.setting == "unfiltered"
        else "items that the user already had are left out of the ranking.",
        "95 % interval": "the range of differences that fit these seeds.",
        "p": "how often chance alone would give a difference this large. Below 0.05 it is called significant.",
    }
    if num_arms > 1:
        told["Holm"] = "a correction of p: with more arms, chance has more tries."
    return told


def _shown(found: Finding, dataset: str, arms: Mapping[str, Any]) -> str:
    """One sentence of a difference that is shown: what differs, and whether it may be luck."""
    n = found.seeds.num_seeds
    luck = f"with {counted(n, 'repeat')} this is unlikely to be luck"
    if n < FEWEST_SEEDS:
        luck = f"but {counted(n, 'repeat')} are too few to rely on it"
    elif found.seeds.p_sign_flip >= LEVEL:
        luck = "but only one of two tests says that this is unlikely to be luck"
    told, differ = _hits(found, arms, "it")
    if not differ:
        digits = digits_for([(found.seeds.difference, found.seeds.p_t)])
        ours, theirs = (f"{mean:.{digits}f}" for mean in (found.seeds.mean_other, found.seeds.mean_baseline))
        beside = f" ({told})" if told else ""
        told = f"its {found.metric.upper()} is {ours}, that of {found.baseline} {theirs}{beside}"
    better = "better" if found.seeds.difference > 0 else "worse"
    return f"{found.arm} ranks {better} than {found.baseline} on {dataset}: {told}; {luck}."


def _hits(found: Finding, arms: Mapping[str, Any], who: str) -> tuple[str, bool]:
    """How many users find their item near the top with either arm, and whether this tells the two apart.

    It does where tenths of a percent differ, and the same way as the metric that was tested. "" where it is not known.
    """
    levels = [arms.get(arm, {}).get("metrics", {}).get(found.setting, {}) for arm in (found.arm, found.baseline)]
    names = [name for name in levels[0] if name.startswith("hr@")]
    if not names:
        return "", False
    name = "hr@10" if "hr@10" in names else names[0]
    k = cutoff(name) or 0
    place = _PLACES.get(k, f"top {k}")
    ours, theirs = (round(100 * level[name]["mean"], 1) for level in levels)
    if ours == theirs:
        return f"both find the next item in their {place} for {ours:.1f} % of users", False
    said = f"{who} finds the next item in its {place} for {ours:.1f} % of users, {found.baseline} for {theirs:.1f} %"
    return said, (ours > theirs) == (found.seeds.difference > 0)


def _advice(found: Finding, arms: Mapping[str, Any]) -> str:
    """What to do with a difference that is shown."""
    if found.seeds.num_seeds < FEWEST_SEEDS:
        return f"train at least {FEWEST_SEEDS} seeds before relying on this."
    if found.seeds.p_sign_flip >= LEVEL:
        return "train more seeds before relying on this."
    if found.seeds.difference < 0:
        return f"keep {found.baseline}."
    held = found.validation
    if held is not None and held.difference <= 0:
        return f"be careful with {found.arm}: on validation the same runs show no gain. Try it on newer data first."
    seconds = [arms.get(arm, {}).get("training_seconds") for arm in (found.arm, found.baseline)]
    if not all(seconds):
        return f"use {found.arm}, if a gain of this size is worth a change."
    ours, theirs = (sum(each) / len(each) for each in seconds if each)
    if ours / theirs < 1.05:
        return f"use {found.arm}; training takes no longer."
    return f"use {found.arm}, if a gain of this size is worth training {ours / theirs:.1f} times as long."


def _evidence(found: Finding, p: float, num_arms: int) -> str:
    n = found.seeds.num_seeds
    low, high = (_amount(found, end) for end in found.seeds.interval)
    within = f"95 % interval {low.removesuffix(' %')} to {high}"
    if found.seeds.is_constant:
        within = "the same in every seed and so without an interval, p by sign flips"
    said = (
        f"{_amount(found, found.seeds.difference)} {found.metric.upper()} ({SETTINGS[found.setting]}), "
        f"{within}, {counted(n, 'seed')}, p {p_equals(p)}"
    )
    if num_arms > 1:
        alone = f"; {p_text(found.seeds.p_t)} by itself" if p_text(found.seeds.p_t) != p_text(p) else ""
        said += f" (Holm over {num_arms} arms{alone})"
    return said


def _signs(found: Finding) -> str:
    """What the permutation test adds, which does not lean on normal differences."""
    n, p = found.seeds.num_seeds, found.seeds.p_sign_flip
    exact = "exact" if n <= EXACT_SEEDS else "sampled"
    wins = f"Better in {found.seeds.wins} of {n} seeds; {exact} sign-flip p {p_equals(p)}"
    smallest = 2 / 2**n
    if smallest >= LEVEL:
        return f"{wins}, and {n} seeds cannot bring it below {smallest:.3g}."
    return f"{wins}." if p < LEVEL else f"{wins}: the {exact} test does not show it."


def _not_shown(found: Sequence[tuple[Finding, float]], dataset: str, num_arms: int) -> Answer:
    """The answer of several arms, of which no difference is shown in one setting and number of seeds."""
    ordered = sorted((one for one, _ in found), key=lambda one: one.seeds.difference)
    low, high = (f"{_amount(one, one.seeds.difference)} ({one.arm})" for one in (ordered[0], ordered[-1]))
    p, baseline = min(p for _, p in found), ordered[0].baseline
    return Answer(
        sentence=f"No difference from {baseline} could be shown on {dataset} for {len(found)} of {num_arms} arms.",
        advice=f"keep {baseline}, or train more seeds.",
        evidence=f"{low} to {high} {ordered[0].metric.upper()} ({SETTINGS[ordered[0].setting]}), "
        f"{counted(ordered[0].seeds.num_seeds, 'seed')}, smallest p {p_equals(p)} (Holm over {num_arms} arms). What "
        "each could have shown is under Metrics.",
    )


def _detectable(found: Finding) -> str:
    return _amount(found, found.seeds.smallest_effect).lstrip("+")


def _amount(found: Finding, difference: float) -> str:
    share = found.share(difference)
    return f"{difference:+.4f}" if share is None else percent(share)
