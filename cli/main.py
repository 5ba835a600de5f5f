"""The command line: its commands, and how each of them ends.

Exit code 0: done. 2: the user can mend it (wrong usage, wrong data). 1: a run that failed. Errors are one line on
stderr; ``--debug`` shows the traceback as well. Nothing heavy is imported before a command needs it, so that help comes
at once.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from recbft.errors import OneProcessError, RunError, UserError, permission_denied, shortened, visible
from recbft.system.memory import keep_freed_memory
from recbft.system.torchrun import this_process
from recbft_cli import compare, data, evaluate, export, join, probe, recommend, report, serve, sweep, train, tune

_ORDER = "train join evaluate recommend serve export compare report stratify probe sweep tune data models"


class _InOrder(TyperGroup):
    """Commands in the order in which a user meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return _ORDER.split()


app = typer.Typer(
    name="recbft",
    cls=_InOrder,
    help="Sequential recommendation with models that carry uncertainty.",
    epilog="Start with: recbft train -m sasrec -d ml-100k",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("join", epilog=join.EXAMPLES)(join.join)
app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("recommend", epilog=recommend.EXAMPLES)(recommend.recommend)
app.command("serve", epilog=serve.EXAMPLES)(serve.serve)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("compare", epilog=compare.EXAMPLES)(compare.compare)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("stratify", epilog=report.EXAMPLES_BY_STRATA)(report.stratify)
app.command("probe", epilog=probe.EXAMPLES)(probe.probe)
app.command("sweep", epilog=sweep.EXAMPLES)(sweep.sweep)
app.command("tune", epilog=tune.EXAMPLES)(tune.tune)
app.add_typer(data.app, name="data")
app.command("models", epilog=train.EXAMPLE_OF_MODELS)(train.models)


def _print_version(wanted: bool) -> None:
    if wanted:
        from recbft.system import recbft_version

        typer.echo(f"recbft {recbft_version()}")
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # taken anywhere on the line, before or after the command
    given = [_from_home(argument) for argument in given if argument != "--debug"]
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that the terminal cannot show must not end a command
        sys.stdout.reconfigure(errors="backslashreplace")
    keep_freed_memory()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # Commands that record themselves beside their results find the words they were given in the context.
            code = app(given, prog_name="recbft", standalone_mode=False, obj=tuple(given))
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        message, code = _ending(error)
        if message and not _is_told_elsewhere(error):
            print(f"error: {visible(message)}", file=sys.stderr)
        return code
    if code == 130:  # typer's answer to Ctrl-C
        if not _is_told_elsewhere(KeyboardInterrupt()):
            print("error: interrupted", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0


def _from_home(argument: str) -> str:
    """A path that begins with ``~/``, where no shell has put the home folder in its place, as behind ``--out=``."""
    match = re.match(r"(--[\w-]+=)?(~/.*)", argument, re.DOTALL)
    return argument if match is None else (match[1] or "") + os.path.expanduser(match[2])


def _replace_closed_streams() -> None:
    """Let a standard stream that the shell closed (``2>&-``) lead nowhere.

    Python has None in its place, and its number would fall to the next file that is opened: whatever writes to number 2
    by itself, as native libraries do, would write into a checkpoint.
    """
    # In the order of their numbers, since a file that is opened takes the lowest that is free.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open as long as the process


def _ending(error: BaseException) -> tuple[str, int]:
    """The line and the exit code for an exception."""
    if isinstance(error, UserError):
        return _one_line(error), 2
    if isinstance(error, RunError):
        return _one_line(error), 1
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", 1
    if hasattr(error, "format_message"):  # wrong usage, found by typer: its classes moved between versions
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return "", 2
        return f"{_sentence(error.format_message())}{_help_hint(error)}", 2
    if isinstance(error, BrokenPipeError):
        # The reader has gone; keep Python from complaining again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "", 1
    if isinstance(error, PermissionError) and error.filename:
        return permission_denied(error), 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or _one_line(error)}", 1
    if _is_shortage(error):
        return "out of memory; lower training.batch_size or evaluation.memory_mb", 1
    return f"{type(error).__name__}: {_one_line(error)} (a defect of recbft; add --debug to see where)", 1


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether the first of several processes says it: most of what ends a run all of them meet alike."""
    if isinstance(error, OneProcessError) or not isinstance(error, (UserError, RunError, KeyboardInterrupt)):
        return False
    try:
        return this_process().local_rank > 0
    except UserError:
        return False


def _is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, where no run has said so with more detail."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    from recbft.system.memory import is_shortage

    return is_shortage(error)


def _show_warning(message: Warning | str, *_where: object, **_how: object) -> None:
    print(f"warning: {visible(shortened(' '.join(str(message).split())))}", file=sys.stderr)


def _sentence(message: str) -> str:
    message = " ".join(message.split()).rstrip(".").replace(". Did you", "; did you")
    return message[:1].lower() + message[1:]


def _help_hint(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    return f"; see {context.command_path} --help" if context is not None else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
