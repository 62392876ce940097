"""``sg-rlhf train --replay FILE``: one update on a dumped rollout, without engines.

For debugging, and for comparing losses on the same samples: another recipe may train on the file
of a run. Only the policy is loaded; log-probs of the reference model are in the file.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.driver.arguments import UsageError
from sg_rlhf.overlay.settings import rollout_plan


def without_engines(args: Namespace) -> Namespace:
    """Change the arguments of a run: the policy alone, and no run directory."""
    args.vllm.num_engines = 0
    args.train.colocate_all = args.train.async_enable = False
    args.train.colocate_actor_ref = False
    args.ds.enable_sleep = False
    args.ckpt.load_enable = False
    args.sg.run_dir = None
    return args


def read(args: Namespace, file: Path) -> dict[str, Any]:
    """The content of the file: ``step``, ``ranks`` and a dict of tensors per micro-batch.

    Raises:
        UsageError: no such file, no dump of a rollout, or one of another number of ranks.
    """
    import torch

    ranks = rollout_plan.data_parallel_ranks(args)["actor"]
    try:
        # Mapped: the driver looks at the header, the worker at the tensors.
        content: dict[str, Any] = torch.load(file, weights_only=True, mmap=True)
        dumped = content["ranks"]
    except OSError as error:
        raise UsageError(f"--replay {file}: {error.strerror or error}") from None
    except Exception:  # any other error of torch for a file that it did not write
        raise UsageError(
            f"--replay {file}: expected a file of sg.dump_rollout=STEP, rollouts/step_STEP.pt of "
            "a run directory"
        ) from None
    if dumped != ranks:
        raise UsageError(
            f"--replay {file}: its run had {dumped} policy ranks and this recipe has {ranks}: set "
            "actor.num_nodes and actor.num_gpus_per_node as that run had them"
        )
    return content


def update(args: Namespace, file: Path) -> list[dict[str, Any]]:
    """Load the policy on its ranks and train on the file.

    Args:
        args: upstream's namespace with ``sg``, of :func:`without_engines`.
        file: of ``sg.dump_rollout``.

    Returns:
        Metrics of each optimizer step, means over the ranks. They are those of the run that wrote
        the file if recipe and weights are the same.
    """
    import ray  # a dry run does not need it

    from sg_rlhf.overlay.patches import table

    upstream = table.install_driver()
    from sg_rlhf.overlay.controller import rollout_dump  # after the patches

    content = read(args, file)
    group = upstream.RayActorGroup(
        args.actor.num_nodes,
        args.actor.num_gpus_per_node,
        upstream.PolicyModelActor,
        duplicate_actors=args.ds.ring_attn_size * args.ds.tensor_parallel_size,
    )
    strategy = upstream.get_strategy(args)
    ray.get(
        group.async_init_model_from_pretrained(
            strategy, args.actor.model_name_or_path, max_steps=content["step"]
        )
    )
    experiences = rollout_dump.in_rank_order(rollout_dump.experiences(content["experiences"]), args)
    ray.get(group.async_run_method_batch(method_name="append", experience=experiences))
    statuses = ray.get(group.async_run_method("fit", kl_ctl=args.algo.kl.init_coef))
    rows: list[dict[str, Any]] = statuses[0]["sg_optimizer_steps"]
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """A line per metric, a column per optimizer step, every digit of a number."""
    names = list(rows[0])
    width = max(map(len, names))
    lines = [["", *(f"step {number}" for number in range(1, len(rows) + 1))]]
    lines += [[name, *(repr(row.get(name)) for row in rows)] for name in names]
    return "\n".join(
        f"{name:<{width}}  " + "  ".join(f"{value:<22}" for value in values).rstrip()
        for name, *values in lines
    )
