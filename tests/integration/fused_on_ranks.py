"""One rank of a test: four optimizer steps with and without logits, by the real trainer.

    python fused_on_ranks.py {fused,logits} {packed,padded} OUT

In float32, so that what differs is the path and not the rounding of 16 bits. Rank 0 writes
{"before": parameters, "after": parameters, "rows": the optimizer steps} to OUT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.settings import worker_settings

os.environ[worker_settings.VARIABLE] = worker_settings.WorkerSettings(
    fused_log_probs=sys.argv[1] == "fused"
).to_json()

import torch
import update_on_ranks as update

from sg_rlhf.overlay.model import packed_attention

MICRO_BATCH = 2


def main(way: str, rows: str, out: Path) -> None:
    packed = rows == "packed"
    args = update.arguments(
        update.cases()["grpo_sg"][0],
        [
            "actor.adam.lr=1e-3", "actor.adam.betas=[0.9,0.999]", "actor.entropy_coef=0.01",
            f"train.batch_size={update.RESPONSES // 2}", f"ds.packing_samples={packed}",
        ],
        MICRO_BATCH,
    )  # fmt: skip
    attention = packed_attention.VARLEN if packed else "sdpa"
    strategy, actor, optimizer, scheduler = update.prepare(
        args, in_float32=True, packing_samples=packed, attn_implementation=attention
    )
    trainer = update.trainer_of(strategy, actor, optimizer, scheduler, MICRO_BATCH)
    experiences = update.rollout(actor)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    before = update.parameters(actor)
    steps: list[dict[str, Any]] = []
    widths: list[int] = []
    head = actor.model.module.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, made: widths.append(made.shape[-1]))
    # Two optimizer steps each time.
    for _ in range(2):
        for experience in experiences[rank::ranks]:
            trainer.replay_buffer.append(experience)
        status = trainer.ppo_train(args.algo.kl.init_coef)
        steps += status["sg_optimizer_steps"]
        trainer.replay_buffer.clear()
    after = update.parameters(actor)
    assert set(widths) == ({1} if way == "fused" else {head.out_features}), widths
    if rank == 0:
        torch.save({"before": before, "after": after, "rows": steps}, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
