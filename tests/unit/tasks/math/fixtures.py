"""Small files of the published shapes, made here."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."


def reference_row(problem, gold, index=0, source="deepscaler"):
    """A row of the reference runs' parquet files; `gold` is a text, a float or a list."""
    return {
        "data_source": source,
        "prompt": [{"content": problem + SUFFIX, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
    }


def orz_row(problem, gold):
    """An item of Open-Reasoner-Zero's JSON."""
    return [
        {"from": "human", "value": problem},
        {"from": "assistant", "ground_truth": {"value": gold, "pass_at_n": 0.75}},
    ]


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
