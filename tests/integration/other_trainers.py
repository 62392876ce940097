"""The losses of sg_rlhf/integrations, compared on one batch.

    make .cache/integrations/made
    PYTHONPATH=. .cache/integrations/bin/python tests/integration/other_trainers.py [TRAINER]

A line of JSON for each case: the difference of the losses, and the largest difference of the
gradients as a share of the largest entry. ``against`` is ``policy_loss``, or the trainer's own loss
where the adapter has the weighting ``uniform``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sg_rlhf.algo.aggregation import aggregate, prompt_token_counts
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import Weighting, make_weighting

Result = tuple[Tensor, Tensor]
LOSSES: list[tuple[str, dict[str, Any], str]] = [
    ("grpo_sg", {}, "ppo"),
    ("grpo_sg", {"placement": "outside"}, "ppo"),
    ("grpo_sg", {"placement": "outside"}, "cispo"),
    ("reverse", {"placement": "outside"}, "sapo"),
]
#: The name of the mean in verl and Molt -> in policy_loss.
MEANS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean",
    "prompt-mean-token-mean": "prompt-mean",
}
PROMPTS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
EPS: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.24}


@dataclass(frozen=True)
class Batch:
    """[B, T]: ragged responses, one of them empty, with ratios on both sides of the clip."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor


def batch_of_responses() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows, tokens = len(PROMPTS), 11
    log_probs = -1.5 * torch.randn(rows, tokens, generator=generator).abs()
    noise = 0.3 * torch.randn(rows, tokens, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, tokens)
    lengths = torch.tensor([11, 3, 7, 0, 1, 9, 5, 10])
    mask = torch.arange(tokens) < lengths[:, None]
    return Batch(log_probs.requires_grad_(), log_probs.detach() + noise, advantages, mask)


def row(trainer: str, case: str, mean: str, theirs: Result, against: str, ours: Result) -> None:
    """Print one comparison."""
    assert ours[1].abs().max() > 0
    difference = {
        "loss": (theirs[0].double() - ours[0].double()).abs().item(),
        "gradient": ((theirs[1] - ours[1]).abs().max() / ours[1].abs().max()).item(),
    }
    named = {"trainer": trainer, "case": case, "mean": mean, "against": against}
    print(json.dumps(named | difference), flush=True)


def on_batch(loss_of: Callable[..., Tensor], *arguments: Any, **options: Any) -> Result:
    """A loss of the batch that all cases share, and its gradient in the log-probs."""
    batch = batch_of_responses()
    loss = loss_of(batch, *arguments, **options)
    return loss.detach(), torch.autograd.grad(loss, batch.log_probs)[0]


def ours(
    batch: Batch, weighting: str | Weighting, *, total: float | None = None, **options: Any
) -> Tensor:
    return policy_loss(
        batch.log_probs, batch.old_log_probs, batch.advantages, batch.mask,
        LossSettings(weighting, **EPS, **options),
        total=total, prompt_tokens=prompt_token_counts(batch.mask, PROMPTS),
    ).loss  # fmt: skip


def losses() -> Iterator[tuple[str, Weighting, str]]:
    for name, parameters, objective in LOSSES:
        weighting = make_weighting(name, parameters)
        yield f"{name} {weighting.placement}, {objective}", weighting, objective


def verl() -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    from sg_rlhf.integrations.verl import register

    def loss_of(batch: Batch, name: str, mean: str, **info: Any) -> Tensor:
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2,
            clip_ratio_high=0.24, clip_ratio_c=10.0, global_batch_info=info,
        )  # fmt: skip
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=batch.old_log_probs, log_prob=batch.log_probs,
            advantages=batch.advantages, response_mask=batch.mask, loss_agg_mode=mean,
            config=config, rollout_is_weights=None,
        )  # fmt: skip
        assert all(isinstance(value, float) for value in metrics.values())
        return loss

    register("uniform", "uniform")
    means = ("token-mean", "seq-mean-token-mean")
    for case, weighting, objective in losses():
        register("case", weighting, objective)
        for mean in means:
            options = {"objective": objective, "aggregation": MEANS[mean], "dual_clip": 10.0}
            expected = on_batch(ours, weighting, **options)
            row("verl", case, mean, on_batch(loss_of, "case", mean), "policy_loss", expected)
    own = "verl's vanilla"
    for mean in (*means, "seq-mean-token-sum"):
        expected = on_batch(loss_of, "vanilla", mean)
        row("verl", "uniform, ppo", mean, on_batch(loss_of, "uniform", mean), own, expected)
    shard = {"dp_size": 2, "batch_num_tokens": 100}
    case, mean = "uniform, ppo, one of two ranks", "token-mean"
    expected = on_batch(loss_of, "vanilla", mean, **shard)
    row("verl", case, mean, on_batch(loss_of, "uniform", mean, **shard), own, expected)


def molt() -> None:
    # `import molt.models` needs NeMo AutoModel and CUDA; its file with the losses does not.
    spec = importlib.util.find_spec("molt")
    assert spec is not None and spec.submodule_search_locations
    models = ModuleType("molt.models")
    models.__path__ = [str(Path(next(iter(spec.submodule_search_locations))) / "models")]
    sys.modules["molt.models"] = models
    from molt.models.loss import PolicyLoss

    from sg_rlhf.integrations.molt import register, replace_ppo

    def loss_of(batch: Batch, name: str, mean: str, **options: Any) -> Tensor:
        totals: dict[str, Any] = {}
        if mean == "prompt-mean-token-mean":
            tokens = batch.mask.sum(-1)
            counts = torch.stack([tokens[prompt == PROMPTS].sum() for prompt in PROMPTS])
            totals = {"prompt_token_counts": counts, "global_batch_size": 3}
        loss = PolicyLoss(0.2, 0.24, loss_mode=name, loss_agg_mode=mean, **options)
        tensors = (batch.log_probs, batch.old_log_probs, batch.advantages)
        return loss(*tensors, action_mask=batch.mask, **totals)[0]

    register("uniform", "uniform")
    for number, (case, weighting, objective) in enumerate(losses()):
        register(f"case{number}", weighting, objective)
        for mean, aggregation in MEANS.items():
            expected = on_batch(ours, weighting, objective=objective, aggregation=aggregation)
            theirs = on_batch(loss_of, f"case{number}", mean)
            row("Molt", case, mean, theirs, "policy_loss", expected)
    for mean in MEANS:
        expected = on_batch(loss_of, "ppo", mean)
        theirs = on_batch(loss_of, "uniform", mean)
        row("Molt", "uniform, ppo", mean, theirs, "Molt's ppo", expected)
    replace_ppo()
    theirs = on_batch(loss_of, "ppo", "token-mean", dual_clip=3.0)
    expected = on_batch(ours, "grpo_sg", dual_clip=3.0)
    row("Molt", "grpo_sg inside, as ppo", "token-mean", theirs, "policy_loss", expected)


#: Losses and their totals for trainers that have the token-mean alone.
TOKENS = float(batch_of_responses().mask.sum())


def on_tokens(trainer: str, loss_of: Callable[[Batch, str, dict[str, Any], str], Tensor]) -> None:
    """The losses of :data:`LOSSES`, divided by all tokens."""
    for name, parameters, objective in LOSSES:
        weighting = make_weighting(name, parameters)
        expected = on_batch(ours, weighting, objective=objective, total=TOKENS)
        case = f"{name} {weighting.placement}, {objective}"
        theirs = on_batch(loss_of, name, parameters, objective)
        row(trainer, case, "token-mean", theirs, "policy_loss", expected)


def tinker() -> None:
    """tinker's own code differentiates the loss; the service's answer is made here."""
    from tinker import Datum, ModelInput, TensorData
    from tinker.lib.public_interfaces.training_client import TrainingClient

    from sg_rlhf.integrations.tinker import make_loss

    batch = batch_of_responses()
    lengths = [max(int(n), 1) for n in batch.mask.sum(-1)]  # no datum is empty

    def result_of(name: str, parameters: dict[str, Any], objective: str) -> Result:
        rows = [
            {
                key: x[i, :n].detach()
                for key, x in (
                    ("logprobs", batch.old_log_probs), ("advantages", batch.advantages),
                    ("mask", batch.mask.float()),
                )
            }
            for i, n in enumerate(lengths)
        ]  # fmt: skip
        data = [
            Datum(
                ModelInput.from_ints([0] * n),
                {"target_tokens": torch.zeros(n, dtype=torch.int64), **row},
            )
            for n, row in zip(lengths, rows, strict=True)
        ]
        answer = SimpleNamespace(
            loss_fn_outputs=[
                {"logprobs": TensorData.from_torch(batch.log_probs[i, :n].detach())}
                for i, n in enumerate(lengths)
            ]
        )
        loss = make_loss(
            LossSettings(make_weighting(name, parameters), objective=objective, **EPS), total=TOKENS
        )
        found = TrainingClient._compute_custom_loss(data, loss, answer)
        gradient = torch.zeros_like(batch.mask, dtype=torch.float32)
        for i, datum in enumerate(found.data):
            gradient[i, : lengths[i]] = -datum.loss_fn_inputs["weights"].to_torch()
        return torch.tensor(found.loss_sum), gradient

    for name, parameters, objective in LOSSES:
        weighting = make_weighting(name, parameters)
        expected = on_batch(ours, weighting, objective=objective, total=TOKENS)
        case = f"{name} {weighting.placement}, {objective}"
        row(
            "tinker",
            case,
            "token-mean",
            result_of(name, parameters, objective),
            "policy_loss",
            expected,
        )


def prime_rl() -> None:
    """prime-rl is not on PyPI: its two dataclasses are here as its documentation has them."""
    module = ModuleType("prime_rl.trainer.rl.loss")
    module.LossInputs = SimpleNamespace  # type: ignore[attr-defined]
    module.LossOutputs = namedtuple("LossOutputs", "loss metrics")  # type: ignore[attr-defined]
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"):
        sys.modules[name] = ModuleType(name)
    sys.modules[module.__name__] = module
    from sg_rlhf.integrations.prime_rl import grpo_sg

    def loss_of(batch: Batch, name: str, parameters: dict[str, Any], objective: str) -> Tensor:
        lengths = [int(n) for n in batch.mask.sum(-1)]
        losses = []
        for i, n in enumerate(lengths):
            inputs = SimpleNamespace(
                trainer_logprobs=batch.log_probs[i, :n], loss_weights=None,
                inference_logprobs=batch.old_log_probs[i, :n], ref_logprobs=None,
                advantages=batch.advantages[i, :n], loss_mask=batch.mask[i, :n],
            )  # fmt: skip
            losses.append(grpo_sg(inputs, name, parameters, objective, **EPS).loss)
        return torch.stack(losses).sum() / TOKENS

    on_tokens("prime-rl", loss_of)


def torchtitan() -> None:
    from torchtitan.components.loss import compute_logprobs

    from sg_rlhf.integrations.torchtitan import GRPOSGLoss

    batch = batch_of_responses()
    labels = torch.zeros(batch.mask.shape, dtype=torch.int64)

    def logits_of(batch: Batch) -> Tensor:
        """[B, T, 2]: token 0 has the batch's log-probs."""
        return torch.stack([batch.log_probs, torch.log1p(-batch.log_probs.exp())], -1)

    def loss_of(batch: Batch, name: str, parameters: dict[str, Any], objective: str) -> Tensor:
        config = GRPOSGLoss.Config(
            weighting=name, parameters=parameters, objective=objective, **EPS
        )
        loss, metrics = config.build()(
            logits_of(batch), labels, TOKENS, generator_logprobs=batch.old_log_probs,
            advantages=batch.advantages, loss_mask=batch.mask,
        )  # fmt: skip
        assert metrics["loss/mean"] == loss and metrics["sg/weight_mean"] > 0
        return loss

    assert torch.allclose(compute_logprobs(logits_of(batch), labels), batch.log_probs)
    on_tokens("torchtitan", loss_of)


def trl() -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from sg_rlhf.integrations.trl import GRPOSGTrainer

    path = Path(__file__).parents[2] / "sg_rlhf" / "tiny" / "kk_tiny"
    temperature, steps, tokens, longest = 0.7, 2, 100, 32
    torch.manual_seed(0)
    batch = batch_of_responses()
    mask = batch.mask.long()
    attention = torch.cat([torch.ones(len(mask), 6, dtype=torch.long), mask], 1)
    # TRL's advantages have one value for each response.
    noise = batch.old_log_probs - batch.log_probs.detach()
    advantages = batch.advantages[:, 0]

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def log_probs_of(policy: Any) -> Tensor:
        logits = policy(input_ids=ids, attention_mask=attention).logits[:, 5:-1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[:, 6:, None])[..., 0]

    ids = torch.randint(10, 400, (len(mask), 6))
    with torch.no_grad():
        policy = model()
        for _ in range(mask.shape[1]):  # likely tokens, as unlikely ones all have the weight 1
            probs = policy(input_ids=ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, probs.multinomial(1)], 1)
        sampled = log_probs_of(policy)
    old_log_probs, ref_log_probs = sampled + noise, sampled - noise.roll(1)
    inputs = {
        "prompt_ids": ids[:, :6], "prompt_mask": attention[:, :6], "completion_ids": ids[:, 6:],
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old_log_probs,
        "ref_per_token_logps": ref_log_probs, "num_items_in_batch": torch.tensor(tokens),
    }  # fmt: skip

    def gradient(policy: Any, loss: Tensor) -> Result:
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])

    def theirs(trainer_class: Any, loss_type: str, beta: float = 0.0, **options: Any) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            args = GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, report_to="none", beta=beta,
                loss_type=loss_type, temperature=temperature, epsilon_high=0.24,
                per_device_train_batch_size=8, gradient_accumulation_steps=steps,
                max_completion_length=longest,
            )  # fmt: skip
            trainer = trainer_class(
                model=model(), args=args, reward_funcs=lambda **_: [],
                train_dataset=Dataset.from_list([{"prompt": ""}]), **options,
            )  # fmt: skip
        trainer.current_gradient_accumulation_steps = steps
        trainer.model.train()
        return gradient(trainer.model, trainer.compute_loss(trainer.model, dict(inputs)))

    def expected(
        weighting: str | Weighting, objective: str, loss_type: str, beta: float = 0.0
    ) -> Result:
        policy = model()
        log_probs = log_probs_of(policy)
        level = "seq-mean" if loss_type == "grpo" else "token-mean"
        total = {
            "grpo": len(mask) * steps, "bnpo": int(mask.sum()) * steps, "dapo": tokens,
            "dr_grpo": len(mask) * longest * steps,
        }[loss_type]  # fmt: skip
        settings = LossSettings(weighting, objective=objective, aggregation=level, **EPS)
        loss = policy_loss(log_probs, old_log_probs, advantages, mask, settings, total=total).loss
        if beta:
            assert isinstance(weighting, Weighting)
            weights = token_weights(log_probs, weighting, mask)
            kl = kl_estimate(log_probs, ref_log_probs, weights, "wk3")
            kl = kl * (log_probs - old_log_probs).exp()
            loss = loss + beta * aggregate(kl, mask, total=total)
        return gradient(policy, loss)

    assert token_weights(sampled, make_weighting("grpo_sg"), mask)[mask != 0].std() > 0.1
    for case, weighting, objective in losses():
        options = {"weighting": weighting, "objective": objective}
        for loss_type in ("dapo", "grpo", "bnpo", "dr_grpo"):
            found = theirs(GRPOSGTrainer, loss_type, **options)
            row(
                "TRL", case, loss_type, found, "policy_loss", expected(*options.values(), loss_type)
            )
    weighting = make_weighting("grpo_sg")
    found = theirs(GRPOSGTrainer, "dapo", beta=0.04, weighting=weighting)
    wanted = expected(weighting, "ppo", "dapo", beta=0.04)
    row("TRL", "grpo_sg inside, ppo, weighted KL", "dapo", found, "policy_loss", wanted)
    for beta in (0.0, 0.04):
        for loss_type in ("dapo", "grpo"):
            found = theirs(GRPOSGTrainer, loss_type, beta=beta, weighting="uniform")
            own = theirs(GRPOTrainer, loss_type, beta=beta)
            case = f"uniform, ppo, beta {beta}"
            row("TRL", case, loss_type, found, "TRL's own loss", own)


if __name__ == "__main__":
    trainers = (trl, verl, molt, tinker, prime_rl, torchtitan)
    for trainer in trainers:
        if trainer.__name__ in sys.argv[1:] or not sys.argv[1:]:
            trainer()
