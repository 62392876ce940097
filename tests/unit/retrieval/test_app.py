"""The HTTP contract, on a real index, without a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from sg_rlhf.retrieval.app import create_app, encode
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.search import Hit, Retriever, open_index

LIMITS = Limits(max_queries=1000, max_query_chars=500, max_topk=20, max_pending=1000)


@pytest.fixture(scope="module", params=["bm25", "flat"])
def retriever(request: pytest.FixtureRequest, bm25_index: Path, flat_index: Path) -> Retriever:
    folder = bm25_index if request.param == "bm25" else flat_index
    return open_index(folder, device="cpu")


@pytest.fixture(scope="module")
def client(retriever: Retriever) -> Iterator[TestClient]:
    with TestClient(create_app(retriever, LIMITS)) as client:
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
    assert len(ask(client, ["film"], topk=0)[0]) == 3
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
        ({"queries": ["a"] * 900_000}, ["body", "queries"], "at most 1000"),
        ({"queries": ["a"], "topk": 21}, ["body", "topk"], "less than or equal to 20"),
        ({"queries": ["a"], "topk": -1}, ["body", "topk"], "greater than or equal to 0"),
        ({"queries": ["a"], "topk": "many"}, ["body", "topk"], "valid integer"),
        ({"queries": "a"}, ["body", "queries"], "valid list"),
        ({"queries": [None]}, ["body", "queries", 0], "valid string"),
        ({"queries": ["a", ["b"]]}, ["body", "queries", 1], "valid string"),
        ({"queries": {"a": "b"}}, ["body", "queries"], "valid list"),
        ({"query": ["a"]}, ["body", "query"], "valid string"),
        ({"queries": ["a"], "return_scores": "maybe"}, ["body", "return_scores"], "boolean"),
        ({"queries": ["a"], "topk": [3]}, ["body", "topk"], "valid integer"),
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
        b'{"queries": ["a"]} and more',
        b'{"queries": ["a"], "topk": 1' + b"0" * 5000 + b"}",
        b'{"queries": ["a"], "topk": Infinity}',
        b"{",
        b"",
        b"[" * 100_000,
        b'{"x": ' * 100_000,
        b"\xff\xfe",
        b"null",
    ],
)
def test_what_is_not_a_request_is_refused(client: TestClient, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/retrieve", content=content, headers=headers)
    assert response.status_code in (400, 422)
    assert response.json()["detail"]


def test_one_query_alone_is_skyrls_request(client: TestClient) -> None:
    body = {"query": "film river", "topk": 2, "return_scores": True}
    response = client.post("/retrieve", json=body)
    assert response.json()["result"] == ask(client, ["film river"], topk=2, return_scores=True)


def test_what_is_wrong_with_one_query_costs_no_other(client: TestClient) -> None:
    """Too long: cut. Half a UTF-16 pair: replaced. The others are answered as if alone."""
    content = json.dumps({"queries": ["film", "river " * 50_000, "x", "war"]})
    content = content.replace('"x"', r'"\ud800 river"')
    headers = {"content-type": "application/json"}
    response = client.post("/retrieve", content=content, headers=headers)
    found = response.json()["result"]
    cut = ("river " * 50_000)[: LIMITS.max_query_chars]
    assert found == ask(client, ["film", cut, "? river", "war"])


def test_last_of_two_equal_names_counts(client: TestClient) -> None:
    content = b'{"queries": 5, "queries": ["film"], "topk": 1, "topk": 2, "x": {"queries": ["a"]}}'
    headers = {"content-type": "application/json"}
    response = client.post("/retrieve", content=content, headers=headers)
    assert response.json()["result"] == ask(client, ["film"], topk=2)


def test_a_huge_body_is_refused(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"queries": ["a"], "x": "'
        for _ in range(LIMITS.max_body_mb + 2):
            yield b'", "x": "' + b" " * (2**20 - 20)

    headers = {"content-type": "application/json"}
    too_long = str(LIMITS.max_body_mb * 2**20 + 1)
    told = client.post("/retrieve", content=b"{}", headers={**headers, "content-length": too_long})
    assert told.status_code == 413
    untold = client.post("/retrieve", content=chunks(), headers=headers)
    assert untold.status_code == 413


def test_the_largest_request_is_answered(client: TestClient) -> None:
    """Every limit at once, each character as two escapes."""
    queries = [f"{row} film {'🎬' * 490}" for row in range(1000)]
    found = ask(client, queries, topk=20, return_scores=True)
    assert [len(hits) for hits in found] == [20] * 1000
    assert found[999] == ask(client, [queries[999]], topk=20, return_scores=True)[0]


def test_more_passages_than_an_answer_may_hold(retriever: Retriever) -> None:
    with TestClient(create_app(retriever, Limits())) as client:
        response = client.post("/retrieve", json={"queries": ["a"] * 10_000, "topk": 100})
    assert response.status_code == 422
    assert "at most 262144 passages" in response.json()["detail"][0]["msg"]


def test_health_says_what_is_served(client: TestClient, retriever: Retriever) -> None:
    health = client.get("/health").json()
    assert health == {"status": "ok", "passages": 600, "description": retriever.description}


def test_metrics_count(retriever: Retriever) -> None:
    with TestClient(create_app(retriever, LIMITS)) as fresh:
        ask(fresh, ["film", "war"])
        ask(fresh, ["film"])
        fresh.post("/retrieve", json={})
        response = fresh.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
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
    with TestClient(create_app(spoilt, LIMITS)) as client:
        response = client.post("/retrieve", json={"queries": ["film"]})
    assert response.status_code == 500
    assert "corpus.jsonl, line 3: not JSON" in response.json()["detail"]


def test_a_search_that_times_out_is_a_server_error(retriever: Retriever) -> None:
    """A network file system's ETIMEDOUT is a TimeoutError: the server's error, not the client's."""

    def broken(queries: Any, topk: int) -> Any:
        raise TimeoutError(110, "Connection timed out", "corpus.jsonl")

    slow = Retriever(retriever._backend, retriever._corpus, "slow")
    slow.search = broken  # type: ignore[method-assign]
    with TestClient(create_app(slow, LIMITS)) as client:
        response = client.post("/retrieve", json={"queries": ["film"]})
    assert response.status_code == 500
    assert "Connection timed out" in response.json()["detail"]


def test_the_schema_shows_the_limits_and_the_docs_are_there(client: TestClient) -> None:
    assert client.get("/docs").status_code == 200
    api = client.get("/openapi.json").json()
    operation = api["paths"]["/retrieve"]["post"]
    schema = api["components"]["schemas"]["RetrieveRequest"]
    assert schema["properties"]["queries"]["anyOf"][0]["maxItems"] == 1000
    assert schema["properties"]["topk"]["anyOf"][0]["maximum"] == 20
    assert set(operation["responses"]) == {"200", "400", "413", "422", "429", "500"}


def test_a_damaged_vector_is_an_error_and_no_answer() -> None:
    """NaN is not JSON: what the reference would send, its clients cannot read."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode([Hit({"id": "0", "contents": "x"}, float("nan"))], with_scores=True)
