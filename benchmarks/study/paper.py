"""The paper's own configuration, run to its end: `configs/paper/*.yaml` for each backbone, in all arms.

    python -m benchmarks.study.paper --out OUT --data-root DIR
    python -m benchmarks.study.paper --out OUT --data-root DIR --datasets amazon-beauty,ml-1m --seeds 0-4

Every event is learned from its prefix, recency decay is in `bft` alone as the paper has it (`matched+recency` is beside
it), and precision starts as `hybrid`. Each model and data set gets a folder of a comparison, and the same call goes on
with what is there.

Source: Precision Tracked Transformer (arXiv 2605.18832), section 5.1 and appendix L.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import finish
from benchmarks.study.grid import comparisons, grid_parser

ARMS = "published,matched,matched+recency,bft[core.initial=hybrid]"
CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
MODELS = "sasrec,bert4rec,hstu"


def main(arguments: Sequence[str]) -> int:
    options = grid_parser(
        "study.paper", "The paper's configuration.", models=MODELS, arms=ARMS, seeds="0-19"
    ).parse_args(arguments)
    for one in comparisons(options, lambda model: {"baseline": "matched", "config": CONFIGS / f"{model}.yaml"}):
        print(f"{one.model}, {one.dataset}\n\n{one.found}\n", flush=True)
    return 0


if __name__ == "__main__":
    finish(main)
