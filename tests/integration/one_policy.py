"""One process of a test: what vLLM sampled by, and what the trainer says of the same tokens.

    python one_policy.py OUT

Writes a list of {temperature, top_p, tokens, log_prob, entropy, truncated} to OUT: the largest
differences between the engine and upstream's Actor on this project's path without logits, in
float32; `truncated` against the engine's log-probs plus the log of the mass that top-p kept.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import sg_rlhf.tiny
from sg_rlhf.overlay.patches import table as register
from sg_rlhf.sampling import vllm_settings
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import generate

MODEL = str(Path(sg_rlhf.tiny.__file__).parent / "kk_tiny")
CONTEXT = 256
SETTINGS = [(1.0, 1.0), (0.7, 1.0), (1.6, 1.0), (0.01, 1.0), (1.0, 0.8), (1.6, 0.5)]


def nucleus_mass(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The probability of the fewest likeliest tokens that reach ``top_p``; [T, V] -> [T]."""
    probabilities = logits.softmax(-1).sort(-1, descending=True).values
    before = probabilities.cumsum(-1) - probabilities
    return (probabilities * (before < top_p)).sum(-1)


@torch.no_grad()
def differences(engine: Any, actor: Any, temperature: float, top_p: float) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=100, seed=1, logprobs=-1
    )
    prompts = [build_prompt(puzzle.quiz) for puzzle in generate(3, 4, seed=0)]
    found: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "tokens": 0,
        "log_prob": 0.0, "entropy": 0.0, "truncated": 0.0,
    }  # fmt: skip
    actor.temperature = temperature
    for output in engine.generate(prompts, params, use_tqdm=False):
        sampled = output.outputs[0].token_ids
        ids = torch.tensor([[*output.prompt_token_ids, *sampled]])
        n = len(sampled)
        log_probs, more = actor(
            ids, torch.ones(1, n, dtype=torch.bool), torch.ones_like(ids),
            return_output=True, return_entropy=True,
        )  # fmt: skip
        ours, entropy = log_probs[0], more.entropy[0, -n:]
        logits = actor.model(ids).logits[0, -n - 1 : -1].float() / temperature
        # -inf outside of top-p: 0 of the entropy.
        table = torch.full(logits.shape, -torch.inf)
        for row, tokens in zip(table, output.outputs[0].logprobs, strict=True):
            row[list(tokens)] = torch.tensor([one.logprob for one in tokens.values()])
        theirs = table[torch.arange(n), torch.tensor(sampled)]
        their_entropy = torch.special.entr(table.exp()).sum(-1)
        untruncated = theirs + nucleus_mass(logits, top_p).log()
        for key, one, other in (
            ("log_prob", ours, theirs),
            ("entropy", entropy, their_entropy),
            ("truncated", ours, untruncated),
        ):
            found[key] = max(found[key], float((one - other).abs().max()))
        found["tokens"] += n
    return found


def main(out: Path) -> None:
    os.environ |= {"SG_PLATFORM": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    register.install()
    from vllm import LLM

    from sg_rlhf.overlay.model.log_prob_head import PolicyModel

    engine = LLM(
        MODEL, dtype="float32", max_model_len=CONTEXT, seed=0, disable_log_stats=True,
        logprobs_mode="processed_logprobs", max_logprobs=-1,
        **vllm_settings.engine_settings_here(), **vllm_settings.cpu_settings(CONTEXT),
    )  # fmt: skip
    actor = PolicyModel(MODEL, attn_implementation="sdpa").float().eval()
    out.write_text(json.dumps([differences(engine, actor, *one) for one in SETTINGS]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
