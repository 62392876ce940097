"""GRPO on one device in one file, around ``sg_rlhf.algo``: no engine, no DeepSpeed, no Ray.

    python -m lab.loop --config RECIPE [--config RECIPE] --run-dir DIR [KEY=VALUE ...]

For studies with many short runs of a small model, where starting an engine costs more than the
training (`trainer: lab.loop` in a study's file). An optimizer step has the loss and the gradient of
`sg_rlhf.train` (tests/integration/test_loop.py). What differs:

- PyTorch samples, from the trainer's own weights in float32. So there is no mismatch to correct.
- A step takes whole prompts, in the order in which they were asked.
- A run does not resume. It writes the rows of `sg_rlhf.train` and no checkpoint.

A key that the loop does not follow is refused, unless it is at its default or has no part in what a
run trains here. One thread on a CPU, so that runs can share the cores.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import RandomSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.measure.checkpoint import (
    MeasureError,
    TokenRow,
    choose_device,
    load_model,
    load_tokenizer,
)
from lab.measure.fixed_batch import read_data
from lab.measure.rollouts import Answer, Sampling, answers, load_reward
from sg_rlhf.algo.advantages import group_advantages
from sg_rlhf.algo.aggregation import aggregate
from sg_rlhf.algo.kl import kl_estimate
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import TokenContext, Uniform
from sg_rlhf.common.argument_types import OneLineParser, progress_bar
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.resources import machine
from sg_rlhf.config import Config, ConfigError, load_config
from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES, flags
from sg_rlhf.config.weighting_resolution import built_objective, built_weighting
from sg_rlhf.data_io.records import DataError
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.tiny.sampling import pad_id

#: Keys that the loop follows, or whose only supported value `check` names.
FOLLOWED = (
    "actor.adam.", "actor.dual_clip", "actor.eps_clip", "actor.max_norm",
    "actor.model_name_or_path", "actor.policy_loss_type", "algo.kl.estimator", "algo.kl.init_coef",
    "algo.kl.use_loss", "data.max_samples", "data.prompt_dataset", "eval.steps",
    "reward.clip_range", "reward.remote_url", "rollout.batch_size", "rollout.max_new_tokens",
    "rollout.n_samples_per_prompt", "rollout.temperature", "train.batch_size",
    "train.num_episodes", "train.seed",
)  # fmt: skip
#: Keys of the engine, of memory, of ranks, of files, and of rows that every domain writes.
WITHOUT_EFFECT = (
    "actor.gradient_checkpointing_enable", "actor.num_", "ckpt.", "data.apply_chat_template",
    "data.input_key", "data.label_key", "data.max_len", "ds.", "eval.n_samples_per_prompt",
    "eval.split", "eval.temperature", "logger.", "ref.",
    "rollout.micro_batch_size", "train.colocate_all", "train.micro_batch_size", "vllm.",
)  # fmt: skip
ONLY = {
    "actor.loss_agg_mode": "token-mean", "actor.entropy_coef": 0.0, "actor.optim": "adam",
    "actor.lr_scheduler": "constant", "actor.lr_warmup_ratio": 0.0,
    "algo.advantage.estimator": "group_norm", "eval.dataset": None, "rollout.top_p": 1.0,
    "train.max_epochs": 1,
}  # fmt: skip
SG_FOLLOWED = ("weighting", "objective", "eval_sets", "eval_at_start")
SG_WITHOUT_EFFECT = (
    "engine_args", "run_dir", "share_prompts", "sync_check_every", "sync_check_tolerance", "wandb",
)  # fmt: skip
#: What a weighting may read beside p.
READS = {"old_log_probs", "advantages", "engine_log_probs", "eps"}
#: Responses of one forward pass.
AT_A_TIME = 64
#: Seeds of an evaluation begin here, those of rollout n at 1024 n.
EVALUATION = 1 << 19
#: Parameters without weight decay, as in OpenRLHF.
NO_DECAY = ("bias", "norm.weight", "ln_f.weight")


@dataclass(frozen=True)
class Sample(TokenRow):
    """A response, its advantage, and the log-probs [T] of the policies before the update.

    Without ``old_log_probs`` the current ones are the old ones.
    """

    advantage: float
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None


@dataclass(frozen=True)
class Read:
    """Log-probs and entropies of the responses' tokens, [B, T], 0 where mask_BT is False."""

    log_probs_BT: Tensor
    entropy_BT: Tensor
    mask_BT: Tensor


@dataclass(frozen=True)
class Loss:
    """policy loss + ``kl_coef`` KL; without a KL ``kl_coef`` is 0."""

    policy: LossSettings
    kl_estimator: str
    kl_coef: float


def check(config: Config) -> None:
    """Raises:
    ConfigError: the recipe sets a key that the loop does not follow.
    """
    for key, value in config.values.items():
        expected = ONLY.get(key, flags()[key].default)
        if value != expected and (key in ONLY or not key.startswith((*FOLLOWED, *WITHOUT_EFFECT))):
            raise ConfigError(f"{key}={value}: lab.loop does not follow it, expected {expected}")
    for name, value in config.sg.model_dump(mode="json", exclude_defaults=True).items():
        if name not in (*SG_FOLLOWED, *SG_WITHOUT_EFFECT) and value:
            raise ConfigError(f"sg.{name}={value}: lab.loop does not follow it, leave it out")
    weighting = built_weighting(config.sg.weighting)
    if weighting.normalize == "batch_mean" or not {*weighting.reads} <= READS:
        raise ConfigError(f"sg.weighting.type={weighting.label}: lab.loop does not have it")
    if not config.sg.eval_sets:
        raise ConfigError("sg.eval_sets: not set, and lab.loop needs it")
    for one in config.sg.eval_sets:
        if one.top_p != 1.0 or one.max_new_tokens is not None:
            raise ConfigError(
                f"sg.eval_sets: {one.name}: lab.loop has no top_p or max_new_tokens of a set"
            )
    if config.value("train.batch_size") % config.value("rollout.n_samples_per_prompt"):
        raise ConfigError(
            "train.batch_size: expected a multiple of rollout.n_samples_per_prompt: a step of "
            "lab.loop takes whole prompts"
        )


def loss_of(config: Config) -> Loss:
    """The loss of a checked recipe."""
    kind = str(config.value("actor.policy_loss_type"))
    ours = kind in POLICY_LOSS_TYPES
    if not ours and kind != "ppo":
        raise ConfigError(f"actor.policy_loss_type={kind}: lab.loop does not have it")
    policy = LossSettings(
        built_weighting(config.sg.weighting) if ours else Uniform(),
        *config.clip_range(),
        config.value("actor.dual_clip"),
        built_objective(kind, config.sg.objective) if ours else "ppo",
    )
    coefficient = config.value("algo.kl.init_coef") if config.value("algo.kl.use_loss") else 0.0
    return Loss(policy, str(config.value("algo.kl.estimator")), float(coefficient))


def read(model: PreTrainedModel, rows: Sequence[TokenRow], temperature: float) -> Read:
    """One forward pass over responses, with a graph if gradients are on; a prompt is read once.

    Prompts and responses are padded at the right, where a causal model does not look.
    """
    prompts = [*dict.fromkeys(row.prompt for row in rows)]
    ids_PS, lengths_P = padded(prompts, model)
    mask_PS = filled(lengths_P, ids_PS)
    first = model(input_ids=ids_PS, attention_mask=mask_PS, use_cache=True)
    of_row = torch.tensor([prompts.index(row.prompt) for row in rows], device=model.device)
    cache = first.past_key_values
    cache.batch_select_indices(of_row)
    ids_BT, lengths_B = padded([row.response for row in rows], model)
    mask_BT = filled(lengths_B, ids_BT).bool()
    before_B = lengths_P[of_row]
    output = model(
        input_ids=ids_BT,
        attention_mask=torch.cat([mask_PS[of_row], mask_BT.long()], 1),
        position_ids=before_B[:, None] + torch.arange(ids_BT.shape[1], device=model.device),
        past_key_values=cache,
    )
    start_B1V = first.logits[of_row, before_B - 1][:, None]
    logits_BTV = torch.cat([start_B1V, output.logits[:, :-1]], 1).float() / temperature
    log_pi_BTV = logits_BTV.log_softmax(-1)
    log_probs_BT = log_pi_BTV.gather(2, ids_BT[..., None])[..., 0]
    with torch.no_grad():
        entropy_BT = -(log_pi_BTV.exp() * log_pi_BTV).sum(-1)
    return Read(
        log_probs_BT.masked_fill(~mask_BT, 0.0), entropy_BT.masked_fill(~mask_BT, 0.0), mask_BT
    )


def padded(rows: Sequence[Sequence[int]], model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Token ids, padded at the right, and the lengths."""
    tensors = [torch.tensor(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, True, pad_id(model)).to(model.device)
    return ids, torch.tensor([len(row) for row in rows], device=model.device)


def filled(lengths: Tensor, like: Tensor) -> Tensor:
    """1 in the first ``lengths`` columns of each row, else 0."""
    return (torch.arange(like.shape[1], device=like.device) < lengths[:, None]).long()


@torch.no_grad()
def log_probs_of(
    model: PreTrainedModel, rows: Sequence[TokenRow], temperature: float
) -> list[Tensor]:
    """The log-probs of each response's tokens, [T]."""
    found: list[Tensor] = []
    for part in passes(rows):
        passed = read(model, part, temperature)
        found += [row[mask] for row, mask in zip(passed.log_probs_BT, passed.mask_BT, strict=True)]
    return found


Row = TypeVar("Row", bound=TokenRow)


def passes(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Rows of one forward pass each."""
    for start in range(0, len(rows), AT_A_TIME):
        yield rows[start : start + AT_A_TIME]


def before(passed: Read, log_probs: Sequence[Tensor | None]) -> Tensor | None:
    """The log-probs before the update, [B, T]; None where a response has none."""
    known = [part for part in log_probs if part is not None]
    if len(known) < len(log_probs):
        return None
    like_BT = passed.log_probs_BT.detach()
    return torch.zeros_like(like_BT).masked_scatter(passed.mask_BT, torch.cat(known).to(like_BT))


def backward(
    model: PreTrainedModel, samples: Sequence[Sample], loss: Loss, temperature: float
) -> dict[str, float]:
    """Add the gradient of one optimizer step to the parameters; the step's metrics."""
    tokens = sum(len(sample.response) for sample in samples)
    sums = {"policy_loss": 0.0, "kl": 0.0, "entropy_loss": 0.0}
    counted: Any = None
    for part in passes(samples):
        passed = read(model, part, temperature)
        log_probs_BT, mask_BT = passed.log_probs_BT, passed.mask_BT
        old_BT = before(passed, [sample.old_log_probs for sample in part])
        old_BT = log_probs_BT.detach() if old_BT is None else old_BT
        output = policy_loss(
            log_probs_BT,
            old_BT,
            torch.tensor([sample.advantage for sample in part]).to(log_probs_BT),
            mask_BT,
            loss.policy,
            total=tokens,
            context=TokenContext(engine_log_probs=old_BT),
        )
        whole = output.loss
        reference_BT = before(passed, [sample.reference_log_probs for sample in part])
        if loss.kl_coef and reference_BT is not None:
            kl_BT = kl_estimate(log_probs_BT, reference_BT, output.weights_BT, loss.kl_estimator)
            kl = aggregate(kl_BT, mask_BT, total=tokens)
            whole = whole + loss.kl_coef * kl
            sums["kl"] += float(kl.detach())
        whole.backward()
        sums["policy_loss"] += float(output.loss.detach())
        sums["entropy_loss"] += float(passed.entropy_BT.sum()) / tokens
        counted = output.statistics if counted is None else counted + output.statistics
    metrics = {f"sg/{name}": float(value) for name, value in counted.metrics().items()}
    return {**sums, **metrics}


class Run:
    """A training run; ``train`` writes its rows as they come."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        check(config)
        self.config, self.run_dir, self.loss = config, run_dir, loss_of(config)
        self.device = choose_device("auto")
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        name = self.value("actor.model_name_or_path")
        self.model = load_model(name, torch.float32, self.device)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(name)
        self.reference = copy.deepcopy(self.model) if self.loss.kl_coef else None
        self.reward = load_reward(self.value("reward.remote_url"))
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, self.value("actor.adam.weight_decay")),
            lr=self.value("actor.adam.lr"),
            betas=tuple(self.value("actor.adam.betas")),
            eps=self.value("actor.adam.eps"),
        )
        self.file = Path(self.value("data.prompt_dataset"))
        self.rows = read_data(self.file)[: self.value("data.max_samples")]

    def value(self, key: str) -> Any:
        """A key of the recipe."""
        return self.config.value(key)

    def prompts(self) -> Iterator[list[dict[str, Any]]]:
        """The rows of each rollout; a rest that fills none is left out, as in the pipeline."""
        torch.manual_seed(self.value("train.seed"))
        order = RandomSampler(self.rows)
        drawn = [self.rows[i] for _ in range(self.value("train.num_episodes")) for i in order]
        size = self.value("rollout.batch_size")
        for start in range(0, len(drawn) - size + 1, size):
            yield drawn[start : start + size]

    def sample(
        self, file: Path, rows: list[dict[str, Any]], group: int, temperature: float, seed: int
    ) -> list[Answer]:
        """``group`` graded responses to each row."""
        settings = Sampling(
            len(rows), group, temperature, self.value("rollout.max_new_tokens"), seed, 512
        )
        found = answers(file, rows, self.model, self.tokenizer, settings, self.reward)
        return list(found)

    def rollout(self, rows: list[dict[str, Any]], seed: int) -> tuple[list[Answer], list[Sample]]:
        """The responses to a rollout's prompts, and what is trained of them."""
        group, temperature = self.value("rollout.n_samples_per_prompt"), self.temperature
        drawn = self.sample(self.file, rows, group, temperature, seed)
        low, high = self.value("reward.clip_range")
        rewards = torch.tensor([float(answer.found["rewards"]) for answer in drawn])
        advantages = group_advantages(rewards.clamp(low, high).view(-1, group)).flatten().tolist()
        # The first step of a rollout computes its own.
        later = drawn[self.value("train.batch_size") :]
        old: list[Tensor | None] = [None] * (len(drawn) - len(later))
        old += log_probs_of(self.model, later, temperature)
        reference: list[Tensor | None] = [None] * len(drawn)
        if self.reference is not None:
            reference = [*log_probs_of(self.reference, drawn, temperature)]
        samples = [
            Sample(answer.prompt, answer.response, *parts)
            for answer, *parts in zip(drawn, advantages, old, reference, strict=True)
        ]
        return drawn, samples

    @property
    def temperature(self) -> float:
        return float(self.value("rollout.temperature"))

    def step(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One optimizer step. A gradient that is not finite is skipped; its norm is null."""
        self.optimizer.zero_grad()
        row: dict[str, Any] = dict(backward(self.model, samples, self.loss, self.temperature))
        limit = self.value("actor.max_norm") or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if math.isfinite(norm):
            self.optimizer.step()
        finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
        return {**finite, "actor_grad_norm": norm if math.isfinite(norm) else None}

    def evaluate(self, rollouts: int) -> None:
        """A row of accuracies by evaluation set. All arms of a seed sample with the same seed."""
        row: dict[str, Any] = {"global_step": rollouts}
        seed = (self.value("train.seed") << 20) + EVALUATION
        for one in self.config.sg.eval_sets:
            file = Path(one.dataset)
            rows = read_data(file)[: one.limit]
            drawn = self.sample(file, rows, one.n_samples_per_prompt, one.temperature, seed)
            row[f"eval_{one.name}_accuracy"] = statistics.fmean(a.found["scores"] for a in drawn)
        self.append(jsonl_log.EVALUATIONS, row)

    def append(self, file: str, *rows: Mapping[str, Any]) -> None:
        """Add rows to a file of the run directory."""
        (self.run_dir / file).parent.mkdir(parents=True, exist_ok=True)
        jsonl_log.append(self.run_dir / file, [dict(row) for row in rows])

    def train(self) -> None:
        """Every rollout: sample, grade, update, log; evaluate where the recipe says so."""
        batches = list(self.prompts())
        if self.config.sg.eval_at_start:
            self.evaluate(0)
        steps, every = 0, self.value("eval.steps")
        per_step = self.value("train.batch_size")
        seed = self.value("train.seed") << 20
        for number, rows in enumerate(progress_bar_over(batches), start=1):
            began = time.monotonic()
            drawn, samples = self.rollout(rows, seed + number * 1024)
            for start in range(0, len(samples), per_step):
                steps += 1
                row = self.step(samples[start : start + per_step])
                self.append(
                    jsonl_log.OPTIMIZER_STEPS,
                    {"global_step": number, "optimizer_step": steps, **row},
                )
            self.append(
                jsonl_log.METRICS,
                {
                    "global_step": number,
                    **rollout_metrics(drawn),
                    "timing/step_total": time.monotonic() - began,
                },
            )
            if number == len(batches) or (every > 0 and number % every == 0):
                self.evaluate(number)


def progress_bar_over(batches: list[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """The batches, with a bar."""
    with progress_bar("training", "rollouts", len(batches)) as bar:
        for batch in batches:
            yield batch
            bar.update()


def rollout_metrics(drawn: Sequence[Answer]) -> dict[str, float]:
    """Means over the responses of a rollout, by the pipeline's names."""
    logs = {name for answer in drawn for name in answer.found["extra_logs"]}
    return {
        "rollout/reward_mean": statistics.fmean(a.found["rewards"] for a in drawn),
        "rollout/accuracy": statistics.fmean(a.found["scores"] for a in drawn),
        "rollout/response_length_mean": statistics.fmean(len(a.response) for a in drawn),
        **{
            name: statistics.fmean(a.found["extra_logs"][name] for a in drawn)
            for name in sorted(logs)
        },
    }


def parameter_groups(model: PreTrainedModel, decay: float) -> list[dict[str, Any]]:
    """Biases and norms without weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(NO_DECAY)], "weight_decay": decay},
        {"params": [p for n, p in named if n.endswith(NO_DECAY)], "weight_decay": 0.0},
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 for wrong input."""
    parser = OneLineParser(prog="python -m lab.loop", description=__doc__)
    parser.add_argument("--config", action="append", required=True, metavar="RECIPE")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    try:
        run = Run(load_config(args.config, args.overrides), args.run_dir)
        for file in jsonl_log.STEP_FILES:
            (args.run_dir / file).unlink(missing_ok=True)
        args.run_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "machine": machine(),
            "device": str(run.device),
        }
        write_whole(args.run_dir / "environment.json", json.dumps(environment, indent=1) + "\n")
        run.train()
    except (ConfigError, MeasureError, DataError) as error:
        print(f"lab.loop: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
