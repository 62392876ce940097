"""`python -m sg_rlhf.data reverse`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sg_rlhf.data_io.command_options import generate_options
from sg_rlhf.tasks.data_command import DataCommand, LoadTokenizer, Made, Plan
from tests.domains.reverse.domain import Row, rows


class ReverseData(DataCommand):
    """Generates rows of letters."""

    description = "Letters to write in the reverse order, generated."

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--generate", nargs="*", metavar="KEY=VALUE", default=[])

    def plan(self, args: argparse.Namespace, load_tokenizer: LoadTokenizer) -> Plan:
        options = generate_options(args.generate, {"count": 64, "test_count": 16, "seed": 0})
        return Plan({"source": {"kind": "generated", **options}}, lambda: _made(**options))

    def report(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        yield f"Reverse: {manifest['counts']['train']} rows to train on"


def _made(count: int, test_count: int, seed: int) -> Made:
    train, test = rows(count, seed, held_out=False), rows(test_count, seed, held_out=True)
    files = {"train.jsonl": _records(train), "test.jsonl": _records(test)}
    return Made(files, {"counts": {"train": len(train), "test": len(test)}})


def _records(found: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"input": r.prompt, "answer": r.answer, "datasource": f"reverse_{len(r.letters)}"}
        for r in found
    ]


COMMAND = ReverseData()
