"""A generated corpus in Search-R1's format, a random encoder, and the indexes made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lab.bench.random_encoder import save_random_encoder
from sg_rlhf.retrieval.index import build

ROWS = 600
SYLLABLES = ("ba", "cor", "dun", "el", "fir", "gan", "hol", "is", "jur", "kem", "lo", "mar")


def make_texts(rows: int = ROWS, seed: int = 0) -> list[str]:
    """Passages with a few words of their own each and many in common; some are not in ASCII."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=3)) for _ in range(rows * 2)]
    common = ["film", "city", "river", "born", "famous", "war", "music", "the", "of", "in"]
    accents = ["Café", "Łódź", "北京", "naïve", "Ωmega"]
    texts = []
    for row in range(rows):
        title = f"{words[2 * row]} {words[2 * row + 1]}".title()
        body = rng.choices(common, k=20) + rng.choices(words, k=12) + [words[2 * row]]
        body += [rng.choice(accents)] if row % 7 == 0 else []
        rng.shuffle(body)
        texts.append(f'"{title}"\n{" ".join(body)}.')
    return texts


def write_corpus(path: Path, texts: list[str]) -> Path:
    lines = (
        json.dumps({"id": str(row), "contents": text}, ensure_ascii=row % 2 == 0)
        for row, text in enumerate(texts)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", texts)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "e5_random"
    save_random_encoder(folder, texts)
    return folder


@pytest.fixture(scope="session")
def bm25_index(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("bm25") / "index"
    build(corpus, "bm25", out)
    return out


@pytest.fixture(scope="session")
def flat_index(tmp_path_factory: pytest.TempPathFactory, corpus: Path, encoder: Path) -> Path:
    out = tmp_path_factory.mktemp("flat") / "index"
    build(corpus, str(encoder), out, max_length=64)
    return out
