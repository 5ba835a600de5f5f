"""Write an event log of production size, for the figures of docs/performance.md, section "Memory and large logs".

    python -m benchmarks.large_log --out DIR [--users 1000000 --events 22000000 --items 200000] [--texts] [--csv]

Items by Zipf's law (exponent 0.9), history lengths log-normal between 5 and 3,000, times in seconds over three years,
rows in order of time; items and times are independent of each other and of the user, so a model learns popularity
alone. (`recbft data synth` has tastes to learn, which takes users by items and is for thousands of either.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from benchmarks.command import count, finish, parser
from recbft.system.files import make_folder, write_atomic, write_parquet

NAME = "large_log"
FIRST_SECOND = 1_577_836_800  # 2020-01-01
SECONDS = 3 * 365 * 86_400


def generate(users: int, events: int, items: int, *, texts: bool = False, seed: int = 0) -> pa.Table:
    """Columns user_id, item_id (int64, or texts such as "user_00012345") and timestamp; about ``events`` rows."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(5, rng.lognormal(2.5, 1.0, users))
    lengths = np.minimum(np.maximum(5, (lengths * events / lengths.sum()).astype(np.int64)), 3000)
    user = np.repeat(np.arange(users), lengths)
    weight = np.arange(1, items + 1) ** -0.9
    share = np.cumsum(weight) / weight.sum()
    drawn = np.minimum(np.searchsorted(share, rng.random(user.size)), items - 1)
    item = rng.permutation(items)[drawn]
    time = FIRST_SECOND + rng.integers(0, SECONDS, user.size)
    order = np.argsort(time, kind="stable")
    user, item, time = user[order], item[order], time[order]
    ids = (
        (_texts(user, "user", users, 8), _texts(item, "item", items, 6)) if texts else (user * 7 + 13, item * 3 + 1000)
    )
    return pa.table({"user_id": ids[0], "item_id": ids[1], "timestamp": time})


def _texts(numbers: np.ndarray, name: str, size: int, digits: int) -> Any:
    return pa.array([f"{name}_{number:0{digits}d}" for number in range(size)]).take(pa.array(numbers))


def main(arguments: Sequence[str]) -> int:
    """Write log.parquet, and log.csv if asked for."""
    options = parser(NAME, __doc__.split("\n")[0])
    options.add_argument("--out", type=Path, required=True, metavar="DIR")
    options.add_argument("--users", type=count, default=1_000_000)
    options.add_argument("--events", type=count, default=22_000_000, help="about so many")
    options.add_argument("--items", type=count, default=200_000)
    options.add_argument("--texts", action="store_true", help="ids that are texts")
    options.add_argument("--csv", action="store_true", help="a CSV file too")
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args(arguments)
    table = generate(asked.users, asked.events, asked.items, texts=asked.texts, seed=asked.seed)
    make_folder(asked.out)
    write_parquet(asked.out / "log.parquet", table)
    if asked.csv:
        write_atomic(asked.out / "log.csv", lambda file: pyarrow.csv.write_csv(table, file))
    print(f"{len(table):,} events of {asked.users:,} users written to {asked.out}")
    return 0


if __name__ == "__main__":
    finish(main)
