"""The HTTP contract, on a real index, without a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sg_rlhf.retrieval.app import Limits, create_app
from sg_rlhf.retrieval.search import Retriever, open_index

LIMITS = Limits(max_queries=1000, max_query_chars=500, max_topk=20, max_pending=1000)


@pytest.fixture(scope="module", params=["bm25", "flat"])
def retriever(request: pytest.FixtureRequest, bm25_index: Path, flat_index: Path) -> Retriever:
    folder = bm25_index if request.param == "bm25" else flat_index
    return open_index(folder, device="cpu")


@pytest.fixture(scope="module")
def client(retriever: Retriever) -> Iterator[TestClient]:
    with TestClient(create_app(lambda: retriever, LIMITS)) as client:
        yield client


def ask(client: TestClient, queries: list[str], **fields: Any) -> Any:
    response = client.post("/retrieve", json={"queries": queries, **fields})
    assert response.status_code == 200, response.text
    return response.json()["result"]


def test_with_scores_each_passage_is_wrapped(client: TestClient, retriever: Retriever) -> None:
    result = ask(client, ["film river", "war"], topk=2, return_scores=True)
    expected = retriever.search(["film river", "war"], 2)
    assert result == [
        [{"document": dict(hit.document), "score": hit.score} for hit in hits] for hits in expected
    ]
    assert set(result[0][0]["document"]) == {"id", "contents"}


def test_without_scores_it_is_the_passages_alone(client: TestClient) -> None:
    """The reference server crashes here."""
    wrapped = ask(client, ["film river"], topk=2, return_scores=True)
    for fields in ({"topk": 2, "return_scores": False}, {"topk": 2}):
        assert ask(client, ["film river"], **fields) == [[item["document"] for item in wrapped[0]]]


def test_what_is_left_out_has_the_references_defaults(client: TestClient) -> None:
    assert len(ask(client, ["film"])[0]) == 3
    assert len(ask(client, ["film"], topk=None)[0]) == 3
    assert ask(client, []) == []


def test_search_r1s_clients_can_format_every_answer(client: TestClient) -> None:
    """Their clients take `contents`, its first line as the title, the rest as the text."""
    for hits in ask(client, ["film", "", "北京 Café", "river"], topk=3, return_scores=True):
        for hit in hits:
            title, *text = hit["document"]["contents"].split("\n")
            assert title.startswith('"') and text


def test_unicode_blank_long_and_duplicate_queries(client: TestClient) -> None:
    queries = ["北京", "Café 🎬 \u202e", "", " \n\t", "x" * 500, "film", "film", "\x00"]
    together = ask(client, queries, topk=3, return_scores=True)
    assert together[2] == together[3] == []
    assert together[5] == together[6] != []
    alone = [ask(client, [query], topk=3, return_scores=True)[0] for query in queries]
    assert together == alone


def test_a_thousand_queries(client: TestClient, texts: list[str]) -> None:
    queries = [f"{text[:40]} {row}" for row, text in enumerate(texts * 2)][:1000]
    result = ask(client, queries, topk=3, return_scores=True)
    assert len(result) == 1000
    assert result[777] == ask(client, [queries[777]], topk=3, return_scores=True)[0]


@pytest.mark.parametrize(
    ("body", "place", "reason"),
    [
        ({"queries": ["a"] * 1001}, ["body", "queries"], "at most 1000"),
        ({"queries": ["a", "x" * 501]}, ["body", "queries", 1], "at most 500"),
        ({"queries": ["a"], "topk": 21}, ["body", "topk"], "less than or equal to 20"),
        ({"queries": ["a"], "topk": 0}, ["body", "topk"], "greater than or equal to 1"),
        ({"queries": ["a"], "topk": -1}, ["body", "topk"], "greater than or equal to 1"),
        ({"queries": ["a"], "topk": "many"}, ["body", "topk"], "valid integer"),
        ({"queries": "a"}, ["body", "queries"], "valid list"),
        ({"queries": [None]}, ["body", "queries", 0], "valid string"),
        ({}, ["body", "queries"], "required"),
    ],
)
def test_what_is_beyond_the_limits_is_422_with_the_reason(
    client: TestClient, body: dict[str, Any], place: list[Any], reason: str
) -> None:
    response = client.post("/retrieve", json=body)
    assert response.status_code == 422
    [detail] = response.json()["detail"]
    assert detail["loc"] == place
    assert reason in detail["msg"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"queries": [NaN]}',
        b'{"queries": ["\\ud800"]}',
        b'{"queries": ["a"], "topk": Infinity}',
        b"{",
        b"",
        b"[" * 100_000,
        b"\xff\xfe",
        b"null",
    ],
)
def test_what_is_not_a_request_is_refused(client: TestClient, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/retrieve", content=content, headers=headers)
    assert response.status_code in (400, 422)
    assert response.json()["detail"]


def test_a_huge_body_is_refused_unread(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(LIMITS.max_body // 2**20 + 2):
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    too_long = str(LIMITS.max_body + 1)
    told = client.post("/retrieve", content=b"{}", headers={**headers, "content-length": too_long})
    assert told.status_code == 413
    assert str(LIMITS.max_body) in told.json()["detail"]
    untold = client.post("/retrieve", content=chunks(), headers=headers)
    assert untold.status_code in (400, 413)


def test_the_largest_request_fits(client: TestClient) -> None:
    """Every limit at once, each character as two escapes, is not too large a body."""
    body = json.dumps({"queries": ["🎬" * 500] * 1000, "topk": 20, "return_scores": True})
    assert len(body) < LIMITS.max_body
    headers = {"content-type": "application/json"}
    assert client.post("/retrieve", content=body, headers=headers).status_code == 200


def test_health_says_what_is_served(client: TestClient, retriever: Retriever) -> None:
    health = client.get("/health").json()
    assert health == {"status": "ok", "passages": 600, "description": retriever.description}


def test_metrics_count(retriever: Retriever) -> None:
    with TestClient(create_app(lambda: retriever, LIMITS)) as fresh:
        ask(fresh, ["film", "war"])
        ask(fresh, ["film"])
        fresh.post("/retrieve", json={})
        response = fresh.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        'sg_retrieval_requests_total{status="200"} 2.0',
        'sg_retrieval_requests_total{status="422"} 1.0',
        "sg_retrieval_queries_total 3.0",
        "sg_retrieval_cache_hits_total 1.0",
        "sg_retrieval_cache_misses_total 2.0",
        "sg_retrieval_batch_size_sum 2.0",
        "sg_retrieval_pending 0.0",
    ):
        assert line in lines


def test_a_corpus_that_turned_bad_is_an_answer_with_the_reason(
    tmp_path: Path, retriever: Retriever
) -> None:
    def broken(queries: Any, topk: int) -> Any:
        raise ValueError(f"{tmp_path}/corpus.jsonl, line 3: not JSON")

    spoilt = Retriever(retriever._backend, retriever._corpus, "spoilt")
    spoilt.search = broken  # type: ignore[method-assign]
    with TestClient(create_app(lambda: spoilt, LIMITS)) as client:
        response = client.post("/retrieve", json={"queries": ["film"]})
    assert response.status_code == 500
    assert "corpus.jsonl, line 3: not JSON" in response.json()["detail"]


def test_the_schema_shows_the_limits_and_the_docs_are_there(client: TestClient) -> None:
    assert client.get("/docs").status_code == 200
    schema = client.get("/openapi.json").json()["components"]["schemas"]["RetrieveRequest"]
    assert schema["properties"]["queries"]["maxItems"] == 1000
    assert schema["properties"]["queries"]["items"]["maxLength"] == 500
