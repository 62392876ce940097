"""The peer of `lab/bench/retrieval.py`: a usual retrieval server, one request at a time.

    python lab/bench/plain_retrieval_server.py --faiss-index FILE --corpus FILE \
        --encoder DIR --port N

FastAPI with a plain `def` endpoint, so each request has a thread of the pool and encodes and
searches for itself; the corpus is a `datasets` table, the index a faiss file read into memory. That
is the shape of Search-R1's reference server (`search_r1/search/retrieval_server.py`), written anew
for the CPU; it answers with scores only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets
import faiss
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer


class Query(BaseModel):
    """What clients send."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = True


class PlainRetriever:
    """Tokenizer, model, index and corpus behind one call."""

    def __init__(self, index: Path, corpus: Path, encoder: Path, cache: Path) -> None:
        self.index = faiss.read_index(str(index))
        self.corpus = datasets.load_dataset(
            "json", data_files=str(corpus), split="train", cache_dir=str(cache)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(encoder)
        self.model = AutoModel.from_pretrained(encoder).eval()

    @torch.no_grad()
    def encode(self, queries: list[str]) -> Any:
        """E5's query vectors, padded to the longest of the request."""
        tokens = self.tokenizer(
            [f"query: {query}" for query in queries],
            max_length=256, padding=True, truncation=True, return_tensors="pt",
        )  # fmt: skip
        hidden = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=-1).numpy()

    def search(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Passages with scores, in the contract's shape."""
        scores, rows = self.index.search(self.encode(queries), topk)
        return [
            [
                {"document": self.corpus[row], "score": score}
                for row, score in zip(some_rows, some_scores, strict=True)
            ]
            for some_rows, some_scores in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def main() -> None:
    """Load everything and serve on 127.0.0.1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faiss-index", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="folder for `datasets`' table")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    retriever = PlainRetriever(args.faiss_index, args.corpus, args.encoder, args.cache)
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    # Without annotations that are strings: FastAPI could not look up a local class.
    def retrieve(request: Query) -> dict[str, Any]:
        return {"result": retriever.search(request.queries, request.topk)}

    app.post("/retrieve")(retrieve)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
