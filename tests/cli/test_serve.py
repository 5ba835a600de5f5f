"""``recbft serve``: what it refuses, its log, and one service in real processes."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from benchmarks.serve_load import disturb, load, running, turn
from recbft_cli import serve
from tests.cli.conftest import events, finished, run

__all__ = ["events", "finished"]

ROOT = Path(__file__).parents[2]


def test_packages_that_are_missing_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name.startswith("u") else name)
    code, _, err = run(capsys, "serve", tmp_path)
    assert code == 2 and err == "error: serving needs packages that are not installed: pip install uvicorn\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "there is no run folder none"),
        (["none", "--workers", "0"], "invalid value for '--workers'"),
        (["none", "--port", "65536"], "invalid value for '--port'"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(capsys, words, message):
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    code, _, err = run(capsys, "serve", *words)
    assert code == 2 and message in err


def test_a_port_that_is_taken_is_named(capsys, monkeypatch):
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("recbft.api.service.Service", lambda *_, **__: None)
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda self: None)
    for name in ("PROMETHEUS_MULTIPROC_DIR", "OMP_NUM_THREADS"):  # which it sets for its workers
        monkeypatch.setenv(name, "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = run(capsys, "serve", "any", "--port", port)
    assert code == 2 and f"cannot listen at 127.0.0.1, port {port}; name others with --host and --port" in err


def test_a_line_of_the_log_is_json_with_the_fields_it_was_given():
    lines = serve.JsonLines()
    record = logging.makeLogRecord({"msg": "request\n%s", "args": ("x",), "levelname": "INFO", "process": 7})
    record.fields = {"status": 200}
    told = json.loads(lines.format(record))
    assert told.pop("time").endswith("+00:00")
    assert told == {"level": "info", "pid": 7, "message": "request\nx", "status": 200}
    try:
        raise ValueError("no")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "\n" not in lines.format(record) and "ValueError: no" in json.loads(lines.format(record))["traceback"]


def test_the_image_is_made_of_what_is_there():
    steps = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for step in steps if step.startswith("COPY ") for name in step.split()[1:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == sent and [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_a_service_answers_while_its_run_changes_and_a_worker_is_killed(finished, tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runs, link = [finished, tmp_path / "other"], tmp_path / "current"
    shutil.copytree(*runs)
    turn(link, finished)
    with running(link, 1) as service:
        found = load(service, ['{"histories": [["i1"]]}'], 2, 0.1, lambda: disturb(service, link, runs, 1))
        assert found["failures"] == 0 and found["requests"] > 0
        service.process.send_signal(signal.SIGHUP)
        assert service.wait("loaded", 4)[-1]["run"] == "other"

        connection = http.client.HTTPConnection("127.0.0.1", service.port)
        connection.request("GET", "/metrics")
        counted = dict(line.rsplit(" ", 1) for line in connection.getresponse().read().decode().splitlines())
        answered = 'recbft_requests_total{path="/recommend",status="200"}'
        # Those of the killed worker too, which may have counted one whose answer was lost, or have answered and not
        # counted that yet: then the next request of that client is lost.
        assert abs(float(counted[answered]) - found["requests"]) <= found["lost"]
        assert service.stop() == 0
        assert [line for line in service.log if "traceback" in line or line["level"] == "error"] == []
    assert sorted(os.listdir(tmp_path)) == ["current", "other"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a system on which recbft serve is not for production")
def test_workers_end_with_the_first_process_whatever_ended_it(finished):
    pytest.importorskip("uvicorn")
    pytest.importorskip("prometheus_client")
    with running(finished, 1) as service:
        service.process.kill()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", service.port), timeout=5).close()
            except OSError:
                return
            time.sleep(0.1)
    pytest.fail("the port is still taken")
