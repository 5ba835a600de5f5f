"""``recbft serve``: answer HTTP requests by a run, in worker processes of uvicorn's.

The first process holds the socket and replaces workers that end. Each worker loads the run itself, and loads it again
at SIGHUP, which the first process hands on, or when another run stands in its place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recbft.errors import RunError, UserError
from recbft_cli.options import NewItems, Run

if TYPE_CHECKING:
    from recbft.api.service import Limits

EXAMPLES = "Example: recbft serve runs/current --port 8000, then open http://localhost:8000/docs"
NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
NO_START = 3  # uvicorn's exit code of a worker that cannot listen
SLOW = 30  # seconds that a worker may take to load, or to end its requests


class JsonLines(logging.Formatter):
    """A log record as one line of JSON, with the ``fields`` that it was given."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "pid": record.process, "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"json": {"()": "recbft_cli.serve.JsonLines"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "json"}},
    "root": {"handlers": ["out"], "level": "INFO"},
}


def serve(
    run: Run,
    items: NewItems = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that answer; if left out the cores, at most 4.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Largest request.")] = 2**20,
    max_users: Annotated[int, typer.Option(min=1, help="Most users of a request.")] = 1000,
    max_k: Annotated[int, typer.Option(min=1, help="Longest list.")] = 1000,
) -> None:
    """Answer HTTP requests by a run; another run in its place, or SIGHUP, is taken up without a pause."""
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        raise UserError(f"serving needs packages that are not installed: pip install {' '.join(missing)}")
    from uvicorn import Config
    from uvicorn.supervisors import Multiprocess

    from recbft.api.service import Limits, Service
    from recbft.runs.environment import cores

    limits = Limits(max_body, max_users, max_k)
    Service(run, limits, items=items or ())  # what is wrong with the run is said now, and kernels are built once

    with tempfile.TemporaryDirectory(prefix="recbft-") as counts:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # one worker per core answers more than one with more threads
        config = Config(
            partial(worker_app, run, limits, items or ()), factory=True, host=host, port=port, lifespan="on",
            workers=workers or min(cores(), 4), log_config=LOGGING, access_log=False, server_header=False,
            timeout_worker_healthcheck=SLOW, timeout_graceful_shutdown=SLOW,
        )  # fmt: skip
        try:
            listening = config.bind_socket()
        except SystemExit:
            raise UserError(f"cannot listen at {host}, port {port}; name others with --host and --port") from None
        # As asyncio does for sockets of its own: else the second packet of an answer waits 40 ms for the client.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        supervisor = Multiprocess(config, sockets=[listening])
        if hasattr(signal, "SIGHUP"):
            # In place of uvicorn's handler, at which new workers start: these load the run themselves.
            signal.signal(signal.SIGHUP, lambda *_: _hand_on(supervisor.processes))
            # A ping to a worker that was just killed would wait for long, since this process holds the worker's end of
            # the pipe too.
            signal.signal(signal.SIGCHLD, lambda *_: _let_go(supervisor.processes))
        supervisor.run()
    if any(process.exitcode == NO_START for process in supervisor.processes):
        raise RunError("no worker could start; the log says why")


def worker_app(run: Path, limits: Limits, items: Sequence[Path] = ()) -> Any:
    """The application of one worker, made in its process; a run that cannot be loaded ends it, to be tried again."""
    from recbft.api.service import Service
    from recbft.api.web import make_app

    logging.captureWarnings(True)
    try:
        service = Service(run, limits, items=items)
    except UserError as error:
        logging.getLogger("recbft.service").error("%s cannot be served: %s", run, error)
        sys.exit(1)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: service.ask_to_reload())
    threading.Thread(target=_end_with_the_first_process, daemon=True).start()
    return make_app(service)


def _end_with_the_first_process() -> None:
    """Stop this worker when the process that started it is gone: nobody would replace it, or let go of the port."""
    first = multiprocessing.parent_process()
    if first is not None:
        first.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _hand_on(workers: Iterable[Any]) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGHUP)


def _let_go(workers: Iterable[Any]) -> None:
    for worker in workers:
        worker.child_conn.close()
