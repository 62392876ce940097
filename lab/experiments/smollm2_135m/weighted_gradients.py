"""What the token weights do to the first update of a pretrained model, on its own responses.

    python -m lab.experiments.smollm2_135m.weighted_gradients --model data/smollm2-135m

Two sets of 64 prompts x 8 responses. Figures of the tokens (probability, entropy, weight), and of
each algorithm's gradient compared with GRPO's: over all prompts, and over 4 batches of 16. The
gradients are exact, over all parameters in float32, at ratio 1, where reference and policy are the
same. Vectors are kept in runs/weighted_gradients, so a stopped measurement resumes there.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from lab.experiments.forks.gate import VARIES
from lab.measure import fixed_batch
from lab.measure.checkpoint import load_model, load_tokenizer
from lab.measure.fixed_batch import BatchRow, FixedBatch
from lab.measure.rollouts import Sampling, load_reward, sample_batch
from lab.measure.sharpness import surrogate_of
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.resources import machine
from sg_rlhf.config import load_config
from sg_rlhf.data_io import model_folder
from sg_rlhf.tasks.arithmetic.data import DATA

RESULT, RUNS = Path(__file__).with_suffix(".json"), Path("runs/weighted_gradients")
PROMPTS, BATCHES, GROUP = 64, 4, 8
#: name: (keys of `--generate` that differ from the defaults, maximum tokens of a response)
SETS: dict[str, tuple[dict[str, Any], int]] = {
    "equations": ({}, 16), "prose": ({"first": 9, "shown": 0}, 24),
}  # fmt: skip
ZERO_LOW = "sg.weighting.type=lab.experiments.forks_part2.zero_low:ZeroLow"
#: Algorithm -> recipe and overrides. Where policy and reference are the same, only the KL term of
#: TR-GRPO has a gradient. It is left out where all advantages of a prompt are 0.
ALGORITHMS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("grpo", []),
    "inside": ("grpo_sg", []),
    "tr_grpo": ("tr_grpo", []),
    "outside": ("grpo_sg_outside", []),
    "outside_dose_3": ("grpo_sg_outside", ["sg.weighting.lower=0.5", "sg.weighting.upper=1.5"]),
    "mask_only": ("mask_only", []),
    "zero_low": ("uniform", [ZERO_LOW]),
}
QUANTILES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95)
WEIGHT = make_weighting("grpo_sg")
LOW = 0.1221  #: the published weight is 1 below, rises up to VARIES, and is 1.4 above


def sampled(name: str, folder: str, model: PreTrainedModel) -> FixedBatch:
    """The responses of one set; sampled once."""
    path, tokenizer = RUNS / f"{name}.json", load_tokenizer(folder)
    if not path.exists():
        keys, length = SETS[name]
        assert DATA.generator is not None
        keys = {**DATA.generator.defaults, "count": PROMPTS, "test_count": 0, **keys}
        settings = Sampling(PROMPTS, GROUP, 1.0, length)
        reward = load_reward("domain:arithmetic")
        rows = DATA.generator.make(**keys)[0]
        batch = sample_batch(path, rows, folder, model, tokenizer, settings, reward)
        fixed_batch.save(batch, path, tokenizer)
    return fixed_batch.load(path)


def log_probs(model: PreTrainedModel, group: Sequence[BatchRow]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the responses to one prompt, which is read once: log-probs, entropies and mask, [G, T]."""
    prompt, longest = group[0].prompt, max(len(row.response) for row in group)
    ids = torch.tensor([[*row.response, *[0] * (longest - len(row.response))] for row in group])
    mask = torch.arange(longest) < torch.tensor([[len(row.response)] for row in group])
    read = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    read.past_key_values.batch_repeat_interleave(len(group))
    # Attention is causal: padding behind a response has no effect on it.
    output = model(ids[:, :-1], past_key_values=read.past_key_values)
    all_logits = torch.cat([read.logits.expand(len(group), -1, -1), output.logits], 1)
    log_pi = all_logits.log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1).detach()
    return log_pi.gather(2, ids[..., None])[..., 0], entropy, mask


@functools.cache
def loss_of(name: str) -> tuple[LossSettings, float]:
    """The loss of an algorithm, and the coefficient of its KL."""
    recipe, keys = ALGORITHMS[name]
    config = load_config([f"configs/algorithms/{recipe}.yaml"], keys)
    loss = surrogate_of(config, [])
    settings = LossSettings(loss.weights, loss.eps_low, loss.eps_high, loss.dual_clip)
    return settings, float(config.value("algo.kl.init_coef"))


def coefficients(log_p: Tensor, mask: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """For each algorithm, the derivative of its loss in the log-prob of each token, [G, T]."""
    found = {}
    for name in ALGORITHMS:
        (settings, kl_coef), at = loss_of(name), log_p.detach().requires_grad_()
        value = policy_loss(at, log_p.detach(), advantage, mask, settings, total=1).loss
        if name == "tr_grpo":
            weights = token_weights(at, make_weighting(settings.weighting))
            kl = kl_estimate(at, log_p.detach(), weights, "wk3_eq11")
            value = value + kl_coef * (kl * mask).sum()
        found[name] = torch.autograd.grad(value, at)[0]
    return found


def of_batch(name: str, number: int, model: PreTrainedModel, batch: FixedBatch) -> None:
    """Write each algorithm's gradient of 16 prompts, and (p, entropy, A) of their tokens."""
    params, tokens = list(model.parameters()), []
    sums = {algorithm: [torch.zeros_like(p) for p in params] for algorithm in ALGORITHMS}
    size = len(batch.rows) // BATCHES
    for start in range(number * size, (number + 1) * size, GROUP):
        group = batch.rows[start : start + GROUP]
        signal = any(row.advantage for row in group)
        with torch.set_grad_enabled(signal):
            log_p, entropy, mask = log_probs(model, group)
        advantage = torch.tensor([[row.advantage] for row in group]).expand_as(log_p)
        tokens.append(torch.stack([v[mask] for v in (log_p.detach().exp(), entropy, advantage)]))
        found = coefficients(log_p, mask, advantage) if signal else {}
        for algorithm, coefficient in found.items():
            parts = torch.autograd.grad(log_p, params, coefficient, retain_graph=True)
            torch._foreach_add_(sums[algorithm], parts)
        print(f"{name}: prompt {start // GROUP + 1} of {PROMPTS}", flush=True)
    for algorithm, total in sums.items():
        np.save(RUNS / f"{name}_{number}_{algorithm}.npy", torch.cat([p.flatten() for p in total]))
    np.save(RUNS / f"{name}_{number}.npy", torch.cat(tokens, 1))


def of_tokens(batch: FixedBatch, p: Any, entropy: Any, advantage: Any) -> dict[str, Any]:
    """Figures of the tokens. A token's gradient at the logits has about the size |A| (1 - p)."""
    weight, mass = WEIGHT.curve(torch.tensor(p)).numpy(), np.abs(advantage) * (1 - p)
    rewards = np.array([row.reward for row in batch.rows]).reshape(-1, GROUP)
    parts = {"low": p < LOW, "middle": (p >= LOW) & (p < VARIES), "high": p >= VARIES}
    return {
        "accuracy": rewards.mean(), "groups_with_signal": (rewards.std(1) > 0).mean(),
        "tokens": len(p), "tokens_per_response": len(p) / len(batch.rows),
        "quantiles_of_p": dict(zip(map(str, QUANTILES), np.quantile(p, QUANTILES), strict=True)),
        "histogram_of_p": np.histogram(p, 20, (0, 1))[0] / len(p),
        "histogram_of_gradient": np.histogram(p, 20, (0, 1), weights=mass)[0] / mass.sum(),
        "share_of_tokens": {name: part.mean() for name, part in parts.items()},
        "share_of_gradient": {name: mass[part].sum() / mass.sum() for name, part in parts.items()},
        "weight_mean": weight.mean(), "weight_std": weight.std(), "entropy": entropy.mean(),
    }  # fmt: skip


def compared(name: str, algorithm: str) -> dict[str, Any]:
    """Cosine and ratio of norms, of the sum over batches, and of each with a 95 % t interval."""
    pair = [
        [np.load(RUNS / f"{name}_{k}_{a}.npy", mmap_mode="r") for k in range(BATCHES)]
        for a in (algorithm, "grpo")
    ]
    figures: dict[str, list[float]] = {"cosine": [], "norm_ratio": []}
    for both in (*zip(*pair, strict=True), map(sum, pair)):
        a, b = map(np.asarray, both)
        aa, bb, ab = (float((x * y).sum(dtype=np.float64)) for x, y in ((a, a), (b, b), (a, b)))
        figures["cosine"].append(ab / (aa * bb) ** 0.5 if aa else math.nan)
        figures["norm_ratio"].append((aa / bb) ** 0.5)
    result = {}
    for figure, (*each, whole) in figures.items():
        half = stats.t.ppf(0.975, len(each) - 1) * stats.sem(each)
        interval = [np.mean(each) - half, np.mean(each) + half]
        result[figure] = {"all": whole, "batches": each, "ci95": interval}
    return result


def measured(name: str, folder: str, model: PreTrainedModel) -> dict[str, Any]:
    """Every figure of one set of prompts."""
    batch = sampled(name, folder, model)
    for number in range(BATCHES):
        if not (RUNS / f"{name}_{number}.npy").exists():
            of_batch(name, number, model, batch)
    tokens = np.concatenate([np.load(RUNS / f"{name}_{k}.npy") for k in range(BATCHES)], 1)
    algorithms = {a: compared(name, a) for a in ALGORITHMS if a != "grpo"}
    return {**of_tokens(batch, *tokens.astype(float)), "algorithms": algorithms}


def table(result: dict[str, Any]) -> str:
    """The table of docs/method.md."""
    sets = result["sets"]
    lines = ["| gradient of | " + " | ".join(f"{name}: cosine | norm" for name in sets) + " |"]
    lines.append("|---|" + "--:|--:|" * len(sets))
    for algorithm in next(iter(sets.values()))["algorithms"]:
        cells = []
        for found in sets.values():
            cosine, norm = (found["algorithms"][algorithm][k] for k in ("cosine", "norm_ratio"))
            low, high = cosine["ci95"]
            cells += [f"{cosine['all']:.3f} ({low:.3f} to {high:.3f})", f"{norm['all']:.2f}"]
        lines.append(f"| {algorithm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure both sets, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    args = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    model = load_model(args.model, torch.float32, torch.device("cpu"))
    result: dict[str, Any] = {
        "model": model_folder.source(Path(args.model)) or args.model,
        "prompts": PROMPTS, "group": GROUP, "temperature": 1.0, "batches": BATCHES,
        "sets": {
            name: {**keys, "max_tokens": length, **measured(name, args.model, model)}
            for name, (keys, length) in SETS.items()
        },
        "command": "python -m lab.experiments.smollm2_135m.weighted_gradients "
        f"--model {args.model}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {**machine(), "threads": torch.get_num_threads()},
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }  # fmt: skip
    text = json.dumps(result, indent=1, default=lambda value: value.tolist())
    write_whole(RESULT, text + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
