"""What the commands of this folder share: common options, lists on the command line, and how a command ends.

Exit codes are those of ``recbft``: 0 done, 1 a failed run or check, 2 bad usage or bad data.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from recbft.errors import RunError, UserError

# Options whose values are places on one machine, and the word that a recorded command has instead.
_PLACES = {"--data-root": "DIR", "--out": "OUT", "--json": "FILE"}


def parser(name: str, description: str, *, dataset: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options that say what is trained; without a default ``dataset`` one must be named."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--dataset", default=dataset, required=dataset is None, help="a data set's name, or a file")
    made.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    made.add_argument("--model", default="sasrec")
    made.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    return made


def recorded(name: str, arguments: Sequence[str]) -> str:
    """The command as it is written beside results: without the places it had on this machine."""
    words: list[str] = []
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if words and words[-1] in _PLACES:
            words.append(_PLACES[words[-1]])
        elif equals and option in _PLACES:
            words += [option, _PLACES[option]]
        else:
            words.append(argument)
    return f"python -m benchmarks.{name} {shlex.join(words)}".rstrip()


def parse_seeds(text: str) -> list[int]:
    """Seeds from ranges and numbers.

    >>> parse_seeds("0-3,7")
    [0, 1, 2, 3, 7]
    """
    seeds: list[int] = []
    for part in split_list(text):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise UserError(f"--seeds has {part!r}; give numbers and ranges, such as 0-9 or 0,1,5-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f"--seeds has the empty range {part!r}; give the smaller number first")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r} names a seed twice; give each once")
    return seeds


def split_list(text: str) -> list[str]:
    """Parts of a list at the commas outside brackets.

    >>> split_list("matched, bft[lam_max=10,ks=[5,10]]")
    ['matched', 'bft[lam_max=10,ks=[5,10]]']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def finish(main: Callable[[Sequence[str]], int]) -> None:
    """Run a command on the program's arguments and leave with its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that workers end too
    try:
        code = main(sys.argv[1:])
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = 1
    sys.exit(code)


def check_folder_of(file: str | Path | None) -> None:
    """Refuse a file that could not be written, before the work whose results it shall hold."""
    if file is not None and not Path(file).parent.is_dir():
        raise UserError(f"--json {file}: folder {Path(file).parent} does not exist; create it or name another")
