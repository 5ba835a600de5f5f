"""Lists as they are written on a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recbft.errors import UserError
from recbft.evaluation.metrics import check_metric

_MOST_SEEDS = 10_000


def parse_seeds(text: str) -> list[int]:
    """Seeds from ranges and numbers.

    >>> parse_seeds("0-3,7")
    [0, 1, 2, 3, 7]
    """
    seeds: list[int] = []
    for part in split_list(text):
        match = re.fullmatch(r"(\d{1,20})(?:-(\d{1,20}))?", part)
        if match is None:
            raise UserError(f"--seeds has {part!r}; give numbers and ranges, such as 0-9 or 0,1,5-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"--seeds has the empty range {part!r}; give the smaller number first")
        if len(seeds) + last - first >= _MOST_SEEDS:
            raise UserError(f"--seeds {text!r} names more than {_MOST_SEEDS:,} seeds; give fewer")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} names a seed twice; give each once")
    return seeds


def seeds_text(seeds: list[int] | tuple[int, ...]) -> str:
    """The shortest text that ``parse_seeds`` reads as these seeds, in ascending order.

    >>> seeds_text([0, 1, 2, 3, 7, 9, 10])
    '0-3,7,9,10'
    """
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def parse_metrics(text: str) -> tuple[str, ...]:
    """Metrics of a comma-separated list, each once: a test counts once in its family.

    >>> parse_metrics("ndcg@10,hr@5,ndcg@10")
    ('ndcg@10', 'hr@5')
    """
    names = tuple(dict.fromkeys(split_list(text)))
    for name in names:
        check_metric(name)
    return names


def split_list(text: str) -> list[str]:
    """Parts of a list at the commas outside brackets and braces.

    >>> split_list("matched, bft[lam_max=10,ks=[5,10]], bft[ema={a: 1, b: 2}]")
    ['matched', 'bft[lam_max=10,ks=[5,10]]', 'bft[ema={a: 1, b: 2}]']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def each_once(text: str) -> list[str]:
    """The names of a comma-separated list, each once.

    >>> each_once("md, csv,,md")
    ['md', 'csv']
    """
    return [name for name in dict.fromkeys(split_list(text)) if name]


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "trial"), counted(1200, "trial")
    ('1 trial', '1,200 trials')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence; at least one.

    >>> listed(["bft"]), listed(["Q0", "Q1", "Q3"])
    ('bft', 'Q0, Q1 and Q3')
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
