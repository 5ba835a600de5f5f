"""Does a model whose scores read the precision of the state know better how sure it is, and rank as well?

    python -m benchmarks.study.read_out --out OUT --file docs/reports/read_out.csv --data-root DIR
    python -m benchmarks.study.read_out --out OUT --file FILE --datasets amazon-beauty,ml-1m --seeds 0-4 --jobs 2

Arms are trained as ``recbft compare`` trains them, every model and data set in a folder of OUT, and each finished run
gets a line in FILE: what ``benchmarks.study.ledger`` keeps, a or nu of (6.18), and of validation and test among all
items

    hr@10, nll             of the target in nats, by the probabilities as trained
    nll fitted             at the temperature and lapse rate fitted on validation
    ece@10, ece@10 fitted  claimed against true hits in lists of ten, likewise
    aurc WHICH             area under the risk-coverage curve of hit@10, surest first by the posterior precision, by the
                           entropy of the probabilities as trained, or by the largest of them

as ``recbft probe`` has them (``evaluation.uncertainty``). The same call goes on with what is there. The table has means
over seeds and, paired by seed, what an arm adds to the same arm without a read-out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.command import finish
from benchmarks.study import ledger
from benchmarks.study.choose import difference, finished_runs, relative_and_p
from benchmarks.study.grid import comparisons, grid_parser
from recbft.comparing.finished_runs import Run, read_run
from recbft.datasets import Dataset
from recbft.evaluation.paired import SeedComparison
from recbft.evaluation.uncertainty import uncertainty
from recbft.evaluation.views import Part
from recbft.reporting.tables import markdown_table, p_text
from recbft.training.bundle import load_trained
from recbft.training.run_config import load_run_config

SETTING = "core.read_out"
BASE = "bft[core.prior_variance=running]"
ARMS = f"matched+recency,bft,{BASE}," + ",".join(
    f"{BASE[:-1]},{SETTING}={kind}]" for kind in ("temperature", "shrinkage")
)
PARTS: tuple[Part, ...] = ("validation", "test")
SIGNALS = {"precision": "precision", "entropy": "negative_entropy", "top score": "top_probability"}
FIGURES = ("hr@10", "nll", "nll fitted", "ece@10", "ece@10 fitted", *(f"aurc {name}" for name in SIGNALS))
COLUMNS = [*ledger.COLUMNS, "learned", *(f"{part} {name}" for part in PARTS for name in FIGURES)]
SHOWN = ("ndcg@10", "nll", "nll fitted", "ece@10 fitted", "aurc precision", "aurc entropy")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    for one in comparisons(options):
        add(one.out, Path(options.file), options.data_root)
    print(table(ledger.read(Path(options.file), COLUMNS), options.part))
    return 0


def add(out: Path, file: Path, data_root: str | None) -> None:
    """Write a line for each finished run of a comparison that the file has not, one after another."""
    lines, dataset = ledger.opened(file, COLUMNS), None
    for path in finished_runs(out):
        run = read_run(path)
        line = ledger.line(run)
        if any(all(line[name] == row[name] for name in ledger.KEY) for row in lines.to_dict("records")):
            continue
        if dataset is None:
            dataset = load_run_config(path / "config.yaml", data_root=data_root).data.load()
        lines = ledger.extended(lines, [line | figures(run, dataset)], file)


def figures(run: Run, dataset: Dataset) -> dict[str, Any]:
    """What a line has beside that of the ledger; None where the model has no precision."""
    *_, model = load_trained(run.path)
    found: dict[str, Any] = {}
    for part in PARTS:
        judged = uncertainty(model, dataset, part, samples=1)
        found["learned"] = judged["read_out"] and judged["read_out"]["learned"]
        fit, confidences = judged["calibration"], judged["confidences"]
        own = [judged["hit_rate"], fit["nll"]["before"], fit["nll"]["after"]]
        own += [fit[when]["hit@10"]["ece"] for when in ("before", "after")]
        own += [confidences[name]["aurc"] if name in confidences else None for name in SIGNALS.values()]
        found |= {f"{part} {name}": value for name, value in zip(FIGURES, own, strict=True)}
    return {name: None if value is None else round(value, 9) for name, value in found.items()}


def table(lines: pd.DataFrame, part: str = "test") -> str:
    """A line per model, data set and arm: means, and what a read-out adds to the same arm without."""
    head = ["model", "data", "arm", "seeds", "a or nu", *SHOWN, "AURC of precision less that of entropy"]
    rows = []
    for (model, data), group in lines.groupby(["model", "dataset"]):
        ledger.check_alike(group, f"{data} ({model})")
        for name, own in ledger.arms_of(group)[1].items():
            base = without(group, own)
            learned = "" if own["learned"].isna().all() else f"{own['learned'].mean():.2f}"
            cells = [_cell(own, base, _column(part, figure)) for figure in SHOWN]
            gap = difference(*(own[f"{part} aurc {which}"].dropna().to_dict() for which in ("precision", "entropy")))
            rows.append([str(model), str(data), f"`{name}`", str(len(own)), learned, *cells, _gap(gap)])
    return markdown_table(head, rows)


def without(group: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame | None:
    """The runs of the same arm and settings without a read-out, by seed; None of an arm that has none."""
    arm, settings = own["arm"].iloc[0], json.loads(own["settings"].iloc[0])
    if SETTING not in settings:
        return None
    del settings[SETTING]
    same = (group["arm"] == arm) & (group["settings"] == json.dumps(settings, sort_keys=True))
    return group[same].set_index("seed")


def _column(part: str, figure: str) -> str:
    """Where a figure stands in the file."""
    return f"{figure} all items" if (part, figure) == ("test", "ndcg@10") else f"{part} {figure}"


def _cell(own: pd.DataFrame, base: pd.DataFrame | None, column: str) -> str:
    values: Mapping[int, float] = own[column].dropna().to_dict()
    if not values:
        return ""
    lead = None if base is None else difference(values, base[column].dropna().to_dict())
    return f"{own[column].mean():.4f}" + ("" if lead is None else f" ({relative_and_p(lead)})")


def _gap(found: SeedComparison | None) -> str:
    return "" if found is None else f"{found.difference:+.4f} (p {p_text(found.p_t)})"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = grid_parser(
        "study.read_out", "Scores that read the precision of the state.", models="sasrec", arms=ARMS, seeds="0-9"
    )
    options.add_argument("--file", required=True, metavar="CSV", help="the figures of finished runs")
    options.add_argument("--part", choices=PARTS, default="test", help="whose figures the table shows")
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
