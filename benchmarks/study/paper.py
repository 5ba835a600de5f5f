"""The paper's own configuration, run to its end: `configs/paper/*.yaml` for each backbone, in all arms.

    python -m benchmarks.study.paper --out OUT --data-root DIR
    python -m benchmarks.study.paper --out OUT --data-root DIR --datasets amazon-beauty,ml-1m --seeds 0-4

Every event is learned from its prefix, recency decay is in `bft` alone as the paper has it (`matched+recency` is beside
it), and precision starts as `hybrid`. Each model and data set gets a folder of a comparison, and the same call goes on
with what is there.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.1 and appendix L.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import finish, parser
from recbft.api.compare import compare
from recbft.config.yaml_text import parse_setting
from recbft.experiments.lists import split_list

ARMS = "published,matched,matched+recency,bft[core.initial=hybrid]"
CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
MODELS = "sasrec,bert4rec,hstu"


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    settings = dict(parse_setting(text) for text in options.settings)
    if options.data_root is not None:
        settings["data_root"] = options.data_root
    for dataset in split_list(options.datasets):
        for model in split_list(options.models):
            found = compare(
                options.arms,
                dataset,
                out=Path(options.out) / f"{model}-{dataset}",
                model=model,
                seeds=options.seeds,
                baseline="matched",
                jobs=options.jobs,
                batch_seeds=options.batch_seeds,
                config=CONFIGS / f"{model}.yaml",
                **settings,
            )
            print(f"{model}, {dataset}\n\n{found}\n", flush=True)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser("study.paper", "The paper's configuration.")
    options.add_argument("--out", required=True, metavar="DIR")
    options.add_argument("--datasets", default="amazon-instruments", metavar="A,B,...")
    options.add_argument("--models", default=MODELS, metavar="A,B,...")
    options.add_argument("--arms", default=ARMS)
    options.add_argument("--seeds", default="0-19")
    options.add_argument("--jobs", type=int, metavar="N", help="runs trained at a time")
    options.add_argument("--batch-seeds", type=int, default=1, metavar="N", help="seeds trained together")
    options.add_argument("--data-root", metavar="DIR")
    options.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    return options.parse_args(arguments)


if __name__ == "__main__":
    finish(main)
