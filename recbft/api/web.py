"""A ``Service`` over HTTP, as a Starlette application: requests, errors, metrics, a log line each, and a page of docs.

``openapi.yaml`` says what is asked and answered. One request at a time is answered by the model, since more at once
would share the same core; the others wait, and ``/healthz`` does not.
"""

from __future__ import annotations

import html
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from logging import DEBUG, INFO, getLogger
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import prometheus_client as prometheus
from anyio import CapacityLimiter, create_task_group, sleep, to_thread
from prometheus_client import multiprocess
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recbft.api.service import Service
from recbft.config.yaml_text import read_yaml
from recbft.errors import UserError
from recbft.system import recbft_version

LOOK_EVERY = 1.0  # seconds between looks at the run's place
QUIET = ("/healthz", "/metrics")  # asked for by machines all day: not logged
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # bounds of the histogram
_LOG = getLogger("recbft.requests")


class Metrics:
    """What is counted, in this process or, with ``PROMETHEUS_MULTIPROC_DIR``, in all workers."""

    def __init__(self) -> None:
        registry = self._registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter("recbft_requests", "Requests", ["path", "status"], registry=registry)
        self.seconds = prometheus.Histogram(
            "recbft_request_seconds", "Seconds to an answer", ["path"], buckets=SECONDS, registry=registry
        )
        self.users = prometheus.Counter("recbft_users", "Users asked for", registry=registry)
        self.fallbacks = prometheus.Counter("recbft_fallback_lists", "Lists of popular items", registry=registry)
        self.empty = prometheus.Counter("recbft_empty_lists", "Lists without an item", registry=registry)
        self.reloads = prometheus.Counter("recbft_reloads", "Loads of another run", ["outcome"], registry=registry)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = prometheus.CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
        text: bytes = prometheus.generate_latest(registry)
        return text


def make_app(service: Service) -> Starlette:
    """The application; while it runs it looks for another run in the service's place."""
    metrics, in_turn = Metrics(), CapacityLimiter(1)

    async def recommend(request: Request) -> Response:
        body = await _body(request, service.limits.body)
        found = await to_thread.run_sync(lambda: service.recommend(_parsed(body)), limiter=in_turn)
        lists = found["lists"]
        fallbacks, empty = sum(one["fallback"] for one in lists), sum(not one["items"] for one in lists)
        for counter, number in ((metrics.users, len(lists)), (metrics.fallbacks, fallbacks), (metrics.empty, empty)):
            counter.inc(number)
        request.scope["recbft.log"] |= {"users": len(lists), "fallbacks": fallbacks, "run": found["run"]}
        return _json(found)

    async def similar(request: Request) -> Response:
        asked = request.query_params
        if "item" not in asked:
            raise UserError("the request names no item; ask for /similar?item=ID")
        k = asked.get("k")
        if k is not None and not (k.isascii() and k.isdecimal() and len(k) < 10):
            raise UserError(f"k is {k[:60]!r}; give a whole number of at least 1, the length of the list")
        ask = partial(service.similar, asked["item"], None if k is None else int(k))
        return _json(await to_thread.run_sync(ask, limiter=in_turn))

    async def healthz(request: Request) -> Response:
        return _json({"status": "ok", **service.named})

    async def counted(request: Request) -> Response:
        return Response(metrics.text(), media_type=prometheus.CONTENT_TYPE_LATEST)

    @asynccontextmanager
    async def watched(app: Starlette) -> AsyncIterator[None]:
        async with create_task_group() as tasks:
            tasks.start_soon(_watch, service, metrics)
            yield
            tasks.cancel_scope.cancel()

    routes = [
        Route("/recommend", recommend, methods=["POST"]),
        Route("/similar", similar),
        Route("/healthz", healthz),
        Route("/metrics", counted),
        Route("/openapi.json", lambda request: _json(specification())),
        Route("/docs", lambda request: HTMLResponse(page(specification()))),
    ]
    return Starlette(
        routes=routes,
        lifespan=watched,
        middleware=[Middleware(_Recorded, metrics=metrics, paths={route.path for route in routes})],
        exception_handlers={
            UserError: lambda _, error: _json({"error": str(error)}, 400),
            HTTPException: _refused,
            ClientDisconnect: lambda *_: Response(status_code=400),  # which nobody reads
            Exception: lambda *_: _json({"error": "the service failed; its log says why"}, 500),
        },
    )


@cache
def specification() -> dict[str, Any]:
    """The OpenAPI description of all paths."""
    tree = read_yaml(Path(__file__).with_name("openapi.yaml"))
    tree["info"]["version"] = recbft_version()
    return tree


def page(tree: dict[str, Any]) -> str:
    """The description as a page for people, which needs nothing else."""
    parts = []
    for path, methods in tree["paths"].items():
        for method, said in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{html.escape(said['summary'])}</p>")
            fields = [(one["name"], one) for one in said.get("parameters", ())]
            if "requestBody" in said:
                content = said["requestBody"]["content"]["application/json"]
                fields += _named(tree, content["schema"])["properties"].items()
                command = f"curl -d '{json.dumps(content['example'])}' http://localhost:8000{path}"
                parts.append(f"<pre>{html.escape(command)}</pre>")
            parts.append(_table(fields))
            answer = next(iter(said["responses"]["200"].get("content", {"": {}}).values())).get("schema", {})
            if "$ref" in answer:
                parts.append(f"<p>Answer:</p>{_table(_named(tree, answer)['properties'].items())}")
    style = "body{font:16px sans-serif;max-width:50em;margin:2em auto}td{padding:.2em 1em .2em 0;vertical-align:top}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>recbft</title><style>{style}</style><h1>recbft</h1>"
        f"<p>{html.escape(tree['info']['description'])} <a href=openapi.json>openapi.json</a></p>{''.join(parts)}"
    )


def _table(fields: Any) -> str:
    rows = (f"<tr><td><code>{name}</code><td>{html.escape(said.get('description', ''))}" for name, said in fields)
    return f"<table>{''.join(rows)}</table>"


def _named(tree: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


class _Recorded:
    """Counts and times each request, and logs it; neither users nor items."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = perf_counter(), 500
        more: dict[str, Any] = {}
        scope["recbft.log"] = more

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            seconds, path = perf_counter() - began, scope["path"]
            known = path if path in self.paths else "other"
            self.metrics.requests.labels(known, str(status)).inc()
            self.metrics.seconds.labels(known).observe(seconds)
            fields = {
                "method": scope["method"], "path": path[:200], "status": status, "ms": round(1e3 * seconds, 2),
                "client": (scope.get("client") or ("",))[0], **more,
            }  # fmt: skip
            _LOG.log(DEBUG if path in QUIET and status == 200 else INFO, "request", extra={"fields": fields})


async def _watch(service: Service, metrics: Metrics) -> None:
    while True:
        await sleep(LOOK_EVERY)
        if (outcome := await to_thread.run_sync(service.refresh)) is not None:
            metrics.reloads.labels(outcome).inc()


async def _body(request: Request, most: int) -> bytes:
    """What was sent, of which no more is held than is allowed."""
    body = bytearray()
    declared = request.headers.get("content-length", "0")
    too_large = HTTPException(413, f"the request is larger than {most:,} bytes; send several requests")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_number, object_pairs_hook=_once)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is not JSON: {str(error)[:200]}") from None


def _no_number(text: str) -> NoReturn:
    raise UserError(f"the request holds {text}, which is not JSON; give null or leave it out")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise UserError(f"key {key!r} is given twice; give it once")
    return found


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = error.detail
    if error.status_code == 404:
        said = f"there is nothing at {request.url.path[:200]}; /docs lists what is"
    elif error.status_code == 405:
        said = f"{request.url.path} takes no {request.method}; /docs lists what it takes"
    return _json({"error": said}, error.status_code, error.headers)


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    """ASCII, since ids are data and may hold half of a letter."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")
