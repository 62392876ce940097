"""Estimate how long a rollout step takes: what the hardware could do, times a share, plus overhead.

Every constant is in :class:`Assumptions`. Measured were rollout steps of 0.5B and 3B parameters on
one GPU (tests/gpu/README.md) and micro-batches of 3B (lab/bench/results/zero_stages.json). Links,
networks and several GPUs are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from sg_rlhf.machine.hardware import Hardware
from sg_rlhf.plan import gpu_memory as gpu
from sg_rlhf.plan.phases import cache_of
from sg_rlhf.plan.run_shape import RunShape
from sg_rlhf.plan.shapes import ModelShape

#: What limits each part: operations, bytes of memory, or bytes of a link.
BOUND = {
    "sampling": "bytes", "scoring": "FLOPs", "update": "FLOPs", "optimizer": "bytes",
    "weight sync": "bytes", "offload": "PCIe",
}  # fmt: skip
PARTS = tuple(BOUND)
#: Parts in which ranks wait for each other.
OF_RANKS = ("scoring", "update")
#: What the policy's GPUs do while engines of their own sample ahead.
TRAINING = ("scoring", "update", "optimizer")
NOT_INCLUDED = "start, compilation, rewards, evaluations, checkpoints, logging"
#: The longest response of a rollout has about so many times the mean length.
LONGEST = 4


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """The constants of the estimate. Shares are of the data-sheet figure; times are in seconds."""

    #: Mean length of a response, tokens; None: a quarter of ``rollout.max_new_tokens``.
    response_tokens: float | None = None
    #: Share of the tokens left for a prompt that it has.
    prompt_share: float = 1 / 3
    #: Share of a dialogue with an environment that the model writes.
    written_share: float = 0.5
    #: Time of an environment's answer, per turn.
    turn_seconds: float = 0.5
    #: bf16 peak in training and scoring. Measured: .45 and .42 for the layers of 3B at 10,240
    #: tokens, without the head. Llama 3 reports 38 to 43 % (arXiv 2407.21783, table 4).
    mfu: float = 0.4
    #: bf16 peak in vLLM's prefill.
    prefill_mfu: float = 0.5
    #: Memory bandwidth in decoding.
    bandwidth: float = 0.7
    #: Bandwidth of NVLink, PCIe and network in collectives and copies.
    link: float = 0.7
    #: Memory bandwidth of a node, GB/s, for Adam on the CPU.
    host_bandwidth: float = 150.0
    #: Python's work for one layer's forward pass under ZeRO-3, and below. A backward pass counts
    #: 1.5. Measured with 3B: .0089 to .0094 and .001; with recomputation .032 for both passes. The
    #: first is without leaf modules, which take about half (lab/bench/results/update_costs.json,
    #: on a CPU; not measured on a GPU).
    gathered_layer_seconds: float = 0.0093
    leaf_share: float = 0.55
    layer_seconds: float = 0.001
    #: Below ZeRO-3, the hooks of one layer's gradients. Measured: .0092 for both passes in all.
    gradient_seconds: float = 0.0057
    #: vLLM's scheduler and sampler, per decoding step with CUDA graphs. Measured (stage f): 13 ms,
    #: of which reading weights and cache takes 3.
    step_seconds: float = 0.01
    #: Launches of one layer's kernels without CUDA graphs. Measured (stage e): 33 ms per step.
    eager_layer_seconds: float = 0.001
    #: Latency of one of a layer's two all-reduces under tensor parallelism.
    reduce_seconds: float = 15e-6
    #: One bucket of a weight sync: barriers, an exchange.
    message_seconds: float = 0.005
    #: One remote call to one engine, per bucket.
    call_seconds: float = 0.0015
    #: One tensor in a bucket: gathered and freed by ZeRO-3, copied, loaded.
    packed_seconds: float = 0.0005
    #: Share of the ranks' time that is work, not waiting: packed samples balanced by length,
    #: dynamic batches, padded samples. Means of lab/bench/results/waiting_ranks.json, whose draws
    #: reach from 0.86, 0.85 and 0.39.
    balanced: float = 0.99
    dynamic: float = 0.96
    unbalanced: float = 0.67

    @property
    def zero3_seconds(self) -> float:
        """Python's work for one layer's forward pass under ZeRO-3."""
        return self.gathered_layer_seconds * self.leaf_share

    def mean_response(self, run: RunShape) -> float:
        """Mean length of a response, tokens."""
        return min(self.response_tokens or run.max_new_tokens / 4, run.max_new_tokens)

    def prompt(self, run: RunShape) -> float:
        """Length of a prompt, tokens."""
        return max(32.0, (run.max_len - run.max_new_tokens) * self.prompt_share)

    def working(self, run: RunShape) -> float:
        """Share of the ranks' time that is work, not waiting for other ranks."""
        if run.ranks == 1:
            return 1.0
        if run.train_tokens:
            return self.dynamic
        return self.balanced if run.packing else self.unbalanced


DEFAULT = Assumptions()


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a rollout step, by part in the order of :data:`PARTS`."""

    parts: Mapping[str, float]
    limits: Mapping[str, float]  # see limits()
    tokens: float  # of a rollout, prompts and responses
    assumed: tuple[str, ...]  # the assumptions that matter most, one line each
    assumptions: Assumptions
    samples_ahead: bool  # while the policy trains

    @property
    def seconds(self) -> float:
        """Of a rollout; of an asynchronous one the longer of sampling and training."""
        if not self.samples_ahead:
            return sum(self.parts.values())
        training = sum(self.parts[part] for part in TRAINING)
        rest = sum(self.parts.values()) - training - self.parts["sampling"]
        return max(self.parts["sampling"], training) + rest

    def line(self, rollouts: int | None = None) -> str:
        """Seconds, hours and the largest share."""
        count = rollouts or 100
        run = f"{rollouts} rollouts" if rollouts else "100 rollouts"
        largest = max(self.parts, key=lambda part: self.parts[part])
        share = self.parts[largest] / self.seconds
        meanwhile = ", sampling during training" if self.samples_ahead else ""
        return (
            f"time, an estimate: {self.seconds:.0f} s a rollout{meanwhile}, "
            f"{count * self.seconds / 3600:.1f} hours for {run} without evaluations; "
            f"{largest} takes most, {share:.0%}"
        )

    def lines(self, rollouts: int | None = None) -> list[str]:
        """The line, the parts, what is assumed and what is not included."""
        parts = ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.05
        )
        return [
            self.line(rollouts),
            f"  seconds: {parts}",
            f"  times the hardware's limit: {self.ratios()}",
            *(f"  assumed: {line}" for line in self.assumed),
            f"  not included: {NOT_INCLUDED}",
        ]

    def ratios(self) -> str:
        """How far each part is from the limit of the hardware, with the limit and its kind."""
        return ", ".join(
            f"{name} {seconds / self.limits[name]:.1f} ({self.limits[name]:.1f} s by {BOUND[name]})"
            for name, seconds in self.parts.items()
            if seconds >= 0.05 and self.limits.get(name, 0.0) > 0
        )

    def as_json(self) -> dict[str, object]:
        """For scripts, and for the run directory."""
        return {
            "seconds": round(self.seconds, 3),
            "parts": {name: round(value, 3) for name, value in self.parts.items()},
            "limits": {name: round(value, 3) for name, value in self.limits.items()},
            "tokens": round(self.tokens),
            "not_included": NOT_INCLUDED,
            "assumptions": asdict(self.assumptions),
        }


def time_plan(
    run: RunShape, hardware: Hardware, assumptions: Assumptions = DEFAULT
) -> TimePlan | None:
    """Seconds of a rollout; None for a machine without GPUs, of which nothing is known."""
    if run.cpu or not hardware.gpus:
        return None
    given, working = assumptions, assumptions.working(run)
    mean, prompt = given.mean_response(run), given.prompt(run)
    return TimePlan(
        parts={
            name: seconds(run, hardware, given) / (working if name in OF_RANKS else 1.0)
            for name, seconds in SECONDS.items()
        },
        tokens=run.samples * (prompt + mean),
        assumed=(
            f"responses of {mean:.0f} tokens on average, the longest {_longest(run, given):.0f}; "
            f"prompts of {prompt:.0f}",
            f"{given.mfu:.0%} of the bf16 peak in training, {given.bandwidth:.0%} of the memory's "
            f"bandwidth in decoding, {given.link:.0%} of the links'",
            f"{given.zero3_seconds * 1000:.0f} ms of Python per layer, forward pass and "
            f"micro-batch under ZeRO-3, else {given.layer_seconds * 1000:.0f} ms",
            f"ranks work {working:.0%} of the time and wait for each other in the rest",
        ),
        assumptions=given,
        samples_ahead=run.samples_ahead,
        limits=limits(run, hardware, given),
    )


def limits(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> dict[str, float]:
    """Seconds of each part at the data sheet's figures: no Python, no waiting, nothing twice."""
    ideal = replace(
        given, mfu=1.0, prefill_mfu=1.0, bandwidth=1.0, link=1.0, gathered_layer_seconds=0.0,
        layer_seconds=0.0, gradient_seconds=0.0, step_seconds=0.0, eager_layer_seconds=0.0,
        reduce_seconds=0.0, message_seconds=0.0, call_seconds=0.0, packed_seconds=0.0,
    )  # fmt: skip
    once = replace(run, checkpointing=False, adam_offload=False)
    return {
        name: seconds(once if name == "update" else run, hardware, ideal)
        for name, seconds in SECONDS.items()
    }


def _longest(run: RunShape, given: Assumptions) -> float:
    return min(run.max_new_tokens, LONGEST * given.mean_response(run))


def sequence_flops(model: ModelShape, tokens: float) -> float:
    """FLOPs of one sequence: 2P a token, and 2 q T^2 a layer for causal attention.

    Without the embedding, which is looked up; with the head (arXiv 2001.08361).
    """
    matmul = 2 * (model.parameters - (0 if model.tied else model.head_parameters))
    return matmul * tokens + 2 * model.num_layers * model.num_heads * model.head_dim * tokens**2


def sampling(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Prefill, then decoding until the longest response has ended.

    A decoding step reads the weights and the running sequences' keys and values, or multiplies,
    whichever takes longer; under tensor parallelism two all-reduces a layer come on top. An engine
    runs as many sequences at a time as its cache holds; the next waiting one starts when one ends.
    """
    model, kind, parts = run.model, hardware.type, run.engine_tp
    mean, prompt = given.mean_response(run), given.prompt(run)
    of_engine = -(-run.samples // run.engines)
    written = given.written_share if run.turns > 1 else 1.0
    steps, loaded = decoding(
        run, hardware, prompt=prompt, mean=mean, longest=_longest(run, given), written=written
    )
    generated = written * of_engine * mean
    weights = gpu.engine_weights(run)
    flops = kind.tflops * 1e12 * given.prefill_mfu
    seconds = max(loaded / (kind.bandwidth * 1e9 * given.bandwidth), weights * generated / flops)
    overhead = given.eager_layer_seconds * model.num_layers if run.eager_engines else 0.0
    seconds += steps * (given.step_seconds + overhead)
    if parts > 1:
        moved = 2 * 2 * model.hidden_size * generated
        link = hardware.link_gb_per_s * 1e9 * given.link
        seconds += 2 * model.num_layers * (steps * given.reduce_seconds + moved / link)
    prefilled = prompt + (1 - written) * mean
    if run.turns > 1 and not run.prefix_caching:
        prefilled += run.turns * mean / 2
    seconds += of_engine * sequence_flops(model, prefilled) / (flops * parts)
    return seconds + (run.turns - 1) * given.turn_seconds


def decoding(
    run: RunShape, hardware: Hardware,
    *, prompt: float, mean: float, longest: float, written: float = 1.0,
) -> tuple[float, float]:  # fmt: skip
    """Decoding steps of an engine in a rollout, and the bytes that each of its GPUs reads in them.

    A step reads the weights; a generated token reads the keys and values of its prompt and of half
    of its response.

    Args:
        prompt, mean, longest: tokens of a prompt, of a response (both means), of the longest one.
        written: share of a response that the model writes.
    """
    of_engine = -(-run.samples // run.engines)
    fitting = cache_of(run, hardware).sequences * run.max_len / (mean + prompt)
    at_once = max(1, min(of_engine, gpu.engine_sequences(hardware), int(fitting)))
    steps = written * max(longest, of_engine * mean / at_once + longest - mean)
    generated = written * of_engine * mean
    cached = generated * (prompt + mean / 2) * gpu.kv_bytes_per_token(run)
    return steps, steps * gpu.engine_weights(run) + cached


def update_flops(run: RunShape, samples: float, tokens: float) -> float:
    """FLOPs of forward and backward passes over a rollout of so many samples."""
    return forwards(run) * run.epochs * samples * sequence_flops(run.model, tokens)


def forwards(run: RunShape) -> int:
    """Arithmetic of a forward and a backward pass, in forward passes: 6P a token, with LoRA 4P.

    Backward multiplies by the weights, and once more for their gradients. LoRA needs none of these.
    """
    return 2 if run.lora_rank else 3


def collective(run: RunShape, hardware: Hardware, size: float, given: Assumptions) -> float:
    """Seconds in which every rank gathers or reduces ``size`` bytes that all ranks share.

    A GPU receives all of it over its link; the network interfaces of a node share it.
    """
    if run.ranks == 1:
        return 0.0
    inside = size / (hardware.link_gb_per_s * 1e9)
    if run.nodes == 1:
        return inside / given.link
    between = size / (hardware.type.network * 1e9 * run.gpus_per_node)
    return max(inside, between) / given.link


def _passes(
    run: RunShape, hardware: Hardware, given: Assumptions,
    *, forwards: float, python: float, collectives: int, micro_batches: float,
) -> float:  # fmt: skip
    """Passes of a rank over its samples: arithmetic, Python or collectives, the longest of them.

    Args:
        forwards: the arithmetic of a pass, in forward passes.
        python: seconds for one layer and micro-batch.
        collectives: gathers of the weights and reductions of the gradients.
    """
    of_rank = run.samples / run.ranks
    tokens = given.mean_response(run) + given.prompt(run)
    peak = hardware.type.tflops * 1e12 * given.mfu
    computed = of_rank * forwards * sequence_flops(run.model, tokens) / peak
    moved = 0.0
    if run.zero_stage == 3:
        moved = collectives * collective(run, hardware, 2 * run.model.parameters, given)
    return max(computed, micro_batches * max(python * run.model.num_layers, moved))


def micro_batches(run: RunShape, given: Assumptions, samples: int, size: int, limit: int) -> float:
    """Micro-batches of a rank: packed ones have ``limit`` tokens, others ``size`` samples."""
    of_rank = samples / run.ranks
    if run.packing:
        tokens = given.mean_response(run) + given.prompt(run)
        return math.ceil(of_rank * tokens / limit)
    return math.ceil(of_rank / size)


def training_micro_batches(run: RunShape, given: Assumptions = DEFAULT) -> float:
    """Of a rank in one pass over the rollout."""
    steps = max(1, run.samples // run.train_batch)
    of_step = min(run.samples, run.train_batch)
    limit = run.train_pass_tokens
    return steps * micro_batches(run, given, of_step, run.train_micro, limit)


def _forward_seconds(run: RunShape, given: Assumptions) -> float:
    """Python's work for one layer's forward pass."""
    return given.zero3_seconds if run.zero_stage == 3 else given.layer_seconds


def scoring(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """The old log-probs that need a pass and the reference's, without waiting."""
    models = run.old_share + run.reference
    return models * _passes(
        run, hardware, given, forwards=1, python=_forward_seconds(run, given), collectives=1,
        micro_batches=micro_batches(
            run, given, run.samples, run.rollout_micro, run.rollout_pass_tokens
        ),
    )  # fmt: skip


def update(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Forward and backward passes: 6P a token (LoRA 4P), 2P more with recomputed layers.

    ZeRO-3 gathers the weights twice and reduces the gradients.
    """
    recomputed = 1 if run.checkpointing else 0
    python = (2.5 + recomputed) * _forward_seconds(run, given)
    if run.zero_stage < 3:
        python += given.gradient_seconds
    passes = training_micro_batches(run, given)
    seconds = _passes(
        run, hardware, given, forwards=forwards(run) + recomputed, python=python, collectives=3,
        micro_batches=passes,
    )  # fmt: skip
    crossing = passes * gradient_transfers(run) * run.grad_bytes * run.trainable / run.ranks
    return run.epochs * (seconds + crossing / (hardware.type.pcie * 1e9 * given.link))


def gradient_transfers(run: RunShape) -> int:
    """How often a gradient crosses PCIe in each micro-batch (lab/bench/results/update_costs.json).

    With ``ds.adam_offload`` ZeRO-3 and ZeRO-2 bring the sums to the GPU and back. ZeRO-2 keeps
    float32 sums on the GPU, and ZeRO-1 all sums.
    """
    on_gpu = run.zero_stage < 2 or (run.zero_stage == 2 and run.grad_bytes > run.weight_bytes)
    return 0 if on_gpu or not run.adam_offload else 2


def optimizer_steps(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Adam reads and writes 28 bytes a parameter; with ``ds.adam_offload`` 6 cross PCIe."""
    own = run.trainable / run.ranks
    if run.adam_offload:
        on_host = 28 * own * run.gpus_per_node / (given.host_bandwidth * 1e9)
        seconds = on_host + 6 * own / (hardware.type.pcie * 1e9 * given.link)
    else:
        seconds = 28 * own / (hardware.type.bandwidth * 1e9 * given.bandwidth)
    if run.zero_stage < 3:
        seconds += collective(run, hardware, 2 * (2.0 * run.trainable), given)
    return run.optimizer_steps * seconds


def weight_sync(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """All weights gathered and sent in buckets, each with a remote call to each engine.

    A bucket passes 6 times through the GPU's memory: packed, loaded, summed on both sides.
    """
    size = 2 * run.model.parameters
    seconds = collective(run, hardware, size, given) if run.zero_stage == 3 else 0.0
    if not run.colocated:
        seconds += size / (hardware.type.network * 1e9 * given.link)
    seconds += 6 * size / (hardware.type.bandwidth * 1e9 * given.bandwidth)
    seconds += run.model.tensors * given.packed_seconds
    buckets = math.ceil(size / run.sync_bucket)
    return seconds + buckets * (given.message_seconds + given.call_seconds * run.engines)


def offload(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Over PCIe, to and fro: vLLM's weights (``vllm.enable_sleep``), DeepSpeed's states."""
    pcie = hardware.type.pcie * 1e9 * given.link
    moved = 2 * gpu.engine_weights(run) if run.engines_sleep else 0.0
    if run.trainer_sleeps and not run.adam_offload:
        moved += 2 * (gpu.optimizer(run) + gpu.gradients(run))
    return moved / pcie


#: The seconds of each part.
SECONDS = {
    "sampling": sampling, "scoring": scoring, "update": update, "optimizer": optimizer_steps,
    "weight sync": weight_sync, "offload": offload,
}  # fmt: skip
