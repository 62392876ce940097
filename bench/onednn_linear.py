"""What an encoder's linear layers take on a CPU by oneDNN, and by torch's own way (MKL).

    python bench/onednn_linear.py --data DIR --out bench/results/onednn_linear.json

Matrix products in float32, one thread: GFLOP/s. Then whole encoders with random weights, 64
questions of dev sets and 64 passages: milliseconds of processor time each. The two ways by turns,
the least of each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
from arguments import as_json
from machine import provenance
from retrieval import SHAPES, encoder
from retrieval_load import make_queries

from sg_rlhf.retrieval import onednn
from sg_rlhf.retrieval.corpus import iterate_contents
from sg_rlhf.retrieval.encoder import Encoder, Kind

TEXTS = 64
WAYS = ("torch", "onednn")


def least(work: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Seconds of processor time of each way, by turns, after one that is not timed."""
    times: dict[str, list[float]] = {way: [] for way in work}
    for turn in range(turns + 1):
        for way, run in work.items():
            start = time.process_time()
            run()
            if turn:
                times[way].append(time.process_time() - start)
    return {way: min(of_way) for way, of_way in times.items()}


def product(rows: int, inputs: int, outputs: int, turns: int) -> dict[str, object]:
    """A linear layer of each way."""
    linear = torch.nn.Linear(inputs, outputs)
    x = torch.randn(rows, inputs)
    flops = 2 * rows * inputs * outputs
    repeats = max(1, int(1e10 / flops))

    def often(layer: torch.nn.Module) -> Callable[[], object]:
        return lambda: [layer(x) for _ in range(repeats)]

    with torch.inference_mode():
        seconds = least({"torch": often(linear), "onednn": often(onednn.Linear(linear))}, turns)
    speed = {way: round(flops * repeats / seconds[way] / 1e9, 1) for way in WAYS}
    return {"rows": rows, "in": inputs, "out": outputs, "gflops_per_s": speed}


def encoders(folder: Path, data: Path, kind: Kind, turns: int) -> list[dict[str, object]]:
    """Both ways of each width."""
    corpus = data / "corpus.jsonl"
    source = make_queries(data) if kind == "query" else iterate_contents(corpus)
    texts = list(islice(source, TEXTS))
    found = []
    for shape in SHAPES:
        name = folder / f"{shape[0]}"
        if not name.exists():
            encoder(name, corpus, shape)
        with mock.patch.object(onednn, "available", return_value=False):
            plain = Encoder(str(name), device="cpu")
        ours = Encoder(str(name), device="cpu")
        tokens = plain.tokens(texts, kind)
        ways = {"torch": plain, "onednn": ours}
        passes = {way: partial(ways[way].forward, tokens) for way in WAYS}
        seconds = least(passes, turns)
        found.append({
            "width": shape[0],
            "layers": shape[1],
            "texts": {"query": "questions", "passage": "passages"}[kind],
            "tokens_each": round(sum(map(len, tokens["input_ids"])) / TEXTS, 1),
            "cpu_ms_each": {way: round(seconds[way] / TEXTS * 1e3, 3) for way in WAYS},
            "ratio": round(seconds["onednn"] / seconds["torch"], 3),
            "largest_difference": float(abs(plain.forward(tokens) - ours.forward(tokens)).max()),
        })  # fmt: skip
    return found


def main() -> None:
    """Time both ways and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.jsonl, dev/")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--turns", type=int, default=7, help="timed turns of each [7]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        result = {
            **provenance("onednn_linear.py", "torch", "transformers"),
            "command": __doc__.splitlines()[2].strip(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "products": [
                product(rows, *shape, arguments.turns)
                for rows in (84, 1344)
                for shape in ((256, 1024), (768, 768), (768, 3072), (3072, 768))
            ],
            "encoders": [
                row
                for kind in ("query", "passage")
                for row in encoders(Path(name), arguments.data, kind, arguments.turns)
            ],
        }
    arguments.out.write_text(as_json(result))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
