"""One rank of a test: four optimizer steps with and without a pass for old log-probs, really.

    python old_log_probs_on_ranks.py {pass,skipped} {packed,padded} EPOCHS OUT

The real policy under ZeRO-3 and the real trainer, two rollouts of two optimizer steps (each of them
EPOCHS times). ``pass`` makes upstream's pass over the same micro-batches before the update. In
float32, so that nothing is lost in 16 bits. Rank 0 writes {"before": parameters, "after":
parameters, "rows": the optimizer steps} to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import update_on_ranks as update
from openrlhf.trainer.ppo_utils.experience import make_experience_batch

from sg_rlhf.overlay.learner import old_log_probs
from sg_rlhf.overlay.learner.actor import SGPolicyModelActor
from sg_rlhf.overlay.model import packed_attention

MICRO_BATCH = 2


def upstreams_pass(strategy: Any, actor: Any, items: list[Any], packed: bool) -> None:
    """What upstream's policy actor computes before the update."""
    ours: Any = object.__new__(SGPolicyModelActor)
    ours.strategy, ours.actor = strategy, actor
    for i in range(0, len(items), MICRO_BATCH):
        of_batch = items[i : i + MICRO_BATCH]
        batch = make_experience_batch(of_batch, packed)
        found = ours.forward(batch.sequences, batch.action_mask, batch.attention_mask)
        for item, log_probs in zip(of_batch, found, strict=True):
            item.action_log_probs = log_probs[: len(item.action_mask)]


def main(way: str, rows: str, epochs: int, out: Path) -> None:
    packed = rows == "packed"
    args = update.arguments(
        update.cases()["grpo_sg"][0],
        [
            "actor.adam.lr=1e-3", "actor.adam.betas=[0.9,0.999]", f"train.max_epochs={epochs}",
            f"train.batch_size={update.RESPONSES // 2}", f"ds.packing_samples={packed}",
        ],
        MICRO_BATCH,
    )  # fmt: skip
    assert old_log_probs.rule_of(args).of == "later"
    attention = packed_attention.VARLEN if packed else "sdpa"
    strategy, actor, optimizer, scheduler = update.prepare(
        args, in_float32=True, packing_samples=packed, attn_implementation=attention
    )
    trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
    experiences = update.rollout(actor)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    before = update.parameters(actor)
    steps: list[dict[str, Any]] = []
    for _ in range(2):
        for experience in experiences[rank::ranks]:
            experience.action_log_probs = None
            trainer.replay_buffer.append(experience)
        if way == "pass":
            upstreams_pass(strategy, actor, trainer.replay_buffer.items, packed)
        status = trainer.ppo_train(args.algo.kl.init_coef)
        assert (status["timing/update_old_log_probs"] > 0) == (way == "skipped")
        steps += status["sg_optimizer_steps"]
        trainer.replay_buffer.clear()
    if rank == 0:
        torch.save({"before": before, "after": update.parameters(actor), "rows": steps}, out)
    else:
        update.parameters(actor)  # gathered together


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
