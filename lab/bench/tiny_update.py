"""The real trainer's update of the tiny model in this process, for benchmarks.

Import it before torch, which asks once how many threads there are: one, as a worker has it. The
process is one rank; ``RANK`` and ``WORLD_SIZE`` make it one of several.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.patches import table

# As a worker of a run without a GPU has it: one thread.
os.environ.update(platform.environment())
table.install()

import torch  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402

from sg_rlhf.config import load_config  # noqa: E402
from sg_rlhf.overlay.checkpoints.strategy import Strategy  # noqa: E402
from sg_rlhf.overlay.cluster.free_port import free_port  # noqa: E402
from sg_rlhf.overlay.driver.arguments import check_platform, upstream_arguments  # noqa: E402
from sg_rlhf.overlay.learner.micro_batches import SAMPLE_INDEX  # noqa: E402
from sg_rlhf.overlay.learner.update import SGActorPPOTrainer  # noqa: E402
from sg_rlhf.overlay.model.log_prob_head import PolicyModel  # noqa: E402

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RECIPE = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
MICRO_BATCH = 32


def arguments(algorithm: str, responses: int, *overrides: str) -> Any:
    """Upstream's arguments of the tiny recipe with an algorithm: one optimizer step."""
    config = load_config(
        [RECIPE, CONFIGS / "algorithms" / f"{algorithm}.yaml"],
        [
            f"train.batch_size={responses}", f"rollout.batch_size={responses}",
            "rollout.n_samples_per_prompt=1", "rollout.micro_batch_size=1",
            f"train.micro_batch_size={min(MICRO_BATCH, responses)}",
            # What comes before the update has no part in it: the advantages are given.
            "algo.dynamic_filtering_enable=false", "algo.advantage.estimator=reinforce",
            *overrides,
        ],
    )  # fmt: skip
    args = upstream_arguments(config)
    check_platform(args)
    args.local_rank = -1
    return args


class TinyUpdate:
    """One engine, and a trainer for each algorithm that is asked for."""

    def __init__(self, args: Any) -> None:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        self.strategy = Strategy(args)
        self.strategy.setup_distributed()
        actor = PolicyModel(
            args.actor.model_name_or_path,
            attn_implementation=args.ds.attn_implementation,
            param_dtype=args.ds.param_dtype,
            ds_config=self.strategy.get_ds_train_config(),
            packing_samples=args.ds.packing_samples,
            temperature=args.rollout.temperature,
        )
        settings = {
            "optim": "adam", "muon": vars(args.actor.muon), "adam": vars(args.actor.adam),
            "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "min_lr_ratio": 0.1,
            "max_norm": args.actor.max_norm, "scheduler_steps": 1000,
        }  # fmt: skip
        self.actor, self.optimizer, self.scheduler = self.strategy.prepare((actor, settings))

    def trainer(self, args: Any) -> Any:
        """The trainer of these arguments, on the one engine."""
        self.strategy.args = args
        return SGActorPPOTrainer(
            self.strategy,
            self.actor,
            ema_model=None,
            actor_optim=self.optimizer,
            actor_scheduler=self.scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
        )

    def responses(
        self, count: int, prompt: int, response: int, seed: int = 0, group: int = 1
    ) -> list[Experience]:
        """Responses of random tokens, so many behind prompts of so many; old log-probs nearby.

        Args:
            group: responses to each prompt, beside each other.
        """
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.actor.model.module.config.vocab_size
        ids = torch.randint(5, vocabulary, (count, prompt + response), generator=generator)
        ids[:, :prompt] = ids[::group, :prompt].repeat_interleave(group, 0)[:count]
        mask = torch.ones_like(ids)
        action_mask = (torch.arange(ids.shape[1] - 1) >= prompt - 1).expand(count, -1)
        self.actor.eval()
        with torch.no_grad():
            parts = [
                self.actor(part, attention_mask=torch.ones_like(part), return_logprobs=True)
                for part in ids.split(MICRO_BATCH)
            ]
        self.actor.train()
        log_probs = torch.cat(parts).float()
        noise = 0.1 * torch.randn(log_probs.shape, generator=generator)
        old = (log_probs + noise).clamp(max=0.0)
        return [
            Experience(
                sequences=ids[i : i + 1],
                attention_mask=mask[i : i + 1],
                action_mask=action_mask[i : i + 1],
                action_log_probs=old[i : i + 1],
                base_action_log_probs=log_probs[i : i + 1],
                rollout_log_probs=old[i : i + 1],
                advantages=torch.full_like(old[i : i + 1], 1.0 if i % 2 else -0.7),
                rewards=torch.zeros(1),
                total_length=torch.tensor([prompt + response]),
                response_length=torch.tensor([response]),
                index=[i],
                prompts=[f"prompt {i // group}"],
                info={SAMPLE_INDEX: torch.tensor([i])},
            )
            for i in range(count)
        ]


def step(trainer: Any, responses: list[Experience]) -> tuple[float, float]:
    """One optimizer step on these responses: (seconds, seconds of this process's CPU time)."""
    trainer.strategy.args = trainer.args
    for response in responses:
        trainer.replay_buffer.append(response)
    with contextlib.redirect_stderr(io.StringIO()):  # upstream's progress bar
        started, cpu = time.perf_counter(), time.process_time()
        status = trainer.ppo_train(trainer.args.algo.kl.init_coef)
        taken = time.perf_counter() - started, time.process_time() - cpu
    trainer.replay_buffer.clear()
    assert len(status["sg_optimizer_steps"]) == 1, status["sg_optimizer_steps"]
    return taken
