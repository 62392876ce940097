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
import asyncio
from dataclasses import replace
from sg_rlhf.eval.engines.vllm import VllmEngine, set_environment
set_environment(cpu=True)
from transformers import AutoTokenizer
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.model import find_model
from sg_rlhf.tasks.kk.suite import SUITE
from sg_rlhf.tasks.questions import Question
from sg_rlhf.tasks.suite import Sampling
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import generate
tiny = Path("sg_rlhf/tiny/kk_tiny")
tokenizer = AutoTokenizer.from_pretrained(tiny)
prompts = [build_prompt(p.quiz) for size in (2, 4) for p in generate(size, 4, seed=0)]
nuclei = [
    replace(SUITE.benchmarks[0], settings=Sampling(1.0, 60, top_p=top_p)) for top_p in (1.0, 0.9)
]
asked = [
    Sample(
        nuclei[n % 2], Question(str(n), p, ""), 0, tuple(tokenizer(p)["input_ids"]), 60, 1000 + n
    )
    for n, p in enumerate(prompts)
]
found = {}
engine = VllmEngine(find_model(str(tiny), None), 1024, "float32", True)
async def generate(samples):
    return await asyncio.gather(*map(engine.generate, samples))
for way, samples in (("together", asked), ("backwards", asked[::-1]), ("few", asked[:3])):
    done = {s.question.id: s.token_ids for s in asyncio.run(generate(samples))}
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
