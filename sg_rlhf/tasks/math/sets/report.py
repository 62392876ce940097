"""What the data command prints of a mathematics set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sg_rlhf.tasks.overlap import MOSTLY


def lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What is printed of a data set that was made."""
    counts, duplicates = manifest["counts"], manifest["duplicates"]
    written = counts["train"] + counts["test"]
    yield "Mathematics"
    for label, value, note in (
        ("rows read", counts["read"], ""),
        ("without an answer, dropped", counts["without_answer_dropped"], ""),
        (
            "with a gold that the grader refuses, dropped",
            counts["ungradable_dropped"],
            "see manifest",
        ),
        (
            "different problems",
            duplicates["different_problems"],
            f"by normalised text; {duplicates['different_texts']} different texts",
        ),
        ("with golds that differ", duplicates["problems_with_different_golds"], "see manifest"),
        ("in an evaluation set, dropped", counts["overlap_dropped"], ""),
        ("duplicates dropped", counts["duplicates_dropped"], ""),
        ("train", counts["train"], ""),
        ("test", counts["test"], ""),
    ):
        yield f"  {label:<46}{value:>8}{f'  ({note})' if note and value else ''}"
    yield "  answers"
    for name, entry in manifest["answer_types"].items():
        share = entry["rows"] / written
        yield f"    {name:<44}{entry['rows']:>8} {share:>7.1%}  e.g. {_cut(entry['example'], 40)}"
    yield from _overlap(manifest)


def next_step(out: Path, manifest: Mapping[str, Any]) -> str:
    """The command that comes next."""
    source = manifest["source"]
    if source["kind"] == "generated":
        recipe = "grpo_sg_tiny_cpu.yaml"
    else:
        data = "orz" if source.get("name") == "orz57k" else "dsr"
        recipe = f"grpo_sg_{data}_qwen2.5-7b.yaml"
    held_out = [name for name in ("math500.jsonl", "test.jsonl") if _rows(manifest, name)]
    test = f" eval.dataset={out / held_out[0]}" if held_out else ""
    return (
        f"python -m sg_rlhf.train --config configs/math/{recipe} "
        f"data.prompt_dataset={out / 'train.jsonl'}{test}"
    )


def _overlap(manifest: Mapping[str, Any]) -> Iterator[str]:
    n = manifest["options"]["ngram"]
    if not manifest["overlap"]:
        yield "  overlap with the evaluation sets was not looked for (--eval-dir)"
        return
    yield (
        f"  problems of an evaluation set that the training data has: with the same text, with "
        f"{MOSTLY:.0%} or\n  more of its runs of {n} words, with some run (often only a phrase); "
        f"under {n} words: same text only"
    )
    yield (
        f"    {'set':<14}{'problems':>9}{'same':>7}{MOSTLY:>7.0%}+{'some':>6}{f'under {n}':>10}"
        "   nearest, with the share of its runs"
    )
    for name, entry in manifest["overlap"].items():
        best = entry["examples"][:1]
        nearest = "".join(
            f"{e['test_id']} ~ {e['train_id']} {e['share']:.2f}: {_cut(e['test'], 50)}"
            for e in best
        )
        yield (
            f"    {name:<14}{entry['problems']:>9}{entry['exact']:>7}{entry['mostly']:>8}"
            f"{entry['some']:>6}{entry['too_short_for_ngrams']:>10}   {nearest or '-'}"
        )


def _cut(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _rows(manifest: Mapping[str, Any], name: str) -> int:
    return int(manifest["files"].get(name, {"rows": 0})["rows"])
