"""``recbft recommend``: the next items for histories of raw ids, of known users or new ones."""

from __future__ import annotations

import contextlib
import csv
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from recbft.errors import UserError
from recbft.reporting.progress import SILENCE
from recbft_cli.evaluate import say_unfinished
from recbft_cli.options import Columns, Item, NewItems, Run, Separator, Session, Time, User, of_data
from recbft_cli.terminal import say

if TYPE_CHECKING:
    import pandas as pd

    from recbft.datasets.config import DataConfig
    from recbft.training.run_config import RunConfig

_PIPE = Path("-")
_TABLES = (".parquet", ".pq", ".json", ".jsonl", ".ndjson", ".inter")  # which always name their columns
_BEGINNINGS = {b"PAR1": "parquet", b"{": "jsonl"}  # of the formats that tell; anything else is CSV
EXAMPLES = "Example: recbft recommend runs/sasrec-bft-ml-100k-seed0 --histories histories.csv -k 20 --out recs.parquet"


class Fallback(str, Enum):
    """What users get who have no list else."""

    popular = "popular"


def recommend(
    run: Run,
    histories: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Events of the users, in any form that recbft reads, or - for stdin; columns user_id and item_id, or "
            "those that the run's own data were read by.",
        ),
    ],
    k: Annotated[int, typer.Option("-k", help="Items per user.")] = 10,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .parquet or .csv file; printed as CSV if left out or -.")
    ] = None,
    keep_seen: Annotated[bool, typer.Option("--keep-seen", help="Allow items of the history in the list.")] = False,
    exclude: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Items that no list may hold, one id per line; or a table with columns user_id and item_id, for the "
            "list of each user.",
        ),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The only items that lists may hold, as in --exclude; for each user too."),
    ] = None,
    cap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE=N",
            help="At most N items of a list share a value of this item feature, such as category=3. Repeat for more.",
        ),
    ] = None,
    fallback: Annotated[
        Fallback | None,
        typer.Option(
            help="Give users whom the model does not know, or who have seen everything, the items with most events in "
            "training; a column fallback marks them."
        ),
    ] = None,
    items: NewItems = None,
    user: User = None,
    item: Item = None,
    time: Time = None,
    session: Session = None,
    separator: Separator = None,
    columns: Columns = None,
) -> None:
    """Recommend items for each history; columns user, item, score, rank, precision behind the list, probability."""
    out = None if out == _PIPE else out
    if out is not None and out.suffix.lower() not in (".parquet", ".csv"):
        raise UserError(f"{out}: the ending {out.suffix!r} is not known; let the name end in .parquet or .csv")

    caps = _caps(cap)
    from recbft.api import Recommender
    from recbft.datasets.formats import source_files
    from recbft.experiments.processes import terminable
    from recbft.runs.folder import RunFolder
    from recbft.serving.histories import histories_from_file
    from recbft.serving.lists import summed
    from recbft.system.files import refuse_input

    if out is not None:
        for source in (*source_files(histories), exclude, candidates, *(items or ())):
            if source is not None:
                refuse_input(out, source)
    how = of_data({**locals(), "items": None})  # these are new ones
    with terminable():  # whatever ends it, no unfinished file is left
        recommender = Recommender.load(run, unfinished=True)
        folder = RunFolder.open(run)
        say_unfinished(folder, "asked, and its lists have no probabilities")
        if items:
            recommender = recommender.with_items([str(file) for file in items])
        with _as_file(histories) as file:
            how = _as_trained(file, recommender.config.data, how) | how
            filters = _filters(file, folder.protocol, how)
            known = _reliability(file, recommender.config, how)
            events = histories_from_file(file, **how, **filters, reliability=known)
        _say_left_out(events.attrs, **filters)
        barred, only = (_choice(file, recommender.config.data, how) for file in (exclude, candidates))
        instead: Any = None if fallback is None else fallback.value
        blocks = recommender.recommend_in_blocks(
            events, k, filter_seen=not keep_seen, exclude=barred, candidates=only, cap=caps, fallback=instead
        )
        del events  # the blocks know what they need of them
        _report(summed(_write(blocks, out)), k)


@contextlib.contextmanager
def _as_file(path: Path) -> Iterator[Path]:
    """The file itself; for ``-`` (stdin) and other pipes a copy that is gone afterwards, and that no error names."""
    if path != _PIPE and not path.is_fifo():
        yield path
        return
    from recbft.datasets.formats import BYTE_ORDER_MARK, GZIP, open_bytes, reading

    with tempfile.TemporaryDirectory(prefix="recbft-") as folder:
        copy = Path(folder) / "stdin"
        with copy.open("wb") as kept:
            if path == _PIPE:
                shutil.copyfileobj(sys.stdin.buffer, kept)
            else:
                with path.open("rb") as pipe:
                    shutil.copyfileobj(pipe, kept)
        named = copy
        try:
            with copy.open("rb") as kept:
                packed = ".gz" if kept.read(len(GZIP)) == GZIP else ""
            named = copy.rename(copy.with_suffix(packed))
            with reading(named), open_bytes(named) as kept:
                start = kept.read(8).removeprefix(BYTE_ORDER_MARK)
            ending = next((name for begin, name in _BEGINNINGS.items() if start.startswith(begin)), "csv")
            named = named.rename(copy.with_suffix(f".{ending}{packed}"))
            yield named
        except UserError as error:
            raise UserError(str(error).replace(str(named), "stdin" if path == _PIPE else str(path))) from None


def _as_trained(file: Path, own: DataConfig, how: dict[str, Any]) -> dict[str, Any]:
    """The columns that the run's own data were read by, where ``file`` has those; else none, for the usual ones.

    A file of the same ending may be written as those data were: with their separator, or without a header.
    """
    from recbft.datasets.formats import column_names, ending

    if how.keys() & {"user", "item", "session", "columns"}:
        return {}
    usual = {"user": "user_id", "item": "item_id"}
    trained = {name: getattr(own, name) or usual.get(name) for name in ("user", "item", "time", "session")}
    if own.session is not None:
        trained["user"] = own.user or own.session
    form: dict[str, Any] = {}
    there: Sequence[str] = column_names(file, how.get("separator"))
    if not all(trained[name] in there for name in usual):
        if own.session is None and all(column in there for column in usual.values()):
            return {"time": own.time} if own.time in there else {}
        if "separator" in how or ending(file) != ending(Path(str(own.dataset))):
            return {}
        form = {name: getattr(own, name) for name in ("separator", "columns") if getattr(own, name) is not None}
        there = own.columns or column_names(file, own.separator)
        if not all(trained[name] in there for name in usual):
            return {}
    found = form | {name: column for name, column in trained.items() if column in there}
    return found if own.user is not None else {name: column for name, column in found.items() if name != "session"}


def _reliability(file: Path, config: RunConfig, how: dict[str, Any]) -> str | None:
    """The column of ``file`` that holds what the run reads of how reliable events are; None where it has none."""
    from recbft.datasets.formats import column_names
    from recbft.serving.histories import RELIABILITY

    if not config.reads_reliability:
        return None
    there = how.get("columns") or column_names(file, how.get("separator"))
    return next((name for name in (config.data.reliability, RELIABILITY) if name in there), None)


def _filters(file: Path, protocol: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Which events of ``file`` the run's own data would have kept: its row filter, where the columns are there."""
    from recbft.datasets.formats import column_names
    from recbft.datasets.prepare import Preparation

    own = protocol.get("preparation", {}).get("filters", {})
    asked = {name: own[name] for name in ("where", "deduplicate") if own.get(name) is not None}
    if "where" in asked:
        there = how.get("columns") or column_names(file, how.get("separator"))
        if not set(Preparation(where=asked["where"]).columns()) <= set(there):
            del asked["where"]
    return asked


def _say_left_out(attrs: dict[Any, Any], where: str | None = None, deduplicate: str | None = None) -> None:
    if filtered := attrs["filtered_out"]:
        say(f"left out, as in training, events without {where}: {filtered:,}", err=True)
    if repeated := attrs["repeated"]:
        say(f"left out, as in training, repeated events (all but the {deduplicate}): {repeated:,}", err=True)


def _report(attrs: dict[Any, Any], k: int) -> None:
    """Say on stderr what the lists do not show."""
    if unknown := attrs["unknown_events"]:
        say(f"skipped events with items that the model does not know: {unknown:,}", err=True)
    if users := attrs["skipped_users"]:
        say(f"skipped users without a known item: {len(users):,}, such as {users[0]}", err=True)
    if popular := attrs.get("fallback_lists"):
        say(f"users who get popular items, unknown or with nothing left: {popular:,}", err=True)
    if short := attrs["short_lists"]:
        fewest = attrs["shortest_list"]
        say(f"users with fewer than {k:,} items left: {short:,}, the fewest {fewest:,}", err=True)


def _choice(file: Path | None, own: DataConfig, how: dict[str, Any]) -> list[Any] | dict[Any, list[Any]] | None:
    """The item ids in a file: of a table, which names its columns, by user where it has users; else one per line."""
    if file is None:
        return None
    from recbft.datasets.formats import column_names, ending, read_table

    separator = how.get("separator")
    there = column_names(file, separator)
    if not there and ending(file) not in _TABLES:  # any text may be delimited
        there, separator = column_names(file, ","), ","
    pairs: list[tuple[str | None, str]] = [
        (how.get("user", "user_id"), how.get("item", "item_id")),
        ("user_id", "item_id"),
        ("user", "item"),  # of lists that were written here
        (own.user or own.session or "user_id", own.item or "item_id"),
    ]
    if ending(file) in _TABLES and len(there) == 1:
        pairs.append((None, there[0]))
    for user, item in pairs:
        if item not in there:
            continue
        table = read_table(file, [name for name in (user, item) if name in there], separator=separator)
        items: list[Any] = table[item].to_pylist()
        if user not in there:
            return items
        lists: dict[Any, list[Any]] = {}
        for each, chosen in zip(table[user].to_pylist(), items, strict=True):
            lists.setdefault(each, []).append(chosen)
        return lists
    if ending(file) in _TABLES:
        raise UserError(f"{file}: no column 'item_id' (columns: {', '.join(there)}); name it with --item")
    return _lines(file)


def _caps(given: Sequence[str] | None) -> dict[str, int] | None:
    """What --cap says, feature -> number."""
    found: dict[str, int] = {}
    for text in given or ():
        name, _, number = text.rpartition("=")
        if not (name and number.isdecimal()):
            raise UserError(f"--cap {text} cannot be read; write FEATURE=N, such as category=3")
        found[name] = int(number)
    return found or None


def _lines(file: Path) -> list[str]:
    """The lines of a file that are not blank, as they stand."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror or error}; give a text file with one item id per line, or a table"
        ) from None
    return [line.rstrip("\r") for line in lines if line.strip()]


def _write(blocks: Iterable[pd.DataFrame], out: Path | None) -> list[dict[Any, Any]]:
    """Write each block as it comes, a file's under its name only when all are there; the blocks' ``attrs``."""
    from recbft.system.files import write_atomic

    attrs: list[dict[Any, Any]] = []
    num_rows, spoke = 0, monotonic()

    def noted() -> Iterable[pd.DataFrame]:
        nonlocal num_rows, spoke
        for block in blocks:
            attrs.append(block.attrs)
            block.attrs = {}  # which a Parquet file would keep
            num_rows += len(block)
            if monotonic() - spoke >= SILENCE:
                say(f"{num_rows:,} recommendations so far", err=True)
                spoke = monotonic()
            yield block

    if out is None:  # ids are data: UTF-8 whatever the terminal's encoding, as in a file
        sys.stdout.flush()
        _csv(noted(), sys.stdout.buffer)
    else:
        write = _csv if out.suffix.lower() == ".csv" else _parquet
        write_atomic(out, lambda file: write(noted(), file))
        say(f"{num_rows:,} recommendations written to {out}")
    return attrs


def _csv(blocks: Iterable[pd.DataFrame], file: BinaryIO) -> None:
    for number, block in enumerate(blocks):
        # A carriage return in an id ends a line for whoever reads it, and Python before 3.13 does not quote it.
        torn = any("\r" in str(raw) for name in ("user", "item") for raw in block[name].unique())
        quoting: Any = csv.QUOTE_NONNUMERIC if torn else csv.QUOTE_MINIMAL
        block.to_csv(file, index=False, header=number == 0, quoting=quoting)


def _parquet(blocks: Iterable[pd.DataFrame], file: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        writer = None
        for block in blocks:
            if writer is None:
                schema = pa.Schema.from_pandas(block, preserve_index=False)
                for place, field in enumerate(schema):  # ids that are text, of which the first block has none
                    if pa.types.is_null(field.type):
                        schema = schema.set(place, field.with_type(pa.string()))
                writer = stack.enter_context(pq.ParquetWriter(file, schema))
            writer.write_table(pa.Table.from_pandas(block, schema=writer.schema, preserve_index=False))
