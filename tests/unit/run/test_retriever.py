"""A retriever for the length of a run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.search.retriever.retriever_process import serve


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_serves_an_index_and_ends(tmp_path: Path) -> None:
    corpus, index, port = tmp_path / "corpus.jsonl", tmp_path / "index", free_port()
    towns = ("Arlen", "Brevik", "Corda", "Dunmore")
    rows = [{"id": name, "contents": f'"{name}"\n{name} lies at sea.'} for name in towns]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--corpus", str(corpus), "--encoder", "bm25", "--out", str(index)]
    subprocess.run([sys.executable, "-m", "sg_rlhf.retrieval.index", *command], check=True)
    with serve(index, port, tmp_path / "server.log") as url:
        assert url == f"http://127.0.0.1:{port}/retrieve"
        answer = httpx.post(url, json={"queries": ["Corda"], "topk": 1}, trust_env=False)
        assert "Corda" in answer.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(EvalError, match="the retrieval server ended with 2: .*none"),
        serve(tmp_path / "none", free_port(), tmp_path / "server.log"),
    ):
        pass
