"""The engine of evaluation draws the same tokens by the same seeds, whatever is sampled beside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.integration, pytest.mark.full]

#: In a process of its own: vLLM's engine runs in the process that asks.
PROGRAM = """
import json
from pathlib import Path
from sg_rlhf.eval.engines.start import set_environment
set_environment("vllm", cpu=True, replicas=1)
from transformers import AutoTokenizer
from sg_rlhf.eval.engines.base import EngineOptions, Request, drain
from sg_rlhf.eval.engines.start import start_one
from sg_rlhf.eval.model import find_model
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import generate
tiny = Path("sg_rlhf/tiny/kk_tiny")
tokenizer = AutoTokenizer.from_pretrained(tiny)
prompts = [build_prompt(p.quiz) for size in (2, 4) for p in generate(size, 4, seed=0)]
asked = [
    Request(str(n), p, tuple(tokenizer(p)["input_ids"]), 1.0, (1.0, 0.9)[n % 2], 60, 1000 + n)
    for n, p in enumerate(prompts)
]
found = {}
engine = start_one(EngineOptions("vllm", find_model(str(tiny), None), 1024, "float32", cpu=True))
for way, requests in (("together", asked), ("backwards", asked[::-1]), ("few", asked[:3])):
    done = {c.key: c.token_ids for some in drain(engine, requests) for c in some}
    found[way] = dict(sorted(done.items()))
engine.close()
print(json.dumps(found))
"""


def test_a_seed_decides_the_tokens() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=1800,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first = found["together"]
    assert len(first) == 8 and all(len(tokens) > 5 for tokens in first.values())
    for way, tokens in found.items():
        assert tokens == {key: first[key] for key in tokens}, way
