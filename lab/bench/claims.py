"""Every ratio that the project claims: what it is measured against, its goal, and where it stands.

``docs/make_performance.py`` makes the table of docs/performance.md of this, ``compare.py`` finds
what got worse, ``run.py`` measures those that fit into minutes. A new benchmark is a line in
``BENCHES`` and one for each of its ratios in ``CLAIMS``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Bench:
    """A benchmark's script and its result.

    Attributes:
        result: file in ``lab/bench/results``.
        command: the command of the committed result, without ``python`` and ``--out``.
        quick: the same in a minute or two for ``make bench``; "" where it does not fit.
        why_not: what keeps it out of ``make bench``.
    """

    result: str
    command: str
    quick: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Claim:
    """One ratio.

    Attributes:
        what, against: in words.
        bench: a key of ``BENCHES``.
        path: keys into the result with ``/`` between them. ``*`` is every entry there,
            ``way=ours&packed=True`` those of a list of rows with these values; of several the
            worst counts.
        goal: None where none is set.
        lower: whether less is better.
        unit: "x" (times the peer's), "%" (of one), or "" for a plain number.
        tolerance: how much worse a new figure may be than the committed one, as a share of it,
            before it is called worse: what the same code was seen to differ by.
        note: what the figure alone does not say.
        whole_only: whether the command of ``make bench`` leaves it out.
    """

    what: str
    against: str
    bench: str
    path: str
    goal: float | None
    lower: bool = True
    unit: str = "x"
    tolerance: float = 0.1
    note: str = ""
    whole_only: bool = False

    def value(self, result: Any) -> float:
        """The figure in a result.

        Raises:
            KeyError: it is not there.
        """
        found = _at(result, self.path.split("/"))
        return max(found) if self.lower else min(found)

    def met(self, value: float) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        return value <= self.goal if self.lower else value >= self.goal

    def worse(self, new: float, old: float) -> bool:
        """Whether ``new`` is worse than ``old`` by more than the tolerance."""
        margin = self.tolerance * abs(old)
        return new > old + margin if self.lower else new < old - margin

    def shown(self, value: float) -> str:
        """A figure with its unit."""
        if self.unit == "%":
            return f"{100 * value:.3g} %"
        digits = f"{value:.3f}" if 0.8 <= value < 1.2 else f"{value:.3g}"
        return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}{self.unit}"

    def goal_shown(self) -> str:
        """The goal in words."""
        if self.goal is None:
            return "none"
        return f"{'at most' if self.lower else 'at least'} {self.shown(self.goal)}"


def _at(value: Any, keys: list[str]) -> list[float]:
    """The numbers at a path; KeyError where there is none."""
    if not keys:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise KeyError(f"{value!r}: expected a number")
        return [float(value)]
    key, *rest = keys
    if not isinstance(value, (dict, list)):
        raise KeyError(f"{key}: nothing below {value!r}")
    entries = list(value.values()) if isinstance(value, dict) else value
    if key == "*" or "=" in key:
        found = [number for entry in entries if _has(entry, key) for number in _at(entry, rest)]
        if not found:
            raise KeyError(f"{key}: no such entry")
        return found
    try:
        return _at(value[int(key)] if isinstance(value, list) else value[key], rest)
    except (IndexError, ValueError):
        raise KeyError(key) from None


def _has(entry: Any, values: str) -> bool:
    """Whether an entry has these values, ``way=ours&packed=True``; every one has ``*``."""
    pairs = [pair.split("=") for pair in values.split("&")] if values != "*" else []
    return all(str(entry.get(name)) == text for name, text in pairs)


def read(folder: Path, bench: str) -> Any | None:
    """A benchmark's result in a folder; None where there is none.

    Raises:
        ValueError: the file is not JSON.
    """
    file = folder / BENCHES[bench].result
    try:
        return json.loads(file.read_text()) if file.is_file() else None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); measure it again") from None


BENCHES = {
    "token_weighting": Bench(
        "token_weighting.json", "lab/bench/token_weighting.py",
        "lab/bench/token_weighting.py --turns 8 --rounds 60 --steps grpo_sg",
    ),
    "stock_openrlhf": Bench(
        "stock_openrlhf.json", "lab/bench/stock_openrlhf.py",
        "lab/bench/stock_openrlhf.py --turns 1 --rollouts 4",
    ),
    "async_rollouts": Bench(
        "async_rollouts.json", "lab/bench/async_rollouts.py", why_not="seven minutes",
    ),
    "start_up": Bench(
        "start_up.json", "lab/bench/start_up.py --base TREE --warm-up",
        why_not="needs a tree of an older commit",
    ),
    "first_start": Bench(
        "first_start.json", "lab/bench/first_start.py", why_not="installs six times",
    ),
    "token_logprobs": Bench(
        "token_logprobs_cpu.json",
        "lab/bench/token_logprobs.py --memory-tokens 512,4096 "
        "--plot docs/images/log_probs_memory.png",
        "lab/bench/token_logprobs.py --models Qwen/Qwen2.5-3B --tokens 256 --memory-tokens= "
        "--ways logits,ours",
    ),
    "shared_prompts": Bench(
        "shared_prompts.json",
        "lab/bench/shared_prompts.py",
        "lab/bench/shared_prompts.py --turns 4",
    ),
    "weight_sync": Bench(
        "weight_sync_cpu.json", "lab/bench/weight_sync.py",
        "lab/bench/weight_sync.py --model small --buckets 64 --rounds 3",
    ),
    "waiting_ranks": Bench(
        "waiting_ranks.json", "lab/bench/waiting_ranks.py --plot docs/images/waiting_ranks.png",
        "lab/bench/waiting_ranks.py",
    ),
    "update_costs": Bench(
        "update_costs.json", "lab/bench/update_costs.py",
        "lab/bench/update_costs.py --layers 12 --repeats 3",
    ),
    "kk_generator": Bench(
        "kk_generator.json", "lab/bench/kk_generator.py", "lab/bench/kk_generator.py --turns 3"
    ),
    "growth": Bench(
        "growth.json", "lab/bench/growth.py --plot docs/images/growth.png",
        "lab/bench/growth.py --repeats 2",
    ),
    "grading": Bench(
        "grading.json", "lab/bench/grading.py --data-dir data/math",
        why_not="needs the mathematics data, five minutes",
    ),
    "eval_throughput": Bench(
        "eval_throughput.json", "lab/bench/eval_throughput.py",
        why_not="needs lm-evaluation-harness, five minutes",
    ),
    "retrieval": Bench(
        "retrieval.json",
        "lab/bench/retrieval.py --data DIR",
        why_not="needs the question answering data, ten minutes",
    ),
}  # fmt: skip

WEIGHT_1 = "the same step with every weight 1"
STOCK = "stock OpenRLHF 0.11.2 on the same platform layer"
LINEAR = "linear: exponent 1"
REPEATED = "the prompt repeated for each of 8 responses"

CLAIMS = (
    Claim("GRPO-SG, time of a step", WEIGHT_1, "token_weighting",
          "steps/grpo_sg/time_ratio", 1.01, tolerance=0.02,
          note="the paper reports 1.054x"),
    Claim("GRPO-SG, memory of a step", WEIGHT_1, "token_weighting",
          "steps/grpo_sg/memory_ratio", 1.00, tolerance=0.001,
          note="the paper reports 1.001x"),
    Claim("the slowest weighting's loss, time of a step", WEIGHT_1, "token_weighting",
          "slowest_loss/step_time_ratio", 1.01, tolerance=0.005),
    Claim("fused log-probs and their gradients, time", "OpenRLHF's path over logits",
          "token_logprobs", "seconds/way=ours/ratios/update", 1.15, tolerance=0.15,
          note="the slowest of three heads of 3B to 8B, without a GPU"),
    Claim("fused log-probs, extra memory at 4,096 tokens", "the float32 logits",
          "token_logprobs", "memory/way=ours&tokens=4096/update_percent_of_fp32_logits", 5.0,
          unit=" %", whole_only=True),
    Claim("update with shared prompts: 300 tokens, responses of 60",
          REPEATED, "shared_prompts", "cases/long prompts/time_ratio", 0.5, tolerance=0.1),
    Claim("update with shared prompts: 33 and 70 (tiny K&K puzzles)",
          REPEATED, "shared_prompts", "cases/puzzles/time_ratio", 0.9, tolerance=0.1),
    Claim("update with shared prompts: 60 and 300", REPEATED, "shared_prompts",
          "cases/long responses/time_ratio", 1.0, tolerance=0.1),
    Claim("a rollout on a CPU, tiny model", STOCK, "stock_openrlhf", "ratio/rollout", 0.8,
          tolerance=0.15),
    Claim("a whole run on a CPU, tiny model", STOCK, "stock_openrlhf", "ratio/whole_run", 0.8,
          tolerance=0.15),
    Claim("peak memory of that run", STOCK, "stock_openrlhf", "ratio/memory", 1.0,
          tolerance=0.1),
    Claim("asynchronous rollouts per minute on a CPU, bound 1, long-tailed lengths",
          "the synchronous run", "async_rollouts", "ratio/async", 1.0, lower=False, tolerance=0.15,
          note="trainer and engine on the same two cores"),
    Claim("asynchronous rollouts per minute, partial", "the synchronous run", "async_rollouts",
          "ratio/async, partial rollouts", 1.0, lower=False, tolerance=0.15),
    Claim("start to the first update on a CPU, second start", "commit 2f77df2", "start_up",
          "new_over_base/seconds", 0.6, tolerance=0.15),
    Claim("fresh clone to an environment on a CPU", "commit bcfc89e7", "first_start",
          "ready_ratio", 0.52, tolerance=0.3, note="the first run compiles what it imports"),
    Claim("fresh clone to the first rollout on a CPU", "commit bcfc89e7", "first_start",
          "first_rollout_ratio", 1.0, tolerance=0.15),
    Claim("waiting of 8 ranks, by FLOPs, K&K recipe on 8 GPUs of 80 GB",
          "the time of the update", "waiting_ranks",
          "rows/layout=kk 8x80gb&packed=True&way=balanced/waiting", 0.02, unit="%",
          note="drawn lengths, the worst of spreads 1 to 8"),
    Claim("micro-batches of an update, K&K recipe on 8 GPUs of 80 GB, filled to the planned tokens",
          "no more tokens than the largest of 4 samples", "waiting_ranks",
          "filled/micro_batches_ratio", 0.5, note="drawn lengths of 1,365 tokens on average"),
    Claim("waiting of the ranks, packed, the worst of eight layouts", "the time of the update",
          "waiting_ranks", "rows/way=balanced&packed=True/waiting", 0.08, unit="%",
          tolerance=0.15, note="one by one, a step of 64 at spread 8"),
    Claim("ZeRO-3's Python per layer, layers as leaf modules", "every module with its hooks",
          "update_costs", "python/leaf_over_plain", 0.6, tolerance=0.15,
          note="36 tiny layers, processor time of forward, recomputed and backward pass"),
    Claim("ZeRO-3's Python per layer, layers as leaf modules, beside none", "no ZeRO",
          "update_costs", "python/leaf_over_none", 1.5, tolerance=0.2,
          note="2.88x without leaf modules; 1.45x of ZeRO-2"),
    Claim("crossings of PCIe by a gradient in an optimizer step of 4 micro-batches, one GPU, host "
          "optimizer", "8 (ZeRO-2 with bf16 sums)", "update_costs",
          "transfers/zero_stage=1/crossings", 1.0, unit="", tolerance=0.0,
          note="ZeRO-1; the same with ZeRO-2 and float32 sums"),
    Claim("error of a sum of 64 noisy bf16 gradients, in float32", "the sum",
          "update_costs", "sums/fp32", 1e-6, unit="%", note="0.76 % in bf16"),
    Claim("weight sync of 434 tensors, 0.5B parameters", "OpenRLHF's loop over parameters",
          "weight_sync", "models/0.5B/buckets/64/of_upstream", 1.0, tolerance=0.15,
          whole_only=True, note="buckets of 64 MiB; 0.92x with 512, the default"),
    Claim("weight sync of 434 small tensors", "OpenRLHF's loop over parameters", "weight_sync",
          "models/small/buckets/64/of_upstream", 1.0, tolerance=0.15),
    Claim("Knights & Knaves generator, 7 people", "the official generator", "kk_generator",
          "ratio", 50, lower=False, tolerance=0.25),
    Claim("growth with responses", LINEAR, "growth", "panels/responses/exponent", 1.05, unit="",
          tolerance=0.15),
    Claim("growth with the length of a response", LINEAR, "growth", "panels/length/exponent",
          None, unit="", tolerance=0.15,
          note="attention takes the square of the length"),
    Claim("growth with the vocabulary", LINEAR, "growth", "panels/vocabulary/exponent", 1.05,
          unit="", tolerance=0.15),
    Claim("growth with the group", LINEAR, "growth", "panels/group/exponent", 1.05, unit="",
          tolerance=0.15),
    Claim("growth with ranks, each with a core", LINEAR, "growth", "panels/ranks/exponent", 1.05,
          unit="", tolerance=0.15, note="a rank alone gathers nothing"),
    Claim("grading, 10,000 answers", "plain math-verify", "grading", "all/wall_speedup", 1.0,
          lower=False),
    Claim("grading, 9,950 answers, none of them hostile", "plain math-verify", "grading",
          "without_hostile/wall_speedup", 1.0, lower=False),
    Claim("evaluation, whole process", "lm-evaluation-harness 0.4.13", "eval_throughput",
          "process_time_ratio", 1.0),
    Claim("evaluation, generation alone", "lm-evaluation-harness 0.4.13", "eval_throughput",
          "generation_time_ratio", 1.0, note="each response has a seed of its own"),
    Claim("retrieval, queries per second of 64 clients", "a plain server built as Search-R1's",
          "retrieval", "grid/*/speedup", 2.5, lower=False,
          note="the least of three widths and three sizes"),
)  # fmt: skip
