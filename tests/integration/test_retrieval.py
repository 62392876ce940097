"""The retrieval commands as processes: serving, shutting down, refusing, resuming."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from lab.bench.random_encoder import save_random_encoder
from sg_rlhf.retrieval import server
from sg_rlhf.retrieval.dense_build import encoded_rows
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.search import open_index
from tests.unit.retrieval.conftest import make_texts, write_corpus

ROOT = Path(__file__).parents[2]
REAL = Path(os.environ.get("SG_QA_DATA", ROOT.parent / "shared" / "data" / "qa"))
# A server's start imports torch and transformers: 5 seconds, and ten times that on a busy machine.
needs_real_data = pytest.mark.skipif(
    not (REAL / "corpus.jsonl").is_file(), reason=f"no corpus.jsonl in {REAL} (set SG_QA_DATA)"
)


@dataclass(frozen=True)
class Files:
    """A corpus, an encoder, and a BM25 and a flat index of them."""

    corpus: Path
    encoder: Path
    bm25: Path
    flat: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("retrieval")
    texts = make_texts()
    made = Files(
        write_corpus(folder / "corpus.jsonl", texts),
        folder / "e5_random",
        folder / "bm25",
        folder / "flat",
    )
    save_random_encoder(made.encoder, texts)
    build(made.corpus, "bm25", made.bm25)
    build(made.corpus, str(made.encoder), made.flat, max_length=64)
    return made


def command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"sg_rlhf.retrieval.{module}", *map(str, arguments)]


@dataclass
class Server:
    """A running server and what it has printed."""

    process: subprocess.Popen[str]
    url: str
    announcement: list[str]
    client: httpx.Client
    errors: list[str]

    def ask(self, queries: list[str], topk: int = 3) -> httpx.Response:
        body = {"queries": queries, "topk": topk, "return_scores": True}
        return self.client.post(f"{self.url}/retrieve", json=body)

    def metric(self, name: str) -> float:
        text = self.client.get(f"{self.url}/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith(f"sg_retrieval_{name} ")]
        return float(line.split()[1])


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[Server]:
    process = subprocess.Popen(
        command("server", *arguments, "--device", "cpu", "--port", 0),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout and process.stderr
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    drain.start()
    try:
        lines = []
        while line := process.stdout.readline():
            lines.append(line.rstrip())
            if "listening on" in line:
                break
        else:
            pytest.fail(f"ended with {process.wait()}: {''.join(errors)[-2000:]}")
        url = lines[-1].split("listening on ")[1].split()[0]
        with httpx.Client(timeout=300) as client:
            yield Server(process, url, lines, client, errors)
    finally:
        process.terminate()
        try:
            process.wait(1800)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def limited(files: Files) -> Iterator[Server]:
    """A server of small limits, so that requests beyond them are small too."""
    limits = ("--max-queries", 4, "--max-query-chars", 20, "--max-topk", 5)
    with serving("--index", files.bm25, *limits) as server:
        yield server


def test_it_says_where_it_listens_and_what_it_serves(limited: Server, files: Files) -> None:
    assert limited.announcement[0] == f"serving 600 passages of {files.corpus}, BM25"
    assert limited.url.startswith("http://127.0.0.1:")
    assert limited.client.get(f"{limited.url}/health").json()["status"] == "ok"


@pytest.mark.full
def test_a_plain_faiss_file_answers_like_its_folder(files: Files) -> None:
    queries = ["film river", "war music", "北京"]
    arguments = ("--faiss-index", files.flat / "index.faiss", "--corpus", files.corpus)
    with serving(*arguments, "--encoder", files.encoder, "--max-length", 64) as server:
        response = server.ask(queries)
    expected = open_index(files.flat, device="cpu").search(queries, 3)
    got = [
        [(hit["document"]["id"], hit["score"]) for hit in hits]
        for hits in response.json()["result"]
    ]
    assert got == [[(hit.document["id"], hit.score) for hit in hits] for hits in expected]


def test_a_taken_port_is_one_line(files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert server.main(["--index", str(files.bm25), "--port", port]) == 2
    assert capfd.readouterr().err.strip().endswith("Address already in use")


#: All but the line that ends it.
HEAD = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n"


def half_sent(server: Server, content: bytes) -> socket.socket:
    """A connection on which a request began."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 30)
    connection.sendall(content)
    return connection


@pytest.fixture
def batching(files: Files) -> Iterator[Server]:
    """A server of small batches that remembers no answer."""
    with serving("--index", files.flat, "--max-batch", 16, "--cache-size", 0) as server:
        yield server


def test_concurrent_answers_are_those_of_a_single_client(batching: Server) -> None:
    queries = [f"{word} {number}" for number in range(50) for word in ("film", "river", "war")]
    server = batching
    with ThreadPoolExecutor(32) as pool:
        alone = [server.ask([query]).json() for query in queries]
        assert list(pool.map(lambda query: server.ask([query]).json(), queries)) == alone
        assert server.metric("batch_size_count") < 2 * len(queries), "nothing was merged"


def test_sigterm_loses_no_accepted_request(batching: Server) -> None:
    server = batching
    halves = [half_sent(server, HEAD) for _ in range(60)]
    with ThreadPoolExecutor(30) as pool:
        for turn in itertools.count():  # until some are accepted and not answered yet
            served = server.metric("cache_misses_total")
            requests = [
                [f"{turn} request {i} query {j} film" for j in range(100)] for i in range(30)
            ]
            sent = [pool.submit(server.ask, queries) for queries in requests]
            while server.metric("cache_misses_total") < served + 3000:
                time.sleep(0.01)
            if server.metric("pending") > 0:
                break
            wait(sent)
        server.process.send_signal(signal.SIGTERM)
        responses = [future.result() for future in sent]
        server.process.wait(1800)
    assert [response.status_code for response in responses] == [200] * len(requests)
    assert all(len(response.json()["result"]) == 100 for response in responses)
    for half in halves:
        with half, contextlib.suppress(ConnectionResetError):
            assert half.recv(12) == b""
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_shutdown_that_takes_too_long_ends(files: Files, number: signal.Signals) -> None:
    """Many batches wait: the running one is searched to its end, the others are given up."""
    flags = ("--shutdown-seconds", 1, "--max-batch", 16, "--cache-size", 0)
    with (
        serving("--index", files.flat, *flags) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        many = [f"request {i} film river war {'music ' * 40}" for i in range(16_000)]
        waiting = pool.submit(server.ask, many)
        while server.metric("pending") < len(many):
            time.sleep(0.01)
        server.process.send_signal(number)
        status = server.process.wait(1800)
        with pytest.raises(httpx.HTTPError):
            waiting.result().raise_for_status()
    assert status == (-signal.SIGTERM if number == signal.SIGTERM else 0)


def test_overload_is_refused(files: Files) -> None:
    flags = ("--max-batch", 8, "--max-pending", 256, "--max-queries", 128, "--cache-size", 0)
    with (
        serving("--index", files.flat, *flags) as server,
        ThreadPoolExecutor(24) as pool,
    ):

        def one(number: int) -> httpx.Response:
            return server.ask([f"request {number} query {i} river" for i in range(128)])

        answers = list(pool.map(one, range(24)))
        assert server.ask(["afterwards"]).status_code == 200
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == 24
    assert served and refused
    for response in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert (
            "queries are waiting, no room for 128 more (at most 256)" in response.json()["detail"]
        )


@pytest.mark.full
def test_a_killed_build_goes_on(files: Files, tmp_path: Path) -> None:
    out, partial = tmp_path / "index", tmp_path / "index.partial"
    arguments = command(
        "index", "--corpus", files.corpus, "--encoder", files.encoder, "--out", out,
        "--max-length", 64, "--batch-size", 1, "--device", "cpu",
    )  # fmt: skip
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 1800
    vectors = partial / "vectors.f32"
    while not vectors.exists() or not vectors.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not out.exists()
    before = encoded_rows(vectors, 32)
    assert before % 256 == 0
    again = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert again.returncode == 0, again.stderr
    assert f"continuing after {before} of 600 passages" in again.stdout
    stored = faiss.read_index(str(out / "index.faiss")).reconstruct_n(0, 600)
    whole = faiss.read_index(str(files.flat / "index.faiss")).reconstruct_n(0, 600)
    assert np.array_equal(stored, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_generated_request_is_a_server_error(limited: Server, mode: GenerationMode) -> None:
    """Valid and invalid requests that schemathesis makes from the server's own OpenAPI schema."""
    statuses: set[int] = set()
    schema = schemathesis.openapi.from_url(f"{limited.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == GenerationMode.NEGATIVE and operation.method != "post":
            continue  # the others take nothing that could be wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=60, deadline=None, derandomize=True, database=None)
        def check(case: Any) -> None:
            response = case.call()
            statuses.add(response.status_code)
            case.validate_response(
                response,
                checks=[
                    schemathesis.checks.not_a_server_error,
                    checks.response_schema_conformance,
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                ],
            )

        check()
    assert max(statuses) < 500
    assert (200 if mode == GenerationMode.POSITIVE else 422) in statuses


@needs_real_data
@pytest.mark.parametrize(("name", "least"), [("hotpotqa_dev60", 0.607), ("squad_dev", 0.963)])
def test_bm25_recall_on_real_questions(
    tmp_path_factory: pytest.TempPathFactory, name: str, least: float
) -> None:
    """The share of a question's supporting titles among its first three passages."""
    out = tmp_path_factory.mktemp("real") / "bm25"
    build(REAL / "corpus.jsonl", "bm25", out)
    rows = [json.loads(line) for line in (REAL / f"{name}.jsonl").read_text().splitlines()]
    found = open_index(out).search([row["question"] for row in rows], 3)
    shares = []
    for row, hits in zip(rows, found, strict=True):
        titles = {hit.document["contents"].split("\n")[0].strip('"') for hit in hits}
        wanted = set(row["metadata"]["supporting_titles"])
        shares.append(len(wanted & titles) / len(wanted))
    assert np.mean(shares) > least


@pytest.mark.full
@needs_real_data
def test_approximate_search_on_the_real_corpus(files: Files, tmp_path: Path) -> None:
    """Recall@10 of HNSW and IVF against exact search with real passages and questions."""
    lines = (REAL / "squad_dev.jsonl").read_text().splitlines()[:200]
    queries = [json.loads(line)["question"] for line in lines]
    found = {}
    for kind in ("Flat", "HNSW32", "IVF186,Flat"):
        build(
            REAL / "corpus.jsonl", str(files.encoder), tmp_path / kind, factory=kind,
            max_length=48, device="cpu",
        )  # fmt: skip
        hits = open_index(tmp_path / kind, device="cpu").search(queries, 10)
        found[kind] = [{hit.document["id"] for hit in some} for some in hits]
    for kind in ("HNSW32", "IVF186,Flat"):
        pairs = zip(found[kind], found["Flat"], strict=True)
        assert np.mean([len(some & exact) for some, exact in pairs]) / 10 > 0.95
