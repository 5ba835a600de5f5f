"""The answer in one sentence: better, worse, the same, or not shown, and then what could have been shown.

    shown            p < 0.05 of the paired t-test over seeds, Holm-adjusted over the arms where there are several
    could be shown   the smallest difference that the t-test finds with 80 % power at these seeds' spread

Of what is shown the sentence says what the same runs have on validation: a gain of the method is found there too.
Percentages are of the baseline's mean; the difference and the ends of its interval are divided by the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

from recbft.evaluation.paired import EXACT_SEEDS
from recbft.evaluation.protocol import SETTINGS
from recbft.reporting.document import p_equals, p_text, percent
from recbft.reporting.findings import Finding

LEVEL = 0.05
SENTENCES = 8  # arms that have one each, whatever was found


def answers(found: Sequence[tuple[Finding, float]], dataset: str) -> list[str]:
    """A sentence for each arm, of its headline finding and the p adjusted over the arms.

    Where there are more than ``SENTENCES``, those of which nothing is shown share one sentence, after the others.
    """
    if len(found) <= SENTENCES:
        return [answer(one, dataset, p=p, num_arms=len(found)) for one, p in found]
    said = [answer(one, dataset, p=p, num_arms=len(found)) for one, p in found if p < LEVEL]
    alike: dict[tuple[str, int], list[tuple[Finding, float]]] = {}
    for one, p in found:
        if p >= LEVEL:
            alike.setdefault((one.setting, one.seeds.num_seeds), []).append((one, p))
    return said + [_not_shown(group, dataset, num_arms=len(found)) for group in alike.values()]


def _not_shown(found: Sequence[tuple[Finding, float]], dataset: str, *, num_arms: int) -> str:
    """The sentence of several arms, of which no difference is shown in one setting and number of seeds."""
    if len(found) == 1:
        return answer(found[0][0], dataset, p=found[0][1], num_arms=num_arms)
    ordered = sorted((one for one, _ in found), key=lambda one: one.seeds.difference)
    low, high = (f"{_amount(one, one.seeds.difference)} ({one.arm})" for one in (ordered[0], ordered[-1]))
    p = min(p for _, p in found)
    return (
        f"No difference from {ordered[0].baseline} could be shown on {dataset} for {len(found)} of {num_arms} arms: "
        f"{low} to {high} {ordered[0].metric.upper()} ({SETTINGS[ordered[0].setting]}), {ordered[0].seeds.num_seeds} "
        f"seeds, smallest p {p_equals(p)} (Holm over {num_arms} arms). What each could have shown is under Metrics."
    )


def answer(found: Finding, dataset: str, *, p: float, num_arms: int = 1) -> str:
    """What was found about one arm.

    Args:
        p: of the t-test, adjusted over ``num_arms`` arms.
    """
    if found.same_ranks:
        return (
            f"{found.arm} and {found.baseline} rank every target of {dataset} alike in every seed: "
            "difference 0, p = 1, nothing to tell apart."
        )
    n = found.seeds.num_seeds
    low, high = (_end(found, end) for end in found.seeds.interval)
    within = f"95 % interval {low.removesuffix(' %')} to {high}"
    if found.seeds.is_constant:
        within = "the same in every seed and so without an interval, p by sign flips"
    evidence = (
        f"{_amount(found, found.seeds.difference)} {found.metric.upper()} ({SETTINGS[found.setting]}), "
        f"{within}, {n} seeds, p {p_equals(p)}"
    )
    if num_arms > 1:
        alone = f"; {p_text(found.seeds.p_t)} by itself" if p_text(found.seeds.p_t) != p_text(p) else ""
        evidence += f" (Holm over {num_arms} arms{alone})"
    if p < LEVEL:
        better = "better" if found.seeds.difference > 0 else "worse"
        said = f"{found.arm} is {better} than {found.baseline} on {dataset}: {evidence}. {_signs(found)}"
        return f"{said} On validation the same runs have {found.validation}." if found.validation else said
    said = f"No difference between {found.arm} and {found.baseline} could be shown on {dataset}: {evidence}"
    if not found.seeds.smallest_effect:  # equal differences leave no spread to tell it from
        return f"{said}."
    effect = _amount(found, found.seeds.smallest_effect).lstrip("+")
    alone = " by a test alone, without Holm's adjustment" if num_arms > 1 else ""
    return f"{said}; with {n} seeds an effect of {effect} would have been found with 80 % power{alone}."


def _signs(found: Finding) -> str:
    """What the permutation test adds, which does not lean on normal differences."""
    n, p = found.seeds.num_seeds, found.seeds.p_sign_flip
    exact = "exact" if n <= EXACT_SEEDS else "sampled"
    wins = f"Better in {found.seeds.wins} of {n} seeds; {exact} sign-flip p {p_equals(p)}"
    smallest = 2 / 2**n
    if smallest >= LEVEL:
        return f"{wins}, and {n} seeds cannot bring it below {smallest:.3g}: take more seeds before relying on this."
    return f"{wins}." if p < LEVEL else f"{wins}: the {exact} test does not show it."


def _amount(found: Finding, difference: float) -> str:
    share = found.share(difference)
    return f"{difference:+.4f}" if share is None else percent(share)


def _end(found: Finding, end: float) -> str:
    """An end of the interval; one that rounds to zero keeps its sign, which says on which side of zero it lies."""
    share = found.share(end)
    return _amount(found, end) if not share else f"{100 * share:+.1f} %"
