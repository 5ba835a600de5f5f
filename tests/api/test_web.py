"""Requests over HTTP: what is answered, what is refused and how, what is counted and logged."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from recbft.api import web
from recbft.api.service import KEYS, Limits, Service
from tests.api.test_service import dataset, link, turn, two_runs

__all__ = ["dataset", "link", "two_runs"]


@pytest.fixture
def service(two_runs):
    return Service(two_runs[0], Limits(body=2000, users=5, k=7))


@pytest.fixture
def client(service):
    with TestClient(web.make_app(service), raise_server_exceptions=False) as client:
        yield client


def test_lists_and_similar_items_are_those_of_the_service(service, client):
    a = service._held.recommender.item_vectors().items[0].item()
    asked = {"histories": {"ann": [a], "\ud800": []}, "k": 3, "fallback": "popular"}
    answer = client.post("/recommend", content=json.dumps(asked))
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == service.recommend(asked)
    answer = client.get("/similar", params={"item": a, "k": 2})
    assert answer.status_code == 200 and answer.json() == service.similar(str(a), 2)
    assert client.get("/healthz").json() == {"status": "ok", **service.named}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request is not JSON"),
        (b"{", "the request is not JSON"),
        (b"\xff\xfe\x00", "the request is not JSON"),
        (b"[" * 1999, "the request is not JSON"),
        (b'{"k": ' + b"9" * 1900 + b"}", "has no histories"),
        (b'{"histories": [[NaN]]}', "holds NaN, which is not JSON"),
        (b'{"histories": {"ann": [], "bob": [], "ann": []}}', "key 'ann' is given twice"),
        (b'{"histories": [[1]], "k": 8}', "k is 8, and this service makes lists of up to 7"),
        (b'{"histories": [[1]], "k": 1e400}', "k is inf"),
        (b'{"histories": [[1e400]], "fallback": "popular"}', None),
        (b'{"histories": [[' + b"9" * 1000 + b"]]}", None),
        (b'{"histories": [[true, null, -0.5]], "fallback": "popular"}', None),
    ],
)
def test_whatever_is_sent_is_answered_in_json(client, body, message):
    answer = client.post("/recommend", content=body)
    assert answer.status_code == (200 if message is None else 400)
    assert message is None or message in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/", 404, "there is nothing at /; /docs lists what is"),
        ("GET", "/recommend", 405, "/recommend takes no GET"),
        ("POST", "/healthz", 405, "/healthz takes no POST"),
        ("GET", "/similar", 400, "names no item"),
        ("GET", "/similar?item=1&k=x", 400, "k is 'x'; give a whole number"),
        ("GET", "/similar?item=1&k=8", 400, "k is 8"),
        ("GET", "/similar?item=none", 400, "not in the model's vocabulary"),
    ],
)
def test_what_is_not_there_is_refused_in_json(client, method, path, status, message):
    answer = client.request(method, path)
    assert answer.status_code == status and message in answer.json()["error"]


def test_a_large_body_is_refused_whether_or_not_its_size_is_declared(client):
    for content in (b" " * 2001, iter([b" " * 1500] * 2)):
        answer = client.post("/recommend", content=content)
        assert answer.status_code == 413 and "larger than 2,000 bytes" in answer.json()["error"]
    assert client.post("/recommend", content=b'{"histories": []}' + b" " * 1983).status_code == 400


def test_a_defect_is_logged_and_not_shown(client, service, monkeypatch):
    monkeypatch.setattr(service, "recommend", lambda request: 1 / 0)
    answer = client.post("/recommend", content="{}")
    assert answer.status_code == 500 and answer.json() == {"error": "the service failed; its log says why"}
    assert 'path="/recommend",status="500"} 1.0' in client.get("/metrics").text


def test_requests_are_counted_and_logged_without_users_and_items(client, caplog):
    caplog.set_level(logging.INFO)
    client.post("/recommend", content=b'{"histories": {"ann": ["secret"], "bob": []}, "fallback": "popular"}')
    client.post("/recommend", content=b'{"histories": {"ann": ["secret"]}}')
    for path in ("/x", "/y", "/healthz"):
        client.get(path)
    text = client.get("/metrics").text
    for line in (
        'recbft_requests_total{path="/recommend",status="200"} 2.0',
        'recbft_requests_total{path="other",status="404"} 2.0',
        'recbft_request_seconds_count{path="/recommend"} 2.0',
        "recbft_users_total 3.0",
        "recbft_fallback_lists_total 2.0",
        "recbft_empty_lists_total 1.0",
    ):
        assert f"\n{line}\n" in text
    fields = [record.fields for record in caplog.records if record.name == "recbft.requests"]
    assert [one["path"] for one in fields] == ["/recommend", "/recommend", "/x", "/y"]
    assert fields[0].items() >= {"method": "POST", "status": 200, "users": 2, "fallbacks": 2, "run": "run0"}.items()
    assert 0 < fields[0]["ms"] < 60_000 and "ann" not in str(fields) and "secret" not in str(fields)


def test_another_run_is_taken_up_while_requests_come(two_runs, link, monkeypatch):
    monkeypatch.setattr(web, "LOOK_EVERY", 0.01)
    service = Service(link)
    with TestClient(web.make_app(service)) as client:
        turn(link, two_runs[1])
        seen = [client.post("/recommend", content=b'{"histories": [[]]}').json()["run"]]
        while seen[-1] == "run0":
            seen.append(client.post("/recommend", content=b'{"histories": [[]]}').json()["run"])
            assert len(seen) < 100_000
        assert seen[-1] == "run1" and set(seen[:-1]) <= {"run0"}
        counted = 'recbft_reloads_total{outcome="loaded"} 1.0'  # a moment after the first answer
        assert any(counted in client.get("/metrics").text for _ in range(1000))


def test_the_description_is_of_what_is_there(client, service):
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) == {"/recommend", "/similar", "/healthz", "/metrics"}
    assert list(described["components"]["schemas"]["Request"]["properties"]) == list(KEYS)
    example = described["paths"]["/recommend"]["post"]["requestBody"]["content"]["application/json"]["example"]
    found = {
        "Lists": service.recommend({**example, "k": 3}),
        "Similar": service.similar(str(service._held.recommender.item_vectors().items[0]), 1),
        "Health": client.get("/healthz").json(),
        "Error": client.get("/").json(),
    }
    for name, answer in found.items():
        assert list(described["components"]["schemas"][name]["properties"]) == list(answer)
    entry = described["components"]["schemas"]["Lists"]["properties"]["lists"]["items"]["properties"]
    assert list(entry) == list(found["Lists"]["lists"][0])


def test_the_page_for_people_needs_nothing_from_elsewhere(client):
    answer = client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    for text in ("POST /recommend", "curl -d", "filter_seen", "GET /similar", "most events in training"):
        assert text in answer.text
    assert "src=" not in answer.text and "https://" not in answer.text
