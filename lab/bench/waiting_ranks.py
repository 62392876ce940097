"""How long ranks wait for each other in an update, by how a rollout's samples are dealt to them.

    python lab/bench/waiting_ranks.py --out lab/bench/results/waiting_ranks.json \\
        [--recorded RUN_DIR] [--measure] [--plot waiting_ranks.png]

Under ZeRO-3 every layer gathers its weights from all ranks, so that a micro-batch takes as long as
its slowest rank; the rest is waiting. Six ways to form micro-batches:

``upstream``  groups in order of completion (the group with the shortest longest response first),
              a contiguous piece for each rank, shuffled there
``fixed``     dealt by length, each of as many samples (sg_rlhf/batching/balance.py)
``as fixed``  of any number of samples, no more tokens than ``fixed`` has at most
``balanced``  the runs': the same, filled to the tokens that the memory plan reserves,
              samples of a micro-batch times ``data.max_len``
``dynamic``   ``train.dynamic_batch_enable`` with it: dealt to ranks alike, cut there by OpenRLHF's
              Karmarkar-Karp partitions, as many tokens a micro-batch at most as ``fixed`` has
``dynamic upstream``  the same with OpenRLHF's own ``balance_experiences``, whose optimizer steps
              depend on lengths

A micro-batch's cost is the FLOPs of Qwen2.5-3B for its tokens, those of padding too where it is
padded, and for its attention. Communication is not counted: with it, the shares are smaller.

Lengths are drawn: log-normal, a sample's median 600 tokens, scaled so that the longest of the
rollout is ``spread`` times the median; lengths of a group are independent. ``filled`` in the
result has the Knights & Knaves recipe as the plan assumes it, 1,365 tokens on average.
``--recorded`` takes those of a run with ``sg.samples_per_step`` at its whole rollout instead.

``--measure`` runs three of these ways on two processes with a small packed model and
times how long each waits for the other at a barrier after every micro-batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lab.bench.common import at_least, provenance, rank_outputs, write
from sg_rlhf.batching import balance
from sg_rlhf.plan.shapes import shape_of
from sg_rlhf.plan.time import sequence_flops
from sg_rlhf.run_dir import jsonl_log

MODEL = "Qwen/Qwen2.5-3B"
SPREADS = (1, 2, 4, 8)
#: Of the model whose FLOPs are counted, the last.
SHAPES: list[Any] = [shape_of(MODEL)]
MEDIAN = 600
#: ``data.max_len`` of the Knights & Knaves recipe, and the mean length of a sample that the plan
#: assumes for it: a prompt of 341 tokens and a response of 1,024.
MAX_LEN, MEAN = 5120, 1365
GROUP = 8
GOAL = 0.08
#: (name, ranks, samples of a micro-batch, of an optimizer step, of a rollout): K&K's recipe on the
#: hardware that has a file, the mathematics recipe's larger batch, and smaller steps.
LAYOUTS = [
    ("kk 2x80gb", 2, 2, 256, 512),
    ("kk 4x80gb", 4, 2, 256, 512),
    ("kk 8x80gb", 8, 4, 256, 512),
    ("kk 8x24gb, 8x40gb", 8, 1, 256, 512),
    ("math 8x80gb", 8, 4, 512, 1024),
    ("a step of 128", 8, 2, 128, 256),
    ("a step of 64", 8, 2, 64, 128),
    ("a step of 64, one by one", 8, 1, 64, 128),
]
#: Of the samples of a micro-batch, to what an update computes for them.
Cost = Callable[[Sequence[int]], float]
Way = Callable[[list[int], int, int, int, bool, random.Random], balance.Assignment]


def drawn(count: int, spread: float, chance: random.Random) -> list[int]:
    """Lengths whose longest is ``spread`` times their median."""
    z = [chance.gauss(0, 1) for _ in range(count)]
    middle = statistics.median(z)
    scale = math.log(spread) / (max(z) - middle)
    return [round(MEDIAN * math.exp(scale * (x - middle))) for x in z]


def with_mean(lengths: list[int]) -> list[int]:
    """Lengths scaled to :data:`MEAN`, cut at :data:`MAX_LEN`."""
    scale = MEAN / statistics.mean(lengths)
    return [min(MAX_LEN, round(scale * length)) for length in lengths]


def cost_of(packed: bool) -> Cost:
    """FLOPs of one forward pass; an update has three or four of it."""

    def cost(lengths: Sequence[int]) -> float:
        rows = lengths if packed else [max(lengths)] * len(lengths)
        return sum(sequence_flops(SHAPES[-1], n) for n in rows)

    return cost


def upstream(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random
) -> balance.Assignment:
    groups = [range(i, i + GROUP) for i in range(0, len(lengths), GROUP)]
    finished = sorted(groups, key=lambda group: max(lengths[i] for i in group))
    order = list(itertools.chain.from_iterable(finished))
    own = len(order) // ranks
    hands = [order[i : i + own] for i in range(0, len(order), own)]
    for hand in hands:
        chance.shuffle(hand)
    return [[hand[i : i + size] for i in range(0, own, size)] for hand in hands]


def fixed(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random
) -> balance.Assignment:
    steps = balance.optimizer_steps(len(lengths), step, chance.randrange(2**31), 0)
    return balance.balance_steps(lengths, steps, ranks, size, packed=packed)


def balanced(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random
) -> balance.Assignment:
    return _variable(lengths, ranks, size, step, packed, chance, size * MAX_LEN)


def as_fixed(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random
) -> balance.Assignment:
    state = chance.getstate()
    of_fixed = fixed(lengths, ranks, size, step, packed, chance)
    chance.setstate(state)
    most = max(sum(lengths[i] for i in samples) for hand in of_fixed for samples in hand)
    return _variable(lengths, ranks, size, step, packed, chance, most)


def _variable(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random,
    max_tokens: int,
) -> balance.Assignment:  # fmt: skip
    costs = [sequence_flops(SHAPES[-1], n) for n in lengths]
    steps = balance.optimizer_steps(len(lengths), step, chance.randrange(2**31), 0)
    of_steps = balance.variable_size_steps(
        lengths, steps, ranks, size, costs, max_tokens=max_tokens, packed=packed
    )
    return [list(itertools.chain.from_iterable(hands)) for hands in zip(*of_steps, strict=True)]


def dynamic(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random
) -> balance.Assignment:
    hands = fixed(lengths, ranks, step // ranks, step, packed, chance)
    return _cut([list(itertools.chain(*hand)) for hand in hands], lengths, size, step)


def dynamic_upstream(
    lengths: list[int], ranks: int, size: int, step: int, packed: bool, chance: random.Random
) -> balance.Assignment:
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences

    order = list(itertools.chain.from_iterable(itertools.chain(*upstream(
        lengths, 1, size, step, packed, chance
    ))))  # fmt: skip
    place, tokens = torch.tensor(order), torch.tensor([lengths[i] for i in order])
    args = SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=ranks),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )
    whole = Experience(sequences=place[:, None], total_length=tokens)
    hands = [e.sequences[:, 0].tolist() for e in balance_experiences([whole], args)]
    return _cut(hands, lengths, size, step)


def _cut(hands: list[list[int]], lengths: list[int], size: int, step: int) -> balance.Assignment:
    """What ``NaiveReplayBuffer.setup_dynamic_batch`` does on each rank."""
    from openrlhf.utils.seqlen_balancing import (
        get_minimum_num_micro_batch_size,
        get_seqlen_balanced_partitions,
    )

    ranks = len(hands)
    mine = fixed(lengths, ranks, size, step, True, random.Random(0))
    budget = max(sum(lengths[i] for i in samples) for hand in mine for samples in hand)
    dealt: balance.Assignment = [[] for _ in range(ranks)]
    own = step // ranks
    for first in range(0, len(hands[0]), own):
        parts = [hand[first : first + own] for hand in hands]
        sizes = [[lengths[i] for i in part] for part in parts]
        count = max(get_minimum_num_micro_batch_size(each, budget, 1, 1) for each in sizes)
        for hand, part, each in zip(dealt, parts, sizes, strict=True):
            for places in get_seqlen_balanced_partitions(each, count, equal_size=False):
                hand.append([part[i] for i in places])
    return dealt


WAYS: dict[str, Way] = {
    "upstream": upstream, "fixed": fixed, "as fixed": as_fixed, "balanced": balanced,
    "dynamic": dynamic,
    "dynamic upstream": dynamic_upstream,
}  # fmt: skip


def figures(
    way: str, layout: tuple[str, int, int, int, int], packed: bool, rollouts: list[list[int]]
) -> dict[str, float]:
    """Means over the rollouts: share of waiting, time, and tokens of the largest micro-batch."""
    _, ranks, size, step, _ = layout
    cost = cost_of(packed)
    waits, slowest, peaks, counts = [], [], [], []
    for number, lengths in enumerate(rollouts):
        dealt = WAYS[way](lengths, ranks, size, step, packed, random.Random(number))
        used = [[[lengths[i] for i in samples] for samples in hand] for hand in dealt]
        assert sum(len(samples) for hand in used for samples in hand) == len(lengths)
        costs = [[cost(samples) for samples in hand] for hand in used]
        waits.append(balance.idle_fraction(costs))
        slowest.append(sum(max(at_once) for at_once in zip(*costs, strict=True)))
        peaks.append(max(sum(s) if packed else max(s) * len(s) for hand in used for s in hand))
        counts.append(len(dealt[0]))
    return {
        "waiting": round(statistics.mean(waits), 4),
        "waiting_largest": round(max(waits), 4),
        "tflops_of_the_slowest": round(statistics.mean(slowest) / 1e12, 1),
        "tokens_at_the_peak": round(statistics.mean(peaks)),
        "micro_batches": round(statistics.mean(counts), 1),
    }


def rows_of(
    layout: tuple[str, int, int, int, int], label: Any, rollouts: list[list[int]]
) -> list[dict[str, Any]]:
    """Every way, packed and padded; dynamic batches are packed alone."""
    name, ranks, size, step, samples = layout
    found = []
    for packed, way in itertools.product((True, False), WAYS):
        if (way.startswith("dynamic") or way == "as fixed") and not packed:
            continue
        found.append(
            {
                "layout": name, "ranks": ranks, "micro_batch": size, "step": step,
                "rollout": samples, "spread": label, "packed": packed, "way": way,
                **figures(way, layout, packed, rollouts),
            }
        )  # fmt: skip
    slowest = {
        row["packed"]: row["tflops_of_the_slowest"] for row in found if row["way"] == "balanced"
    }
    for row in found:
        row["time"] = round(row["tflops_of_the_slowest"] / slowest[row["packed"]], 3)
    return found


def filled(draws: int) -> dict[str, Any]:
    """The recipe on 8 GPUs of 80 GB with the plan's mean length: how full micro-batches are."""
    spread = SPREADS[-1]
    rollouts = [with_mean(drawn(512, spread, random.Random(i))) for i in range(draws)]
    layout = next(layout for layout in LAYOUTS if layout[0] == "kk 8x80gb")
    rows = [row for row in rows_of(layout, spread, rollouts) if row["packed"]]
    counts = {row["way"]: row["micro_batches"] for row in rows}
    ratio = round(counts["balanced"] / counts["as fixed"], 3)
    return {"mean_tokens": MEAN, "max_len": MAX_LEN, "micro_batches_ratio": ratio, "rows": rows}


def recorded(run_dir: Path) -> list[list[int]]:
    """The samples' lengths of each rollout of a run, prompts and responses."""
    from transformers import AutoTokenizer

    from sg_rlhf.config.recipe import load_config, local_path

    key = "actor.model_name_or_path"
    model = local_path(key, load_config(run_dir / "config.yaml").value(key))
    tokenizer = AutoTokenizer.from_pretrained(model)
    of_rollout: dict[int, list[int]] = {}
    for row in jsonl_log.read(run_dir / jsonl_log.SAMPLES):
        prompt = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        of_rollout.setdefault(row["global_step"], []).append(len(prompt) + len(row["tokens"]))
    return list(of_rollout.values())


# -- measured on two processes -------------------------------------------------------------------


def one_rank(way: str, spread: float, repeats: int) -> None:
    """A rank of the measurement; rank 0 prints what both waited and computed."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from sg_rlhf.overlay.model import packed_attention

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ALL_ATTENTION_FUNCTIONS.register(packed_attention.VARLEN, packed_attention.attention)
    shape: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**shape), attn_implementation=packed_attention.VARLEN
    )
    SHAPES.append(
        SimpleNamespace(
            parameters=sum(p.numel() for p in model.parameters()), tied=True, head_parameters=0,
            num_layers=4, num_heads=6, head_dim=32,
        )
    )  # fmt: skip
    lengths = drawn(64, spread, random.Random(0))
    dealt = WAYS[way](lengths, ranks, 2, 32, True, random.Random(0))
    waited = worked = 0.0
    for number in range(repeats + 1):
        for samples in dealt[rank]:
            dist.barrier()
            start = time.perf_counter()
            positions = torch.cat([torch.arange(lengths[i]) for i in samples])[None]
            tokens = positions % shape["vocab_size"]
            model(tokens, position_ids=positions, use_cache=False).logits.logsumexp(
                -1
            ).sum().backward()
            done = time.perf_counter()
            dist.barrier()
            if number:  # the first time round warms up
                worked += done - start
                waited += time.perf_counter() - done
    sums = torch.tensor([waited, worked], dtype=torch.float64)
    dist.all_reduce(sums)
    if rank == 0:
        cost = cost_of(True)
        costs = [[cost([lengths[i] for i in s]) for s in hand] for hand in dealt]
        found = {
            "waiting": round(float(sums[0] / sums.sum()), 4),
            "waiting_by_the_model": round(balance.idle_fraction(costs), 4),
            "seconds": round(float(sums.sum()) / ranks / repeats, 2),
        }
        print(json.dumps(found))
    dist.barrier()  # a rank that ends while others still listen to it makes them abort
    dist.destroy_process_group()


def measured(way: str, spread: float, repeats: int) -> dict[str, Any]:
    """:func:`one_rank` on two processes."""
    os.environ["SG_PLATFORM"] = "cpu"
    command = [sys.executable, __file__, "--one-rank", way, str(spread), str(repeats)]
    of_rank_0, _ = rank_outputs(command, 2)
    return {
        "way": way, "spread": spread, "ranks": 2, "micro_batch": 2, "step": 32, "rollout": 64,
        **json.loads(of_rank_0.splitlines()[-1]),
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Waiting by spread, a panel a layout, packed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["layout"] for row in rows))
    figure, axes = plt.subplots(2, -(-len(names) // 2), figsize=(14, 6), sharex=True, sharey=True)
    for name, axis in zip(names, axes.flat, strict=False):
        for way in WAYS:
            mine = [r for r in rows if (r["layout"], r["way"], r["packed"]) == (name, way, True)]
            axis.plot([str(r["spread"]) for r in mine], [100 * r["waiting"] for r in mine],
                      marker="o", label=way)  # fmt: skip
        axis.axhline(100 * GOAL, color="grey", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("longest / median")
    for axis in axes[:, 0]:
        axis.set_ylabel("% of the ranks' time")
    axes.flat[0].legend(fontsize=8)
    figure.suptitle("Waiting for the slowest rank, packed rows, by the cost of Qwen2.5-3B")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """The table, then the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--recorded", type=Path, help="run directory with recorded samples")
    parser.add_argument("--draws", type=at_least(1), default=20, help="rollouts of each kind [20]")
    parser.add_argument("--measure", action="store_true", help="on two processes as well")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="of the measurement [3]")
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    parser.add_argument("--one-rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_rank:
        way, spread, repeats = arguments.one_rank
        one_rank(way, float(spread), int(repeats))
        return
    if arguments.out is None:
        parser.error("--out is missing")
    if arguments.recorded and not (arguments.recorded / jsonl_log.SAMPLES).is_file():
        parser.error(f"--recorded {arguments.recorded}: no {jsonl_log.SAMPLES} in it")
    from sg_rlhf.overlay.patches import table

    table.install()
    rows = []
    for layout in LAYOUTS:
        for spread in SPREADS:
            rollouts = [drawn(layout[4], spread, random.Random(i)) for i in range(arguments.draws)]
            rows += rows_of(layout, spread, rollouts)
    for row in rows:
        print(
            f"{row['layout']:26} {'packed' if row['packed'] else 'padded'} spread {row['spread']} "
            f"{row['way']:16} waiting {row['waiting']:6.1%}, at most "
            f"{row['waiting_largest']:6.1%}; time {row['time']:.2f}, "
            f"{row['micro_batches']} micro-batches of {row['tokens_at_the_peak']} tokens at most",
            flush=True,
        )
    result: dict[str, Any] = {
        **provenance("lab/bench/waiting_ranks.py", "openrlhf", "torch", "transformers"),
        "model": MODEL, "draws": arguments.draws, "median": MEDIAN, "goal": GOAL, "rows": rows,
    }  # fmt: skip
    result["filled"] = filled(arguments.draws)
    for row in result["filled"]["rows"]:
        print(row)
    if arguments.recorded:
        result["command"] = result["command"].replace(str(arguments.recorded), "RUN_DIR")
        lengths = recorded(arguments.recorded)
        found: dict[str, Any] = {
            "lengths": lengths,
            "spread": round(
                max(map(max, lengths)) / statistics.median(itertools.chain(*lengths)), 2
            ),
            "rows": [],
        }
        for ranks, size in ((2, 2), (2, 8), (4, 4), (8, 2), (8, 4)):
            layout = (f"recorded, {ranks} ranks", ranks, size, 64, len(lengths[0]))
            found["rows"] += rows_of(layout, found["spread"], lengths)
        result["recorded"] = found
    if arguments.measure:
        result["measured"] = [
            measured(way, spread, arguments.repeats)
            for spread, way in itertools.product((2, 8), ("upstream", "fixed", "balanced"))
        ]
        for row in result["measured"]:
            print(row)
    mine = [row for row in rows if row["way"] == "balanced"]
    result["not_met"] = [
        {key: row[key] for key in ("layout", "spread", "packed", "waiting")}
        for row in mine
        if row["waiting"] > GOAL
    ]
    write(result, arguments.out)
    print(f"wrote {arguments.out}; over {GOAL:.0%}: {len(result['not_met'])} of {len(mine)}")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
