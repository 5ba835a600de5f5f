"""What the commands of this folder share: common options, and how a command ends.

Exit codes are those of ``recbft``: 0 done, 1 a failed run or check, 2 bad usage or bad data.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from recbft.comparing import provenance
from recbft.errors import RunError, UserError
from recbft.experiments.lists import split_list


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of ``python -m benchmarks.NAME``."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)


def training_parser(name: str, description: str, *, dataset: str | None = None) -> argparse.ArgumentParser:
    """One with the options that say what is trained; without a default ``dataset`` one must be named."""
    made = parser(name, description)
    made.add_argument("--dataset", default=dataset, required=dataset is None, help="a data set's name, or a file")
    made.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    made.add_argument("--model", default="sasrec")
    made.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    return made


def parse(options: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options given, ``--json`` among them: a file that could be written once the work is done."""
    options.add_argument("--json", metavar="FILE", help="write the results here")
    given = options.parse_args(arguments)
    if given.json is not None and not Path(given.json).parent.is_dir():
        raise UserError(
            f"--json {given.json}: folder {Path(given.json).parent} does not exist; create it or name another"
        )
    return given


def recorded(name: str, arguments: Sequence[str]) -> str:
    """The command as it is written beside results: without the places it had on this machine."""
    return provenance.recorded(f"python -m benchmarks.{name}", arguments)


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


def count(text: str) -> int:
    """The number of an option that says how many, as argparse takes it."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"is {text}; give a whole number of at least 1")
    return int(text)


def parse_shares(text: str, *, or_none: bool = False) -> list[float]:
    """The numbers of ``--shares``, below 1 and above 0, or with ``or_none`` at least 0."""
    try:
        shares = [float(part) for part in split_list(text)]
    except ValueError:
        shares = [float("nan")]
    if not all(0 < share < 1 or (or_none and share == 0) for share in shares):
        usual = "of at least 0 and below 1, such as 0,0.3,0.6" if or_none else "between 0 and 1, such as 0.05,0.2,0.4"
        raise UserError(f"--shares is {text!r}; give shares {usual}")
    return shares
