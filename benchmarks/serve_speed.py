"""Time what a service waits for: opening a run, and answers to one user and to many.

    python -m benchmarks.serve_speed RUN [RUN ..] --data-root DIR --threads 1 --json FILE

Histories are those of the run's own data without the two held-out events, in an order drawn from a fixed seed. Runs
take turns, call by call, so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from recbft import Recommender
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "serve_speed"
K = 20


class Served(NamedTuple):
    """A recommender and whom it is asked for."""

    recommender: Recommender
    histories: list[list[Any]]


def opened(run: Path, data_root: str | None) -> tuple[Served, dict[str, Any]]:
    """A run that has answered once, with the seconds it took to open."""
    began = time.perf_counter()
    recommender = Recommender.load(run, data_root=data_root)
    loaded = time.perf_counter()
    histories = histories_of(recommender)
    recommender.recommend(histories[:1], 1)
    return Served(recommender, histories), {"run": run.name, "load_s": loaded - began}


def histories_of(recommender: Recommender) -> list[list[Any]]:
    """Each user's events but the last two, raw ids, in an order of its own."""
    data = recommender.aligned()
    order = np.random.default_rng(0).permutation(data.num_users)
    bounds = data.offsets
    return [data.decode(data.items[bounds[u] : bounds[u + 1] - 2]).tolist() for u in order]


def measure(served: Sequence[Served], users: int, calls: int, *, lists: bool) -> list[list[float]]:
    """Seconds of each call, by run, for plain lists or frames; every call asks for other users, as far as there are."""
    found: list[list[float]] = [[] for _ in served]
    for call in range(-2, calls):  # two rounds to warm up
        for (recommender, histories), seconds in zip(served, found, strict=True):
            first = call * users % max(1, len(histories) - users)
            batch = histories[first : first + users]
            ask = recommender.recommend_lists if lists else recommender.recommend
            began = time.perf_counter()
            ask(batch, K)
            if call >= 0:
                seconds.append(time.perf_counter() - began)
    return found


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), flush=True)
    served, results = zip(*(opened(Path(run), options.data_root) for run in options.runs), strict=True)
    for users in options.users:
        for result, seconds in zip(results, measure(served, users, options.calls, lists=options.lists), strict=True):
            middle, worst = np.quantile(seconds, [0.5, 0.99])
            result[f"users_{users}"] = {"median_ms": 1e3 * middle, "p99_ms": 1e3 * worst, "calls": len(seconds)}
    head = ["run", "load, ms", *(f"{users} user{'s' * (users > 1)}, ms (99 %)" for users in options.users)]
    print(text_table(head, [_row(result, options.users) for result in results]))
    if options.json:
        write_json(Path(options.json), machine.close(made) | {"threads": options.threads, "runs": list(results)})
    return 0


def _row(result: dict[str, Any], sizes: Sequence[int]) -> list[str]:
    cells = [result[f"users_{users}"] for users in sizes]
    return [
        result["run"],
        f"{1e3 * result['load_s']:.0f}",
        *(f"{cell['median_ms']:.1f} ({cell['p99_ms']:.1f})" for cell in cells),
    ]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, (__doc__ or "").split("\n")[0])
    options.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    options.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    options.add_argument("--users", type=count, nargs="+", default=[1, 10, 1000], metavar="N", help="asked for at once")
    options.add_argument("--calls", type=count, default=50, help="of each size and run")
    options.add_argument("--lists", action="store_true", help="ask for plain lists, as a service does")
    options.add_argument("--threads", type=count, default=1)
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
