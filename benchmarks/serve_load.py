"""Load `recbft serve` with clients on this machine, while its run is changed and one of its workers is killed.

    python -m benchmarks.serve_load RUN OTHER --data-root DIR --seconds 20

A link leads to RUN. First clients ask in peace, each for one user at a time and the next as soon as it has an answer.
Then the link is turned between OTHER and RUN three times, and one worker is ended by SIGKILL. A client whose connection
is lost asks again once, as any balancer does; the kill loses those that the worker had. A request without an answer
after that, or with another status than 200, has failed: exit code 1. Histories are those of RUN's own data.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.command import count, finish, parse, parser, recorded
from benchmarks.kill_resume import RECBFT
from benchmarks.serve_speed import K, histories_of
from recbft import Recommender
from recbft.errors import RunError
from recbft.reporting.tables import text_table
from recbft.system.files import write_json

NAME = "serve_load"
START = 120.0  # seconds that a service may take to start
CHANGES = 3


class Running:
    """A service in a process of its own, and the lines of its log."""

    def __init__(self, run: Path, workers: int, log: Path) -> None:
        command = [*RECBFT, "serve", str(run), "--port", "0", "--workers", str(workers)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self._file, self._lines = log.open(encoding="utf-8"), list[dict[str, Any]]()

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines so far that are not of requests."""
        while (line := self._file.readline()).endswith("\n"):
            if '"message": "request"' not in line and line.startswith("{"):
                self._lines.append(json.loads(line))
        self._file.seek(self._file.tell() - len(line.encode()))  # the beginning of one
        return self._lines

    def wait(self, message: str, number: int) -> list[dict[str, Any]]:
        """The lines with this beginning, once there are so many."""
        end = time.monotonic() + START
        while len(found := [line for line in self.log if line["message"].startswith(message)]) < number:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RunError(f"the service did not say {message!r} {number} times; it said {self.log[-5:]}")
            time.sleep(0.05)
        return found

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.wait("Uvicorn running", 1)[0]["message"].partition(" (")[0].rpartition(":")[2])

    def stop(self) -> int:
        """End it as a system would; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START)
        finally:
            self.process.kill()


@contextmanager
def running(run: Path, workers: int) -> Iterator[Running]:
    """A service whose workers all answer."""
    with tempfile.TemporaryDirectory() as folder:
        service = Running(run, workers, Path(folder) / "log")
        try:
            service.wait("Application startup complete", workers)
            yield service
        finally:
            service.stop()


class Client(threading.Thread):
    """Asks until told to stop."""

    def __init__(self, port: int, bodies: Sequence[str], stop: threading.Event) -> None:
        super().__init__()
        self.port, self.bodies, self.stopped = port, bodies, stop
        self.seconds: list[float] = []
        self.lost, self.failures = 0, 0
        self.runs: set[str] = set()

    def run(self) -> None:
        connection = self._connect()
        number = 0
        while not self.stopped.is_set():
            body, began = self.bodies[number % len(self.bodies)], time.perf_counter()
            number += 1
            for attempt in (1, 2):
                try:
                    connection.request("POST", "/recommend", body)
                    answer = connection.getresponse()
                    content = answer.read()
                except (OSError, http.client.HTTPException):
                    connection.close()
                    connection = self._connect()
                    self.lost += attempt == 1
                    self.failures += attempt == 2
                    continue
                self.failures += answer.status != 200
                self.runs |= {json.loads(content).get("weights")}
                self.seconds.append(time.perf_counter() - began)
                break
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=START)


def load(
    service: Running, bodies: Sequence[str], clients: int, seconds: float, meanwhile: Callable[[], None] | None = None
) -> dict[str, Any]:
    """What clients meet in some seconds, or until ``meanwhile`` is done if that takes longer."""
    stop, port = threading.Event(), service.port
    asking = [Client(port, bodies[number::clients] or bodies, stop) for number in range(clients)]
    workers = {line["pid"] for line in service.log if line["message"].startswith("Application startup complete")}
    before = {pid: used for pid in workers if (used := processor_seconds(pid)) is not None}
    began = time.perf_counter()
    for client in asking:
        client.start()
    try:
        if meanwhile is not None:
            meanwhile()
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
    finally:
        stop.set()
        for client in asking:
            client.join()
    took = time.perf_counter() - began
    used = sum((processor_seconds(pid) or then) - then for pid, then in before.items())
    times = np.array([one for client in asking for one in client.seconds])
    return {
        "requests": len(times),
        "per_second": len(times) / took,
        "processor_ms": 1e3 * used / len(times) if used else None,  # of the workers, per request
        **dict(zip(("p50_ms", "p99_ms", "max_ms"), (1e3 * np.quantile(times, [0.5, 0.99, 1])).tolist(), strict=True)),
        "lost": sum(client.lost for client in asking),
        "failures": sum(client.failures for client in asking),
        "models": len(set().union(*(client.runs for client in asking))),
    }


def processor_seconds(pid: int) -> float | None:
    """What a process has used so far; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def turn(link: Path, run: Path) -> None:
    """Let a link lead to a run, at once for whoever follows it."""
    beside = link.with_name("next")
    beside.symlink_to(run.resolve())
    os.replace(beside, link)


def disturb(service: Running, link: Path, runs: Sequence[Path], workers: int) -> None:
    """Change the run three times, and kill a worker after the second."""
    for number in range(1, CHANGES + 1):
        time.sleep(1)
        told = len([line for line in service.log if line["message"] == "loaded"])
        turn(link, runs[number % 2])
        service.wait("loaded", told + workers)
        if number == CHANGES - 1:
            started = service.wait("Application startup complete", workers)
            os.kill(started[-1]["pid"], signal.SIGKILL)
            service.wait("Application startup complete", workers + 1)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    made = machine.header(recorded(NAME, arguments))
    print("\n".join(machine.lines(made)), flush=True)
    histories = histories_of(Recommender.load(options.run, data_root=options.data_root))
    bodies = [json.dumps({"histories": [history], "k": K}) for history in histories]
    runs, rows = [Path(options.run), Path(options.other)], {}
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "current"
        turn(link, runs[0])
        with running(link, options.workers) as service:
            load(service, bodies, options.clients, min(2, options.seconds))  # to warm up
            rows["in peace"] = load(service, bodies, options.clients, options.seconds)
            rows["three changes and a kill"] = load(
                service, bodies, options.clients, options.seconds,
                lambda: disturb(service, link, runs, options.workers),
            )  # fmt: skip
    head = ["", "requests", "per s and worker", "processor, ms", "p50, ms", "p99, ms", "max, ms", "lost", "failed"]
    print(text_table(head, [_row(name, row, options.workers) for name, row in rows.items()]))
    if options.json:
        told = {"workers": options.workers, "clients": options.clients, "load": os.getloadavg()[0]}
        write_json(Path(options.json), machine.close(made) | told | rows)
    return int(any(row["failures"] for row in rows.values()))


def _row(name: str, row: dict[str, Any], workers: int) -> list[str]:
    shown = [
        row["per_second"] / workers,
        row["processor_ms"] or float("nan"),
        row["p50_ms"],
        row["p99_ms"],
        row["max_ms"],
    ]
    return [name, f"{row['requests']:,}", *(f"{one:.1f}" for one in shown), str(row["lost"]), str(row["failures"])]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    options = parser(NAME, (__doc__ or "").split("\n")[0])
    options.add_argument("run", metavar="RUN", help="folder of a finished run")
    options.add_argument("other", metavar="OTHER", help="folder of another one of the same data")
    options.add_argument("--data-root", metavar="DIR", help="folder that data sets lie in")
    options.add_argument("--workers", type=count, default=2)
    options.add_argument("--clients", type=count, default=8)
    options.add_argument("--seconds", type=count, default=20, help="of each of the two parts")
    return parse(options, arguments)


if __name__ == "__main__":
    finish(main)
