"""Perplexity of text, one table of models per command.

python -m benchmarks.language.perplexity --table boosting --data-root DIR --csv FILE
python -m benchmarks.language.perplexity --table length --size full --data-root DIR --csv FILE      for a GPU

    boosting   standard, wider, twicing, gradient-boosted attention of 1 to 4 rounds
    length     positional schemes, robust filter attention and its ablations, at 1, 2, 4 and 8 times the trained length
    damping    sc_rfa by its damping b
    families   the memories: Bayesian layer, delta rules, additive rules
    fuzzy      the fuzzy prior of regimes, with interval memberships, without its gates, and with Guardian, selective
               averaging of weights, and experts; all arms hold a tenth of the training text out, for those that steer
    noise      precision, recency decay alone and focal loss, with 0 to 40 % of the training targets replaced

Models are made of recbft's blocks (``benchmarks.language.model``). A line of the file is a model, a seed and a length;
lines are added, and a model that is there already is not trained again. Perplexity is per token; bits per byte can be
compared between vocabularies. Published figures are of larger models on WikiText-103: ratios within a table can be set
beside ours, levels cannot.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import machine
from benchmarks.command import count, finish, parser, recorded
from benchmarks.language.model import SIZES, Arm, asked_for, inside, perplexities, train
from benchmarks.language.text import SOURCES
from benchmarks.study.choose import difference, percent_and_interval
from recbft.errors import UserError, did_you_mean
from recbft.experiments.lists import parse_seeds, split_list
from recbft.mixers.memory_family import DESIGN_MODELS
from recbft.reporting.tables import text_table
from recbft.system.files import write_atomic
from recbft.training.controllers import VALIDATION_LOSS

NAME = "language.perplexity"
# Width at which standard attention has the parameters of two rounds (288 for 256 in the paper).
WIDER = 1.125
# Loss of the paper's zone, in nats per token: its vocabulary has 50,257, and a smaller one reaches the zone earlier.
ZONE = 5.9
GUARDIAN = {"guardian": {"zone": ZONE}}
AVERAGED = {"swa": {"value": VALIDATION_LOSS, "zone": ZONE}}
EXPERTS = {"experts": 4}
SHARES = (0.0, 0.1, 0.2, 0.4)


def _without(**mixing: Any) -> Arm:
    return Arm(mixer="sc_rfa", mixing=mixing, positions=False)


TABLES: dict[str, dict[str, Arm]] = {
    "boosting": {
        "standard": Arm(),
        "wider": Arm(wider=WIDER),
        "twicing": Arm(mixer="twicing"),
        **{f"boosted {rounds}": Arm(mixer="boosted", mixing={"rounds": rounds}) for rounds in (1, 2, 3, 4)},
    },
    "length": {
        **{name: Arm(mixer=name, positions=False) for name in ("rope", "alibi", "decayed_rope", "sc_rope")},
        **{name: Arm(mixer=name, positions=False) for name in ("rfa", "sc_rfa")},
        "gaussian": _without(kernel="gaussian"),
        "flat prior": _without(precision_prior="flat"),
        "no multiplicative": _without(multiplicative="off"),
        "no value rotation": _without(rotate_values="off"),
        "no rotation": _without(rotate="off"),
        "no damping or prior": _without(undamped_heads=4, precision_prior="flat"),
    },
    "damping": {f"b {b:g}": _without(damping=b) for b in (5e-4, 5e-3, 5e-2, 5e-1, 5.0)},
    "families": {
        "standard": Arm(),
        "no positions": Arm(positions=False),
        **{name: Arm(mixer=name, positions=False) for name in ("bayesian", *DESIGN_MODELS)},
    },
    "fuzzy": {
        name: replace(arm, held_out=0.1)
        for name, arm in {
            "standard": Arm(),
            "regime": Arm(mixer="regime"),
            "regime type 2": Arm(mixer="regime", mixing={"type2": True}),
            "regime without gates": Arm(mixer="regime", mixing={"residual_gate": False, "value_gate": False}),
            "regime with guardian": Arm(mixer="regime", controllers=GUARDIAN),
            "regime averaged": Arm(mixer="regime", controllers=AVERAGED),
            "regime with experts": Arm(mixer="regime", moe=EXPERTS),
            "regime with all": Arm(mixer="regime", controllers=GUARDIAN | AVERAGED, moe=EXPERTS),
        }.items()
    },
    "noise": {
        f"{name} {share:.0%}": replace(arm, replaced=share)
        for share in SHARES
        for name, arm in {
            "matched+recency": Arm(recency=True),
            "bft": Arm(recency=True, precision=True),
            "focal": Arm(recency=True, focal=True),
        }.items()
    },
}
# Perplexity in the papers, at 1, 2, 4 and 8 times the trained length where they have it: WikiText-103, larger models.
PUBLISHED: dict[str, dict[str, Sequence[float]]] = {
    "boosting": {"standard": [72.2], "wider": [69.0], "twicing": [69.6], "boosted 2": [67.9]},
    "length": {
        "rope": [28.48, 30.94, 44.21, 72.69],
        "alibi": [28.59, 27.30, 26.54, 26.30],
        "decayed_rope": [28.52, 29.42, 34.68, 44.00],
        "sc_rope": [28.36, 29.02, 34.99, 44.17],
        "rfa": [28.01, 27.58, 29.99, 38.46],
        "sc_rfa": [27.54, 26.73, 29.46, 37.19],
        "gaussian": [27.98, 27.16, 28.95, 33.51],
        "flat prior": [27.69, 28.71, 38.11, 62.83],
        "no multiplicative": [27.65, 29.01, 39.18, 57.30],
        "no value rotation": [30.24, 92.08, 187.29, 463.29],
        "no rotation": [28.58, 27.25, 26.61, 26.83],
        "no damping or prior": [27.97, 35.59, 69.39, 131.29],
    },
    "damping": {
        "b 0.0005": [27.60, 28.88, 37.34, 51.48],
        "b 0.005": [27.60, 28.71, 35.35, 43.90],
        "b 0.05": [27.54, 26.73, 29.46, 37.19],
        "b 0.5": [27.61, 26.38, 26.37, 29.72],
        "b 5": [27.91, 26.68, 26.37, 28.16],
    },
}
KEY = ["table", "arm", "data", "size", "seed", "length"]
COLUMNS = [
    *KEY,
    "perplexity",
    "bits_per_byte",
    "train_loss",
    "parameters",
    "gates",
    "entropies",
    "seconds",
    "settings",
    "data_hash",
    "device",
    "date",
    "recbft",
    "commit",
    "torch",
    "command",
]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    arms = TABLES[options.table]
    wanted = split_list(options.arms) if options.arms else list(arms)
    for name in wanted:
        if name not in arms:
            raise UserError(f"table {options.table} has no arm {name!r}; {did_you_mean(name, arms)}")
    size, corpus, device = asked_for(options)
    made = machine.header(recorded(NAME, arguments), device=device)
    print("\n".join(machine.lines(made)))
    print(
        f"{corpus.name}: {len(corpus.train):,} tokens train, {len(corpus.test):,} test, "
        f"vocabulary {corpus.vocabulary:,}, tokens {corpus.hash[:12]}\n"
    )
    file = None if options.csv is None else Path(options.csv)
    lines = [] if file is None or not file.exists() else read(file).to_dict("records")
    for seed in parse_seeds(options.seeds):
        for name in wanted:
            known = dict(zip(KEY, (options.table, name, corpus.name, options.size, seed), strict=False))
            settings = json.dumps({"size": asdict(size), "arm": asdict(arms[name])}, sort_keys=True)
            if there := [line for line in lines if all(line[key] == value for key, value in known.items())]:
                _check(there[0], {"data_hash": corpus.hash[:12], "settings": settings}, file)
                print(f"{name}, seed {seed}: in {file} already")
                continue
            began = time.perf_counter()
            model, loss = train(arms[name], size, corpus, seed, device)
            found = perplexities(model, arms[name], size, corpus, device)
            seen = inside(model, size, corpus, device)
            seconds = round(time.perf_counter() - began, 1)
            of_all = {
                **known,
                "train_loss": round(loss, 6),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                **{key: " ".join(f"{value:.4f}" for value in values) for key, values in seen.items()},
                "seconds": seconds,
                "settings": settings,
                "data_hash": corpus.hash[:12],
                **{key: made[key] for key in ("device", "date", "recbft", "commit", "torch", "command")},
            }
            for length, figures in found.items():
                lines.append({**of_all, "length": length, **{key: round(x, 6) for key, x in figures.items()}})
            print(f"{name}, seed {seed}: {_figures(found)}, {seconds:.0f} s", flush=True)
            if file is not None:
                table = pd.DataFrame(lines, columns=COLUMNS).sort_values(KEY, kind="stable")
                write_atomic(file, table.to_csv(index=False, lineterminator="\n").encode())
    table = pd.DataFrame(lines)
    kept = (table["table"] == options.table) & (table["data"] == corpus.name) & (table["size"] == options.size)
    print("\n" + text_table(*summary(table[kept & table["arm"].isin(wanted)])))
    return 0


def read(file: Path) -> pd.DataFrame:
    """The lines of a file that this command wrote."""
    table = pd.read_csv(file, dtype={"data_hash": str, "commit": str, "gates": str, "entropies": str}).fillna("")
    if list(table.columns) != COLUMNS:
        raise UserError(f"{file} has other columns than this command writes; name another file")
    return table


def summary(lines: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of one text and size: mean perplexity over seeds by arm and length, each as a share of
    the first arm's at the trained length, and the paper's, likewise. Where there are several seeds, what an arm differs
    by at the trained length, paired by seed: from the first arm, or from the first with the same noise.
    """
    (name,) = lines["table"].unique()
    published = PUBLISHED.get(name, {})
    means = lines.pivot_table(index="arm", columns="length", values="perplexity")
    lengths, seeds = list(means.columns), lines.groupby("arm")["seed"].nunique()
    arms = [arm for arm in TABLES[name] if arm in means.index]
    first = means.loc[arms[0]].iloc[0]
    by_seed = lines[lines["length"] == lengths[0]].pivot(index="seed", columns="arm", values="perplexity")
    several = len(by_seed) > 1
    rows = []
    for arm in arms:
        own = [x for length in lengths if not pd.isna(x := means.loc[arm, length])]
        theirs = published.get(arm, [])
        cells = [f"{x:.1f}" for x in own] + [""] * (len(lengths) - len(own))
        rows.append([arm, str(seeds[arm]), *cells, _shares(own, first)])
        if several:
            rows[-1].append(_lead(by_seed, arm, next(one for one in arms if _noise(one) == _noise(arm))))
        if published:
            rows[-1].append(_shares(theirs, published[arms[0]][0] if arms[0] in published else None))
    head = ["arm", "seeds", *(f"at {length}" for length in lengths), "ratio"]
    more = [*(["difference (95 % interval)"] if several else []), *(["paper's ratio"] if published else [])]
    return [*head, *more], rows


def _noise(arm: str) -> str:
    """The share of wrong targets in an arm's name."""
    return arm.split()[-1] if arm.endswith("%") else ""


def _lead(by_seed: pd.DataFrame, arm: str, baseline: str) -> str:
    if arm == baseline:
        return ""
    found = difference(by_seed[arm].dropna().to_dict(), by_seed[baseline].dropna().to_dict())
    return "" if found is None else percent_and_interval(found)


def _shares(values: Sequence[float], first: float | None) -> str:
    return "" if first is None else ", ".join(f"{value / first:.3f}" for value in values)


def _figures(found: dict[int, dict[str, float]]) -> str:
    return ", ".join(f"{figures['perplexity']:.2f} at {length}" for length, figures in found.items())


def _check(line: dict[str, Any], now: dict[str, str], file: Path | None) -> None:
    """A figure stands for one text and one setting."""
    for key, value in now.items():
        if line[key] != value:
            raise UserError(
                f"{file} has arm {line['arm']!r} with another {key}; name another file, or delete its lines"
            )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, "Perplexity of text.")
    options.add_argument("--table", choices=list(TABLES), required=True)
    options.add_argument("--size", choices=sorted(SIZES), default="small")
    options.add_argument("--data", choices=list(SOURCES), default="wikitext2")
    options.add_argument("--data-root", metavar="DIR", required=True, help="folder that text/ lies in")
    options.add_argument("--arms", help="of the table, by commas; all unless given")
    options.add_argument("--seeds", default="0")
    options.add_argument("--epochs", type=count, help="unless given, what the size has")
    options.add_argument("--csv", metavar="FILE", help="add a line per model, seed and length here")
    options.add_argument("--device", default="auto")
    given = options.parse_args(arguments)
    if given.csv is not None and not Path(given.csv).parent.is_dir():
        raise UserError(f"--csv {given.csv}: folder {Path(given.csv).parent} does not exist; create it or name another")
    return given


if __name__ == "__main__":
    finish(main)
