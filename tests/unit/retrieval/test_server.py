"""What a server says of where it listens and of what it runs on, and how replicas are described."""

from __future__ import annotations

import configparser
import os
from functools import partial
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sg_rlhf.retrieval import connections, replicas, server
from sg_rlhf.retrieval.search import Retriever

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_the_loopback_has_no_remark(host: str) -> None:
    assert server.exposure(host) == ""


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "::1a", "10.0.0.1", "localhost.invalid", "127.evil.invalid", ""]
)
def test_what_only_looks_like_the_loopback_has_a_remark(host: str) -> None:
    assert "not the loopback" in server.exposure(host)


def test_a_uvicorn_that_would_switch_the_limits_off_is_refused(
    bm25_index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    monkeypatch.setattr("uvicorn.__version__", "0.34.0")
    assert server.main(["--index", str(bm25_index), "--port", "0"]) == 2
    said = capsys.readouterr()
    assert "uvicorn 0.34.0 is installed, expected 0.45 or later: pip install" in said.err
    assert said.out == ""


def test_the_declared_uvicorn_is_the_one_that_is_asked_for() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needs = setup["options.extras_require"]["search"].split()
    assert f"uvicorn>={connections.LEAST_UVICORN}" in needs


def opened(error: Exception | None = None) -> Retriever:
    if error is not None:
        raise error
    return Retriever(None, None, f"opened by {os.getpid()}")  # type: ignore[arg-type]


def killed() -> Retriever:
    os.kill(os.getpid(), 9)
    raise AssertionError


def test_the_process_that_starts_replicas_opens_no_index_itself() -> None:
    said = replicas.describe(opened)
    assert said.startswith("opened by ") and said != f"opened by {os.getpid()}"
    # It has ended, and with it goes what it held.
    assert not Path(f"/proc/{said.split()[-1]}").exists()


def test_what_is_wrong_with_an_index_is_said_before_replicas_start() -> None:
    with pytest.raises(ValueError, match="no such folder"):
        replicas.describe(partial(opened, ValueError("--index /no/such: no such folder")))
    with pytest.raises(ValueError, match="was ended before"):
        replicas.describe(killed)
