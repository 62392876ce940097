"""What reads text that others chose, a target each: text in, and only what is documented out.

A target raises `AssertionError` where something else than its documented error comes, where a
result is out of range, or where one input takes too long.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from hypothesis import strategies as st

from sg_rlhf.common.redaction import redact_text
from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.data_io.model_folder import ModelError
from sg_rlhf.data_io.model_folder import check as check_model
from sg_rlhf.data_io.prompt_rows import PromptSchema
from sg_rlhf.data_io.prompt_validation import PromptIndex, read_prompts
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.kk.domain import KK
from sg_rlhf.tasks.math.domain import MATH
from sg_rlhf.tasks.reward import Completion, reward_function
from sg_rlhf.tasks.search.domain import SEARCH

#: Seconds of this process's processor time that one input may take.
SECONDS = 5.0

ANSWERS = (
    r"\boxed{", "}", "</think>", "<answer>", "</answer>", "knight", "knave", "Zoey is a knight",
    r"\frac{1}{2}", "^{9^{9}}", r"\sqrt[3]{", r"\sum_{i=1}^{\infty}", "1e999", "0/0", "\\",
    "{" * 40, "(" * 300, "x=", ",", "!", r"\text{", "<search>",
    "</search>", "<information>", "٣", "\u2028",
)  # fmt: skip
PIECES = st.sampled_from(ANSWERS) | st.text(max_size=12) | st.integers().map(str)
RESPONSES = st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=200)
NAMES = st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["actor", "adam", "lr", "sg", "weighting", "type", "train", "seed", "data", "max_len",
     "extends", "eval_sets", "upper", "form", "search", "url", "trust_remote_code", "1", ""]
)  # fmt: skip
TREES = st.recursive(JSON, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8)
BYTES = (
    st.binary(max_size=200)
    | st.lists(JSON, max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
    | st.lists(
        st.fixed_dictionaries({"input": JSON, "answer": JSON}), min_size=1, max_size=4
    ).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
)  # fmt: skip


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """Its result, unless it takes longer, in processor time: a busy machine is not a bug."""
    started = time.process_time()
    found = action()
    took = time.process_time() - started
    assert took < seconds, f"{took:.1f} s"
    return found


def _is_one_line(error: Exception) -> None:
    assert len(str(error).splitlines()) == 1, str(error)


def _graded(found: Grade, low: float, high: float) -> None:
    assert math.isfinite(found.reward) and low <= found.reward <= high
    assert all(math.isfinite(value) for value in found.logs.values())


def kk(response: str) -> None:
    """K&K's grader."""
    _graded(within(SECONDS, lambda: KK.grade(response, "(1) Zoey is a knight")), -3.0, 3.0)


def math_answer(response: str) -> None:
    """Mathematics' grader, its confined workers included."""
    label = r'["\\frac{1}{2}", "x^2+1"]'
    boxed = rf"\boxed{{{response}}}"
    for text in (response, boxed):
        _graded(within(SECONDS, lambda text=text: MATH.grade(text, label)), 0.0, 1.0)  # type: ignore[misc]


def search(response: str) -> None:
    """Search's grader."""
    _graded(within(SECONDS, lambda: SEARCH.grade(response, '["a", "The"]')), -1.0, 1.0)


def rewards(response: str) -> None:
    """The functions that OpenRLHF calls."""
    for domain, label in ((KK, "(1) Zoey is a knight"), (SEARCH, '["a"]')):
        given = Completion(response[:9], response[9:], label).reward_arguments()
        found = within(SECONDS, lambda d=domain, g=given: reward_function(d)(*g))  # type: ignore[misc]
        assert math.isfinite(found["rewards"]) and found["scores"] in (0.0, 1.0)


def labels(label: str) -> None:
    """A label that is none is a ValueError of one line or more, never anything else."""
    for domain in (KK, MATH, SEARCH):
        try:
            domain.grade("", label)
        except ValueError:
            continue


def override(text: str) -> None:
    """A command line's key=value."""
    for given in (text, f"actor.adam.lr={text}", f"sg.weighting={text}", f"sg.eval_sets={text}"):
        try:
            within(SECONDS, lambda given=given: load_config(None, [given]))  # type: ignore[misc]
        except ConfigError as error:
            _is_one_line(error)


def recipe(content: bytes) -> None:
    """A recipe's file, and a run's config.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_bytes(content)
        try:
            within(SECONDS, lambda: load_config(path))
        except ConfigError as error:
            _is_one_line(error)


def prompts(content: bytes) -> None:
    """A file of prompts, by each suffix that is read."""
    fields = PromptSchema("input", "answer", label_fault=lambda label: None)
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".jsonl", ".json", ".csv", ".parquet", ".arrow"):
            path = Path(folder, f"a{suffix}")
            path.write_bytes(content)
            try:
                rows = read_prompts(str(path), "train", fields, PromptIndex())
                within(SECONDS, lambda: [*rows])  # noqa: B023
            except DataError as error:
                _is_one_line(error)


def model(content: bytes) -> None:
    """A model's folder, whose files are anything."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "generation_config.json",
        ):
            Path(folder, name).write_bytes(content)
        try:
            within(SECONDS, lambda: check_model(Path(folder)))
        except ModelError as error:
            _is_one_line(error)


def redaction(text: str) -> None:
    """No password of an address is left, whatever is around it."""
    shown = within(SECONDS, lambda: redact_text(f"{text} http://ann:opensesame@host/ {text}", {}))
    assert "opensesame" not in shown


@functools.cache
def _client() -> TestClient:
    from sg_rlhf.retrieval.app import create_app
    from sg_rlhf.retrieval.index import main
    from sg_rlhf.retrieval.limits import Limits
    from sg_rlhf.retrieval.search import open_index

    folder = Path(tempfile.mkdtemp())
    corpus = folder / "corpus.jsonl"
    text = '{"id": "%d", "contents": "Faust was written by Goethe"}\n'
    corpus.write_text("".join(text % number for number in range(3)))
    assert main(["--corpus", str(corpus), "--encoder", "bm25", "--out", str(folder / "i")]) == 0
    client = TestClient(create_app(open_index(folder / "i"), Limits()))
    client.__enter__()
    return client


def http(content: bytes) -> None:
    """The body of a request to the retriever."""
    client = _client()  # the first time makes an index
    answer = within(
        SECONDS,
        lambda: client.post(
            "/retrieve", content=content, headers={"content-type": "application/json"}
        ),
    )
    assert answer.status_code in (200, 400, 422), answer.text
    answer.json()


def _bodies() -> st.SearchStrategy[bytes]:
    queries = st.lists(st.text(max_size=20) | JSON, max_size=4)
    body = st.fixed_dictionaries({"queries": queries, "topk": JSON, "return_scores": JSON})
    return BYTES | (body | JSON).map(lambda tree: json.dumps(tree).encode())


def _recipes() -> st.SearchStrategy[bytes]:
    return BYTES | TREES.map(lambda tree: json.dumps(tree).encode())


#: Name -> (target, what it is given, how much slower than the others an input is).
TARGETS: dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any], int]] = {
    "kk": (kk, RESPONSES, 1),
    "math": (math_answer, RESPONSES, 20),
    "search": (search, RESPONSES, 1),
    "rewards": (rewards, RESPONSES, 1),
    "labels": (labels, RESPONSES | JSON.map(json.dumps), 1),
    "override": (override, RESPONSES | TREES.map(json.dumps), 4),
    "recipe": (recipe, _recipes(), 2),
    "prompts": (prompts, BYTES, 2),
    "model": (model, _recipes(), 1),
    "redaction": (redaction, RESPONSES, 1),
    "http": (http, _bodies(), 2),
}
