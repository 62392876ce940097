"""The encoder: E5's conventions, and the same vector whatever it is encoded with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer

from sg_rlhf.retrieval.encoder import _E5_ID, Encoder
from sg_rlhf.retrieval.index import build
from sg_rlhf.retrieval.search import DenseOptions, open_index


@pytest.fixture(scope="module")
def model(encoder: Path) -> Encoder:
    return Encoder(str(encoder), max_length=64, device="cpu")


def by_hand(folder: Path, text: str, max_length: int = 64) -> np.ndarray:
    """E5's model card in four lines, for one text and without padding."""
    tokens = AutoTokenizer.from_pretrained(folder)(
        text, truncation=True, max_length=max_length, return_tensors="pt"
    )
    with torch.no_grad():
        mean = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state[0].mean(dim=0)
    return (mean / mean.norm()).numpy()


@pytest.mark.parametrize("text", ["film", "Café in Łódź", "", "北京 " * 300])
def test_prefix_mean_pooling_and_norm(model: Encoder, encoder: Path, text: str) -> None:
    assert model.encode([text], "query")[0] == pytest.approx(
        by_hand(encoder, "query: " + text), abs=1e-6
    )
    assert model.encode([text], "passage")[0] == pytest.approx(
        by_hand(encoder, "passage: " + text), abs=1e-6
    )
    assert np.linalg.norm(model.encode([text], "query")[0]) == pytest.approx(1)


def with_card(
    encoder: Path, out: Path, pooling: dict[str, object], config: dict[str, object], *more: str
) -> Encoder:
    """The encoder as sentence-transformers saves it."""
    shutil.copytree(encoder, out)
    kinds = ["Transformer", "Pooling", "Normalize", *more]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (out / "config_sentence_transformers.json").write_text(json.dumps(config))
    return Encoder(str(out), max_length=64, device="cpu")


@pytest.mark.parametrize(
    ("pooling", "place"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, 0),
        ({"pooling_mode_lasttoken": True}, -1),
        ({"pooling_mode": "lasttoken"}, -1),
    ],
)
def test_prompts_and_pooling_of_a_models_card(
    encoder: Path, tmp_path: Path, pooling: dict[str, object], place: int
) -> None:
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    model = with_card(encoder, tmp_path / "bge", pooling, {"prompts": prompts})
    tokenizer, plain = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder)
    texts = ["film", "river war music " * 5]
    found = {"query": model.encode(texts, "query"), "passage": model.encode(texts, "passage")}
    for kind, prompt in (("query", prompts["query"]), ("passage", "")):
        for text, vector in zip(texts, found[kind], strict=True):
            with torch.no_grad():
                hidden = plain(**tokenizer(prompt + text, return_tensors="pt")).last_hidden_state
            expected = hidden[0, place] / hidden[0, place].norm()
            assert vector == pytest.approx(expected.numpy(), abs=1e-6)


@pytest.mark.parametrize("name", ["e5-base-v2", "node5/bge"])
@pytest.mark.parametrize(("prompts", "prefix"), [(None, ""), ("none", ""), ("e5", "query: ")])
def test_a_card_without_prompts_and_a_folder_of_any_name(
    encoder: Path, tmp_path: Path, name: str, prompts: str | None, prefix: str, capsys
) -> None:
    folder = tmp_path / name
    with_card(encoder, folder, {"pooling_mode_mean_tokens": True}, {})
    assert "--prompts e5" in capsys.readouterr().err
    model = Encoder(str(folder), max_length=64, device="cpu", prompts=prompts)
    assert ("--prompts e5" in capsys.readouterr().err) == (prompts is None)
    assert model.encode(["film"], "query")[0] == pytest.approx(
        by_hand(encoder, prefix + "film"), abs=1e-6
    )


@pytest.mark.parametrize(
    ("name", "e5"),
    [
        ("intfloat/e5-base-v2", True), ("intfloat/multilingual-e5-large", True),
        ("intfloat/e5", True), ("node5/bge", False), ("a/node5-base", False), ("me/e50", False),
    ],
)  # fmt: skip
def test_the_ids_of_e5(name: str, e5: bool) -> None:
    """E5's own files have no prompts, and its card asks for them."""
    assert bool(_E5_ID(name)) == e5


def test_an_index_has_the_prompts_of_its_build(encoder: Path, tmp_path: Path) -> None:
    """Also where the encoder is renamed."""
    first, second = tmp_path / "e5", tmp_path / "renamed"
    with_card(encoder, first, {"pooling_mode_mean_tokens": True}, {})
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "0", "contents": "a river"}\n')
    build(corpus, str(first), tmp_path / "index", prompts="e5", device="cpu", max_length=64)
    first.rename(second)

    def prompt() -> str:
        opened: Any = open_index(tmp_path / "index", encoder=str(second), device="cpu")
        return opened._backend._encoder.prompts["query"]

    assert prompt() == "query: "
    with pytest.raises(ValueError, match="--prompts none: index .* has the prompts of its build"):
        open_index(tmp_path / "index", None, str(second), options=DenseOptions(prompts="none"))


def test_modules_that_are_not_supported(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Dense with pooling .* are not supported"):
        with_card(encoder, tmp_path / "a", {"pooling_mode": "mean"}, {}, "Dense")
    with pytest.raises(ValueError, match="with pooling .'max'. are not supported"):
        with_card(encoder, tmp_path / "b", {"pooling_mode": "max"}, {})


def test_query_and_passage_differ(model: Encoder) -> None:
    assert not np.allclose(model.encode(["film"], "query"), model.encode(["film"], "passage"))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), max_size=12))
def test_alone_or_in_a_batch_bit_for_bit(model: Encoder, texts: list[str]) -> None:
    together = model.encode(texts, "query")
    assert together.shape == (len(texts), model.dimension)
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(model.encode([text], "query")[0], vector)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_the_batch_size_changes_nothing(model: Encoder, texts: list[str], batch_size: int) -> None:
    expected = model.encode(texts[:70], "passage")
    assert np.array_equal(model.encode(texts[:70], "passage", batch_size), expected)


def test_what_is_cut_off_does_not_count(model: Encoder) -> None:
    long = "film river " * 400
    assert np.array_equal(
        model.encode([long], "query"), model.encode([long + "different ending"], "query")
    )


def test_identity_is_of_the_files(model: Encoder, encoder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(encoder, copy)
    (copy / "README.md").write_text("not part of it")
    same = Encoder(str(copy), device="cpu").identity
    assert same["fingerprint"] == model.identity["fingerprint"]
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert Encoder(str(copy), device="cpu").identity["fingerprint"] != same["fingerprint"]


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--encoder {tmp_path}"):
        Encoder(str(tmp_path))


def test_longer_than_the_model_reads(encoder: Path) -> None:
    with pytest.raises(ValueError, match="--max-length 513: .* reads at most 512 tokens"):
        Encoder(str(encoder), max_length=513)
