"""One rank of the test of checkpoints that several ranks write and choose.

    python torn_on_two_ranks.py FOLDER SHARED OUT

Each rank writes its shards by DeepSpeed's names, as its engine does, and the checkpoint is
finalized. Then rank 1's shard of the last checkpoint is altered, and the ranks choose. OUT.{rank}
gets the choices, and what each saw as its folder's manifest. With SHARED=0 each rank has a folder
of its own, as on machines that share none: OUT.{rank} gets the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from sg_rlhf.overlay.checkpoints import consensus, manifest, paths
from sg_rlhf.overlay.reporting.errors import CheckpointError


def main(folder: Path, shared: bool, out: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    actor = folder / ("" if shared else f"disk{rank}") / "_actor"
    for step in (1, 2):
        tag = f"global_step{step}"
        written = paths.temp_path(actor / tag)
        written.mkdir(parents=True, exist_ok=True)
        shard = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (written / shard).write_bytes(bytes([rank, step]) * 10_000)
        if rank == 0:
            (written / "metric.json").write_text("{}")
        try:
            consensus.finalize(written, actor / tag)
        except CheckpointError as error:
            out.with_suffix(f".{rank}").write_text(json.dumps(str(error)))
            return
        if rank == 0:
            paths.write_latest(actor, tag)
    files = sorted(manifest.read(actor / "global_step2") or {})
    chosen = [consensus.select_intact(actor)]
    for step in (2, 1):
        torch.distributed.barrier()
        if rank == 1:
            (actor / f"global_step{step}" / shard).write_bytes(b"\x00" * 20_000)
        torch.distributed.barrier()
        try:
            chosen.append(consensus.select_intact(actor))
        except CheckpointError as error:
            chosen.append(str(error))
    hidden = [path.name for path in actor.iterdir() if path.name.startswith(".")]
    found = {"files": files, "chosen": chosen, "hidden": hidden}
    out.with_suffix(f".{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1", Path(sys.argv[3]))
