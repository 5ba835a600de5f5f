"""The sections of the page that come from a comparison alone, each with words, plots and tables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recbft.comparing.comparison import Arm, Comparison
from recbft.config.fields import verbatim
from recbft.datasets.config import PART_FILES
from recbft.errors import UserError
from recbft.evaluation.evaluate import lists_of
from recbft.evaluation.metrics import SETTINGS, config_hash, counted_users, headline_setting
from recbft.evaluation.paired import compare_seeds, holm
from recbft.evaluation.strata import QUANTILES
from recbft.experiments.lists import listed, seeds_text
from recbft.experiments.plan import has_decay, leaves, settings_of, summary_of
from recbft.reporting import plots
from recbft.reporting.comparison_tables import (
    Finding,
    findings,
    headline_findings,
    level_table,
    seed_table,
    training_table,
    user_table,
    without_spread,
)
from recbft.reporting.page import Plot, Section
from recbft.reporting.run_tables import usual_cutoff
from recbft.reporting.stratum_tables import Stratified, available, stratified, subject_of_comparison
from recbft.reporting.tables import DIFFERENCE, Cell, Column, Table, digits_for, distinct
from recbft.training.run_config import load_run_config

Exposures = Mapping[str, Mapping[str, Mapping[str, Any]]]  # arm -> setting -> measure@k -> mean, sd, values
MEASURES = ("coverage", "gini", "popularity")
MAX_ARMS_IN_BARS = 4
_STRATA = (
    "Users are split into groups, called strata, to see for whom there is a difference. Q0 is the group with the "
    "lowest values, such as the rarest targets."
)


def colours_of(comparison: Comparison) -> dict[str, int]:
    """A place in the palette for each arm, 0 for the baseline."""
    others = [name for name in comparison.arms if name != comparison.baseline]
    return {comparison.baseline: 0, **{name: number for number, name in enumerate(others, start=1)}}


def summaries(comparison: Comparison) -> dict[str, str]:
    """What each trained arm is, as ``recbft models`` says it."""
    said = {}
    for name, arm in comparison.arms.items():
        if arm.config and (summary := summary_of(arm.config)):
            decay = "; attention decays with distance (recency decay)" if has_decay(arm.config) else ""
            said[name] = f"{summary}{decay}."
    return said


def metrics_section(comparison: Comparison, results: Mapping[str, Any], *, draw: bool) -> Section:
    """Levels and differences."""
    found = findings(results)
    main = found.get(comparison.baseline, [])
    over_users = [table for each in found.values() if each and (table := user_table(results, each)) is not None]
    return Section(
        name="metrics",
        title="Metrics",
        plots=_difference_plots(comparison, main) if draw and main else [],
        tables=distinct([level_table(results), *(seed_table(results, each) for each in found.values() if each)]),
        folded=distinct(over_users),
    )


def strata_section(comparison: Comparison, *, data_root: str | None, draw: bool) -> Section:
    """Where the difference comes from."""
    subject = subject_of_comparison(comparison, data_root=data_root)
    names, left_out = available(subject)
    first = headline_setting(comparison.protocol["filter_seen"])
    # An external system may know the other setting only; a trained arm, which is always there, knows both.
    there = subject.ranks
    setting = next(s for s in (first, *SETTINGS) if comparison.baseline in there[s] and len(there[s]) > 1)
    made = stratified(subject, by=names, quantiles=QUANTILES, setting=setting)
    absent = [name for name in comparison.arms if name not in there[setting]]
    left_out += [f"{name} has no {setting} ranks and is in none of these tables." for name in absent]
    # The grid has as many rows as all other tables together.
    shown = [one for one in made if one.metric == made[0].metric and one.by != "grid"]
    drawn = [_strata_plot(comparison, one, setting) for one in shown if one.by != "first-time"] if draw else []
    return Section(
        name="strata",
        title="Where it comes from: strata",
        words=[_STRATA, *left_out],
        plots=drawn,
        tables=[one.table for one in shown],
        folded=[one.table for one in made if one not in shown],
    )


def training_section(comparison: Comparison, results: Mapping[str, Any], *, draw: bool) -> Section:
    """How training went."""
    table = training_table(results)
    if table is None:
        return Section(name="training", title="Training", words=["No run of this comparison says how it was trained."])
    return Section(name="training", title="Training", plots=_curves(comparison) if draw else [], tables=[table])


def exposure_section(comparison: Comparison, results: Mapping[str, Any]) -> Section:
    """How much of the catalogue an arm's lists show, how evenly, and how popular it is."""
    title = "What the lists show"
    found: Exposures = {name: arm["exposure"] for name, arm in results["arms"].items() if arm.get("exposure")}
    absent = [name for name in comparison.arms if name not in found]
    words = [f"Of {listed(absent)} no lists are known, only ranks."] if absent else []
    some = lists_of(comparison.num_users, comparison.protocol["items"])
    words += [f"Lists of {some}, drawn from a fixed seed."] if some and found else []
    if not found:
        return Section(name="exposure", title=title, words=words)
    k = usual_cutoff(next(iter(next(iter(found.values())).values())))
    differences = _exposure_differences(comparison, found, k) if comparison.baseline in found else None
    return Section(
        name="exposure",
        title=title,
        words=words,
        tables=[_exposure_table(comparison, found, k)],
        folded=[] if differences is None else [differences],
    )


def protocol_section(comparison: Comparison, results: Mapping[str, Any]) -> Section:
    """Every field that decides a number."""
    p = comparison.protocol
    headline = SETTINGS[headline_setting(p["filter_seen"])]
    words = [
        f"{p['dataset']}: {counted_users(p)}, {p['items']:,} items, {p['events']:,} events, "
        f"hash of the content {p['content_hash'][:12]}, of the targets {p['target_hash'][:12]}.",
        f"Split: {p['split']}. Ranking: {p['ranking']}; headline {headline}. Ties: {p['ties']}.",
        f"Seeds {seeds_text(comparison.seeds)}, recbft {p['recbft_version']}.",
    ]
    shared = {key: _plain(value) for key, value in leaves(p).items()}
    made = {key: value for key, value in results.get("made", {}).items() if key not in ("data", "command")}
    shared |= {f"made.{key}": _plain(value) for key, value in leaves(made).items()}
    configs = {name: leaves(arm.config) for name, arm in comparison.arms.items() if arm.config}
    keys = list(dict.fromkeys(key for config in configs.values() for key in config if key != "seed"))
    differing = [key for key in keys if len({str(config.get(key)) for config in configs.values()}) > 1]
    table = Table(
        name="arms",
        title="What the arms differ in",
        caption="Every setting that is not the same in all trained arms. A dash: the arm has no such setting.",
        columns=[Column("setting"), *(Column(name) for name in configs)],
        rows=[
            *([key, *(_cell(config, key) for config in configs.values())] for key in differing),
            ["hash of the config", *(config_hash(comparison.arms[name].config)[:12] for name in configs)],
        ],
    )
    return Section(name="protocol", title="Protocol", words=words, tables=[table] if configs else [], items=shared)


def commands_section(comparison: Comparison, results: Mapping[str, Any]) -> Section:
    """What to type to have all of this again."""
    made = results.get("made", {}).get("command")
    ours = [arm for name, arm in comparison.arms.items() if results["arms"][name]["epochs"]]
    trained = [command for arm in ours if (command := _training_command(arm)) is not None]
    return Section(
        name="commands",
        title="Make it again",
        words=[
            "These commands make the runs and this page again. DIR is the folder with the data sets, OUT the folder "
            "of the comparison."
        ],
        commands=[*([made] if made else []), *trained, "recbft report OUT --data-root DIR"],
    )


def _exposure_table(comparison: Comparison, found: Exposures, k: int) -> Table:
    rows: list[list[Cell]] = []
    for setting, words in SETTINGS.items():
        for arm in sorted(found, key=lambda name: name != comparison.baseline):
            levels = [found[arm].get(setting, {}).get(f"{name}@{k}") for name in MEASURES]
            rows.append([arm, words, *(None if one is None else (one["mean"], one["sd"]) for one in levels)])
    return Table(
        name="exposure",
        title=f"Lists of the {k} best items",
        caption="Coverage: share of the items that are on the list of at least one user. Gini: 0 where all items are "
        "on equally many lists, near 1 where few items fill all lists. Popularity: how often the listed items occur "
        f"in training, on average; the targets occur {comparison.target_frequency.mean():.4f} times. Mean ± standard "
        f"deviation over seeds {seeds_text(comparison.seeds)}.",
        columns=[Column("arm"), Column("items"), *(Column(f"{name}@{k}", "spread", "phone" if n < 2 else "terminal")
                                                   for n, name in enumerate(MEASURES))],
        rows=rows,
    )  # fmt: skip


def _exposure_differences(comparison: Comparison, found: Exposures, k: int) -> Table | None:
    """Paired by seed; None where no other arm has lists."""
    baseline = found[comparison.baseline]
    pairs = [
        (arm, setting, name, compare_seeds(baseline[setting][name]["values"], measures[name]["values"]))
        for arm, settings in found.items() if arm != comparison.baseline
        for setting, measures in settings.items()
        for name in (f"{measure}@{k}" for measure in MEASURES) if name in measures and name in baseline[setting]
    ]  # fmt: skip
    if not pairs:
        return None
    adjusted = holm([one.p_t for *_, one in pairs])
    rows: list[list[Cell]] = [
        [arm, name, SETTINGS[setting], one.difference, one.relative, None if one.is_constant else one.interval,
         one.p_t, p]
        for (arm, setting, name, one), p in zip(pairs, adjusted, strict=True)
    ]  # fmt: skip
    return Table(
        name="exposure-differences",
        title=f"Difference of the lists from {comparison.baseline}, paired by seed",
        caption="p: two-sided paired t-test; interval: t; p Holm: the same p, adjusted by Holm over the "
        f"{len(rows)} tests of this table. More is not better or worse by itself."
        f"{without_spread(one.is_constant for *_, one in pairs)}",
        columns=[Column("arm"), Column("measure"), Column("items"), *DIFFERENCE],
        rows=rows,
        digits=digits_for((one.difference, one.p_t) for *_, one in pairs),
    )  # fmt: skip


def _difference_plots(comparison: Comparison, found: Sequence[Finding]) -> list[Plot]:
    colours = colours_of(comparison)
    setting = headline_setting(comparison.protocol["filter_seen"])
    inside = [one for one in found if one.setting == setting] or list(found)
    caption = (
        f"Difference from {comparison.baseline} in percent of its mean, {SETTINGS[inside[0].setting]}. The bar is the "
        "95 % interval over seeds; where it does not touch 0, the test by itself shows a difference."
    )
    if any(one.seeds.is_constant for one in inside):
        caption += " Hollow: the same difference in every seed, so there is no interval."
    without = dict.fromkeys(one.metric.upper() for one in inside if not one.seeds.mean_baseline)
    if without:
        caption += f" Left out, since {comparison.baseline} has 0 of it: {', '.join(without)}."
    drawn = [Plot(name="differences", svg=plots.differences(inside, colours), caption=caption)]
    chosen = [one for one, _ in headline_findings(comparison, found)]
    if chosen:
        setting, metric = chosen[0].setting, chosen[0].metric
        arms = [comparison.baseline, *(one.arm for one in chosen if one.setting == setting)]
        values = {arm: comparison.values(arm, setting, metric) for arm in arms}
        caption = (
            f"One point per seed, {SETTINGS[setting]}. Above the line the arm is better than the baseline of the same "
            "seed."
        )
        svg = plots.seed_scatter(comparison.baseline, values, metric, colours)
        drawn.append(Plot(name="seeds", svg=svg, caption=caption))
    return drawn


def _strata_plot(comparison: Comparison, one: Stratified, setting: str) -> Plot:
    colours = {arm: n for arm, n in colours_of(comparison).items() if n < MAX_ARMS_IN_BARS}
    caption = (
        f"{one.metric.upper()} by {one.strata.axis}, {SETTINGS[setting]}, with 95 % intervals over seeds. Pale bars: "
        "too few users or hits to say anything."
    )
    if len(comparison.arms) > len(colours):
        caption += f" Shown are the baseline and the first {len(colours) - 1} other arms."
    svg = plots.strata_bars(one.results, one.strata.unit, one.metric, colours)
    return Plot(name=f"strata-{one.by}", svg=svg, caption=caption)


def _curves(comparison: Comparison) -> list[Plot]:
    metric = next((str(arm.config["training"]["valid_metric"]) for arm in comparison.arms.values()
                   if arm.config.get("training", {}).get("valid_metric")), "")  # fmt: skip
    curves = {}
    for name, arm in comparison.arms.items():
        runs = [_curve(history, f"valid_{metric}") for history in arm.histories]
        if any(epochs for epochs, _ in runs):
            curves[name] = [run for run in runs if run[0]]
    if not curves:
        return []
    label = f"validation {metric.upper()}"
    svg = plots.training_curves(curves, label, colours_of(comparison))
    caption = f"{label} by epoch, {SETTINGS[headline_setting(comparison.protocol['filter_seen'])]}, one line per run."
    return [Plot(name="training", svg=svg, caption=caption)]


def _curve(history: Sequence[Mapping[str, Any]], column: str) -> tuple[list[float], list[float]]:
    rows = [row for row in history if isinstance(row.get(column), (int, float))]
    return [float(row["epoch"]) for row in rows], [float(row[column]) for row in rows]


def _training_command(arm: Arm) -> str | None:
    """The command behind an arm's runs; None where its settings are not those of this version."""
    sections = verbatim({key: value for key, value in arm.config.items() if value is not None})
    try:
        config = load_run_config(**sections)
        older = config.training.warm_start and _placeless(config.training.warm_start)
        parts = {key: file and _placeless(file) for key in PART_FILES for file in [getattr(config.data, key)]}
        data = replace(config.data, validation=parts["validation"], test=parts["test"])
        settings = settings_of(replace(config, data=data, training=replace(config.training, warm_start=older)))
    except UserError:
        return None
    words = ["recbft", "train", "-m", config.model, "-d", _placeless(str(config.data.dataset)), "--arm", config.arm]
    words += [word for setting in settings for word in ("--set", setting)]
    return f"{shlex.join(words)} --data-root DIR --seed SEED    # {arm.name}: SEED {seeds_text(arm.seeds)}"


def _cell(config: Mapping[str, Any], key: str) -> str | None:
    return _plain(config[key]) if key in config else None


def _placeless(value: str) -> str:
    """A path from the root of one machine by its last name: the page is for others. Other words stay as they are."""
    return (Path(value).name or value) if os.path.isabs(value) else value


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return _placeless(value)
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
