"""The tables of docs/study.md and docs/results.md, computed from the files in docs/reports and written into the pages.

    python -m benchmarks.study.tables

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; the command replaces what is between the two.
``runs.csv`` and ``again.csv`` have one line per training run (``benchmarks.study.ledger``): arms are paired by seed and
tested as ``recbft compare`` tests them (``recbft.evaluation.paired``); those of ``read_out.csv`` have more columns, by
``benchmarks.study.read_out``. ``summaries.csv`` has figures whose runs are not
kept; their commands, data, machines and dates are in ``sources.csv``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from benchmarks.command import finish, parser
from benchmarks.language import perplexity
from benchmarks.study import by_noise, read_out
from benchmarks.study.by_noise import NDCG
from benchmarks.study.choose import difference, percent, percent_and_interval
from benchmarks.study.ledger import arms_of, check_alike, read
from benchmarks.study.overview import ITEMS, PUBLISHED, VALIDATION, Arms, comparisons
from recbft.errors import UserError, did_you_mean
from recbft.evaluation.paired import SeedComparison, holm
from recbft.reporting.tables import markdown_table, p_text
from recbft.system.files import write_atomic

REPORTS = Path(__file__).parents[2] / "docs" / "reports"
PAGES = (REPORTS.parent / "study.md", REPORTS.parent / "results.md")
PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {
    "sasrec": "SASRec",
    "bert4rec": "BERT4Rec",
    "hstu": "HSTU",
    "amazon-instruments": "Instruments",
    "amazon-beauty": "Beauty",
    "ml-1m": "ML-1M",
}
DECAY = "matched+recency"
FILTER = "matched[backbone.absolute_positions=false,mixer=sc_rfa]"
INSTRUMENTS = ("amazon-instruments",)
THIRDS = ("beauty-third-1", "beauty-third-2", "beauty-third-3")


class Pairs(NamedTuple):
    """Runs of `bft` and of `matched+recency` that one line of a table compares."""

    model: str
    text: str
    data: Sequence[str]
    settings: str = ""  # of both arms, as in `bft[...]`
    seeds: range = range(1000)
    file: str = "again.csv"


CHECKS = [
    Pairs("sasrec", "only seeds 30-49", INSTRUMENTS, seeds=range(30, 50), file="runs.csv"),
    Pairs("sasrec", "last two events left out", ["instruments-cut2"]),
    Pairs("sasrec", "binary cross-entropy", INSTRUMENTS, "backbone.loss=bce"),
    Pairs("sasrec", "sampled softmax", INSTRUMENTS, "backbone.loss=sampled_softmax"),
    Pairs("sasrec", "thirds of Beauty", THIRDS),
    Pairs("bert4rec", "last two events left out", ["instruments-cut2"]),
    Pairs("bert4rec", "patience 100", INSTRUMENTS),
    Pairs("bert4rec", "patience 100, 80 % masked", INSTRUMENTS, "backbone.mask_probability=0.8"),
    Pairs("bert4rec", "thirds of Beauty", THIRDS),
]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A table of ``summaries.csv`` as the page shows it."""

    first: str  # head of the first column
    columns: Sequence[str] = ()  # unless given, all
    num_rows: int | None = None  # the first ones; unless given, all
    with_spread: bool = True
    beside: str = ""  # another table, whose values follow in brackets


SUMMARIES = {
    "initial": Summary(first="arm", num_rows=4),
    "planted": Summary(first="unreliable, share, arm", num_rows=5),
    "uncertainty": Summary(
        first="AUROC of a hit in the first ten",
        columns=["SASRec, Instruments (20)", "SASRec, ML-1M (5)", "SASRec, Beauty (4)"],
        with_spread=False,
    ),
    "probabilities": Summary(first="data, lists of ten from", num_rows=3, beside="calibration-error"),
    "mechanism": Summary(first="data"),
    "at-cap": Summary(first="model, data"),
    "items": Summary(first="items are known by"),
    "new-items": Summary(first="HR@10 of targets"),
    "other-items": Summary(first="data, items are known by"),
    "finetune": Summary(first="model, training targets"),
}


def main(arguments: Sequence[str]) -> int:
    parser("study.tables", "The tables of study and results, written there.").parse_args(arguments)
    for page in PAGES:
        write_atomic(page, filled(page.read_text(encoding="utf-8")).encode())
    return 0


def filled(page: str, reports: Path = REPORTS) -> str:
    """The page with every table made anew."""

    def made(place: re.Match[str]) -> str:
        name = place[2]
        if name in SUMMARIES:
            return f"{place[1]}{summary(reports, name)}\n{place[3]}"
        if name not in COMPUTED:
            raise UserError(f"unknown table {name!r}; {did_you_mean(name, [*COMPUTED, *SUMMARIES])}")
        return f"{place[1]}{COMPUTED[name](reports)}\n{place[3]}"

    return PLACE.sub(made, page)


def gains(reports: Path) -> str:
    """`bft` over `matched+recency`, model by model and data set by data set."""
    found = comparisons(read(reports / "runs.csv"))
    leads = [_lead(arms, "bft", DECAY, NDCG) for arms in found.values()]
    adjusted = holm([lead.p_t for lead in leads])
    rows = [
        [
            *_named(key),
            str(lead.num_seeds),
            *_means(lead),
            percent_and_interval(lead),
            p_text(lead.p_t),
            p_text(p),
            _bold(_lead(arms, "bft", DECAY, VALIDATION)),
        ]
        for (key, arms), lead, p in zip(found.items(), leads, adjusted, strict=True)
    ]
    head = ["model", "data", "seeds", f"`{DECAY}`", "`bft`", "difference (95 % interval)", "p", "Holm p"]
    return markdown_table([*head, "on validation, %"], rows)


def strongest(reports: Path) -> str:
    """The best baseline of every model and data set with seen items masked, beside the best public figure."""
    table = read(reports / "strongest.csv")
    table["read"] = [json.loads(settings).get("backbone.max_length", 50) for settings in table["settings"]]
    rows = []
    for (model, data, length), lines in table.groupby(["model", "dataset", "read"]):
        check_alike(lines, f"{data} ({model})")
        own = [_with_spread(lines[f"{metric} seen masked"]) for metric in ("hr@10", "ndcg@10")]
        rows.append([NAMES[model], NAMES[data], str(length), str(len(lines)), *own, *_best_public(model, data)])
    return markdown_table(["model", "data", "events read", "seeds", "HR@10", "NDCG@10", "best public", "whose"], rows)


def against(reports: Path, file: str, metric: str = NDCG, baseline: str = DECAY) -> str:
    """Every arm of a file, model by model and data set by data set, and what it differs by from a baseline.

    Of one pair of runs there is the difference alone.
    """
    lines: list[tuple[list[str], SeedComparison | None, str]] = []
    for (model, data), own in read(reports / file).groupby(["model", "dataset"], sort=False):
        check_alike(own, f"{data} ({model})")
        arms = arms_of(own, told=[by_noise.DECAY])[1]
        for name, runs in arms.items():
            pairs = [] if name == baseline else sorted(set(runs.index) & set(arms[baseline].index))
            lead = _lead(arms, name, baseline, metric) if len(pairs) > 1 else None
            chosen = "" if lead is None else _bold(_lead(arms, name, baseline, VALIDATION))
            # Without what a section has, and what the page says of all filters.
            short = re.sub(r"(controllers\.\w+)=\{[^}]*\}|backbone\.absolute_positions=false,", r"\1", name)
            shown = [*_named((model, data)), f"`{short}`", str(len(runs)), _with_spread(runs[metric])]
            if len(pairs) == 1:
                seed = pairs[0]
                test, chosen = (
                    f"{100 * (runs[one][seed] / arms[baseline][one][seed] - 1):+.1f}" for one in (metric, VALIDATION)
                )
                shown.append(f"{test} %")
            lines.append((shown, lead, chosen))
    adjusted = iter(holm([lead.p_t for _, lead, _ in lines if lead is not None]))
    rows = [
        [*shown, *[""] * (8 - len(shown)), chosen]
        if lead is None
        else [*shown, percent_and_interval(lead), p_text(lead.p_t), p_text(next(adjusted)), chosen]
        for shown, lead, chosen in lines
    ]
    head = ["model", "data", "arm", "seeds", "NDCG@10", "difference (95 % interval)", "p", "Holm p"]
    return markdown_table([*head, "on validation, %"], rows)


def steps(reports: Path) -> str:
    """What each step from `published` to `bft` brings, in percent, bold where p < .05, and what the paper reports."""
    parts = [("layer", "matched", "published"), ("recency decay", DECAY, "matched"), ("precision", "bft", DECAY)]
    columns = [(part, items) for part in parts for items in ITEMS]
    columns.remove((parts[-1], "all items"))  # which ``gains`` has
    rows = []
    for key, arms in comparisons(read(reports / "runs.csv")).items():
        leads = [_lead(arms, arm, base, f"ndcg@10 {items}") for (_, arm, base), items in columns]
        rows.append([*_named(key), *map(_bold, leads), f"{_papers_gain(*key):+.1f}"])
    return markdown_table(["model", "data", *(f"{part[0]}, {items}" for part, items in columns), "paper's gain"], rows)


def checks(reports: Path) -> str:
    """The two gains looked at again: other seeds, events, losses, data."""
    rows = []
    for one in CHECKS:
        test = _pooled(reports, one, NDCG)
        rows.append([NAMES[one.model], one.text, str(test.num_seeds), percent_and_interval(test), p_text(test.p_t)])
    return markdown_table(["model", "what changes", "pairs", "difference (95 % interval)", "p"], rows)


def summary(reports: Path, name: str) -> str:
    """A table of ``summaries.csv``: its rows and columns in the order of the file."""
    lines, shape = pd.read_csv(reports / "summaries.csv", dtype=str, keep_default_na=False), SUMMARIES[name]
    kept = {} if shape.with_spread else {"spread": ""}
    own = {
        (line["row"], line["column"]): _cell({**line, **kept})
        for line in lines[lines["table"] == name].to_dict("records")
    }
    beside = lines[lines["table"] == shape.beside].to_dict("records")
    for line in beside:
        own[line["row"], line["column"]] += f" ({line['value']})"
    rows = list(dict.fromkeys(row for row, _ in own))[: shape.num_rows]
    columns = shape.columns or list(dict.fromkeys(column for _, column in own))
    cells = [[row, *(own.get((row, column), "") for column in columns)] for row in rows]
    return markdown_table([shape.first, *columns], cells)


def noise(reports: Path, kind: str) -> str:
    """What arms differ by from `matched+recency`, by data and level of noise."""
    return by_noise.table(read(reports / "noise.csv"), kind)


def language(reports: Path, name: str) -> str:
    """Perplexity of a table of ``benchmarks.language.perplexity``."""
    lines = perplexity.read(reports / "language.csv")
    own = lines[lines["table"] == name]
    return "" if own.empty else markdown_table(*perplexity.summary(own))


COMPUTED: Mapping[str, Callable[[Path], str]] = {
    "gains": gains,
    "strongest": strongest,
    "every-event": partial(against, file="every_event.csv", metric="ndcg@10 seen masked"),
    "paper": partial(against, file="paper.csv"),
    "steered": partial(against, file="steered.csv"),
    "sensitivity": partial(against, file="sensitivity.csv", metric="ndcg@10 seen masked", baseline="bft"),
    "off-cap": partial(against, file="off_cap.csv", metric="ndcg@10 seen masked", baseline="bft"),
    "filters": partial(against, file="filters.csv", metric="ndcg@10 seen masked", baseline=FILTER),
    "steps": steps,
    "checks": checks,
    **{f"language-{name}": partial(language, name=name) for name in perplexity.TABLES},
    "read-out": lambda reports: read_out.table(read(reports / "read_out.csv", read_out.COLUMNS)),
    **{f"noise-{kind}": partial(noise, kind=kind) for kind in ("targets", "distractors", "reliability")},
}


def _pooled(reports: Path, one: Pairs, metric: str) -> SeedComparison:
    """The comparison over all data sets of a line, each relative to its baseline's mean."""
    table, scaled = read(reports / one.file), ({}, {})
    for data in one.data:
        lines = table[(table["dataset"] == data) & (table["model"] == one.model)]
        check_alike(lines, f"{data} ({one.model})")
        arms = arms_of(lines)[1]
        names = [f"{name}[{one.settings}]" if one.settings else name for name in (DECAY, "bft")]
        own = [arms[name][metric] for name in names]
        seeds = sorted(set(own[0].index) & set(own[1].index) & set(one.seeds))
        mean = own[0][seeds].mean()
        for values, into in zip(own, scaled, strict=True):
            into.update({(data, seed): values[seed] / mean for seed in seeds})
    return difference(scaled[1], scaled[0])


def _lead(arms: Arms, arm: str, baseline: str, metric: str) -> SeedComparison:
    return difference(arms[arm][metric].to_dict(), arms[baseline][metric].to_dict())


def _published(model: str, data: str) -> list[dict[str, Any]]:
    figures = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))["figures"]
    return [one for one in figures if (one["model"], one["dataset"]) == (model, data)]


def _best_public(model: str, data: str) -> list[str]:
    """HR@10 / NDCG@10 of the highest published figure with seen items masked, and its name."""
    own = [one for one in _published(model, data) if one["items"] == "seen masked"]
    if not own:
        return ["", ""]
    best = max(own, key=lambda one: one["values"][1])
    return ["{:.4f} / {:.4f}".format(*best["values"]), best["name"]]


def _papers_gain(model: str, data: str) -> float:
    """What precision adds to NDCG@10, all items, in the paper, in percent."""
    own = [one for one in _published(model, data) if one["source"] == "long"]
    theirs = {one["name"]: one["values"][1] for one in own}
    after = theirs.pop("paper's BFT")
    before = list(theirs.values())[-1]  # of HSTU the layer with a feed-forward network, as `matched` has one
    return float(100 * (after / before - 1))


def _named(key: tuple[str, str]) -> list[str]:
    return [NAMES[part] for part in key]


def _with_spread(values: pd.Series) -> str:
    return f"{values.mean():.4f}" + (f" ± {values.std():.4f}" if len(values) > 1 else "")


def _means(lead: SeedComparison) -> list[str]:
    return [f"{lead.mean_baseline:.4f} ± {lead.sd_baseline:.4f}", f"{lead.mean_other:.4f} ± {lead.sd_other:.4f}"]


def _bold(lead: SeedComparison) -> str:
    """A difference in percent, bold where p < .05."""
    told = percent(lead).removesuffix(" %")
    return f"**{told}**" if lead.p_t < 0.05 else told


def _cell(line: Mapping[str, str]) -> str:
    """Value and spread, then the difference and its p where there is one."""
    value = " ± ".join(part for part in (line["value"], line["spread"]) if part)
    if not line["relative %"]:
        return value
    told = ", ".join(f"{what} {line[name]}" for what, name in (("p", "p"), ("Holm", "holm")) if line[name])
    lead = f"{line['relative %']} %" + (f", {told}" if told else "")
    if line["remark"]:
        return line["remark"]
    return f"{value} ({lead})" if value else lead


if __name__ == "__main__":
    finish(main)
