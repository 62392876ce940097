"""How long a rollout takes, by a roofline: what the hardware could do, times a stated share of it.

An estimate, with its assumptions in :class:`Assumptions`. Nothing here was measured on a GPU; the
run writes what it measures beside it (docs/gpu.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from sg_rlhf.machine.hardware import Hardware
from sg_rlhf.plan import gpu_memory as gpu
from sg_rlhf.plan import host_memory as host
from sg_rlhf.plan.lengths import Way, balance, in_batches, quantiles
from sg_rlhf.plan.phases import cache_of
from sg_rlhf.plan.run_shape import RunShape
from sg_rlhf.plan.shapes import ModelShape

#: Tokens at a time in the simulation of sampling.
STEP = 32
PARTS = ("sampling", "scoring", "update", "optimizer", "weight sync", "offload", "saving")
#: What the policy's GPUs do while engines of their own sample ahead.
TRAINING = ("scoring", "update", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the estimate takes for granted.

    Attributes:
        response_tokens: mean length of a response before the cut at ``rollout.max_new_tokens``;
            None for a quarter of that.
        response_spread: standard deviation of its logarithm; 0.55 is fourfold from the 10th to
            the 90th percentile.
        prompt_share: of the tokens left for a prompt, how many it has.
        written_share: of a dialogue with an environment, what the model writes.
        mfu: share of the bf16 peak in training and scoring. Llama 3 reports 38 to 43 % on H100
            (arXiv 2407.21783, table 4); layers that are not fused reach less.
        prefill_mfu: of vLLM's prefill.
        bandwidth: share of the memory bandwidth in decoding.
        link: share of NVLink's, PCIe's and the network's bandwidth in collectives and copies.
        step_seconds: of vLLM's scheduler and sampler for each token.
        reduce_seconds: latency of one of the two all-reduces of a layer under tensor parallelism.
        turn_seconds: an environment's answer, for each turn.
        tensor_seconds: of one tensor in upstream's weight sync: a gather, an object exchange, a
            barrier.
        call_seconds: of one remote call to one engine; every tensor makes one to each, or every
            bucket.
        bucket_seconds: of one bucket of a weight sync beside its calls: two barriers, two waits
            for the GPU.
        packed_seconds: of one tensor in a bucket: gathered and freed by ZeRO-3, copied, loaded.
        host_bandwidth: of a node's memory, GB/s, for Adam on the CPU.
        disk: GB/s.
        dynamic_balance: share of the ranks' time that dynamic batches keep them at work; drawn
            lengths give 85 to 99 % (docs/performance.md, "Batches").
    """

    response_tokens: float | None = None
    response_spread: float = 0.55
    prompt_share: float = 1 / 3
    written_share: float = 0.5
    mfu: float = 0.35
    prefill_mfu: float = 0.5
    bandwidth: float = 0.7
    link: float = 0.7
    step_seconds: float = 0.004
    reduce_seconds: float = 15e-6
    turn_seconds: float = 0.5
    tensor_seconds: float = 0.005
    call_seconds: float = 0.0015
    bucket_seconds: float = 0.01
    packed_seconds: float = 0.0005
    host_bandwidth: float = 150.0
    disk: float = 1.0
    dynamic_balance: float = 0.95

    def mean_response(self, run: RunShape) -> float:
        """Tokens."""
        return self.response_tokens or run.max_new_tokens / 4

    def prompt(self, run: RunShape) -> float:
        """Tokens of a prompt."""
        return max(32.0, (run.max_len - run.max_new_tokens) * self.prompt_share)

    def lines(self, run: RunShape) -> list[str]:
        """What of it a reader should know first."""
        found = [
            f"responses of {self.mean_response(run):.0f} tokens on average, log-normal with "
            f"spread {self.response_spread}, cut at {run.max_new_tokens}; prompts of "
            f"{self.prompt(run):.0f}",
            f"{self.mfu:.0%} of the bf16 peak in training, {self.bandwidth:.0%} of the memory's "
            f"bandwidth in decoding, {self.link:.0%} of the links'",
        ]
        if run.train_tokens:
            share = f"{self.dynamic_balance:.0%}"
            found.append(f"dynamic batches keep the ranks at work {share} of the time")
        return found


DEFAULT = Assumptions()


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a rollout.

    Attributes:
        parts: seconds by part, in the order of :data:`PARTS`; saving is spread over rollouts.
        balance: shares of scoring and update that are work, not waiting.
        tokens: of a rollout, prompts and responses.
        assumptions: what it rests on.
        samples_ahead: whether the engines sample while the policy trains.
    """

    parts: Mapping[str, float]
    balance: Mapping[str, float]
    tokens: float
    assumptions: Assumptions
    samples_ahead: bool = False

    @property
    def seconds(self) -> float:
        """Of a rollout; of an asynchronous one what takes longer, sampling or training."""
        if not self.samples_ahead:
            return sum(self.parts.values())
        training = sum(self.parts[part] for part in TRAINING)
        rest = sum(self.parts.values()) - training - self.parts["sampling"]
        return max(self.parts["sampling"], training) + rest

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda part: self.parts[part])

    def line(self, rollouts: int | None = None) -> str:
        """Seconds, hours and the largest share.

        Args:
            rollouts: of the run; None where that is not known.
        """
        count = rollouts or 100
        run = f"{rollouts} rollouts" if rollouts else "100 rollouts"
        share = self.parts[self.largest] / self.seconds
        meanwhile = ", sampling during training" if self.samples_ahead else ""
        return (
            f"time, an estimate: {self.seconds:.0f} s a rollout{meanwhile}, "
            f"{count * self.seconds / 3600:.1f} hours for {run} without evaluations; "
            f"{self.largest} takes most, {share:.0%}"
        )

    def lines(self, run: RunShape, rollouts: int | None = None) -> list[str]:
        """The line, the parts, and what it rests on."""
        parts = ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in self.parts.items() if seconds >= 0.05
        )
        working = ", ".join(f"{name} {share:.0%}" for name, share in self.balance.items())
        return [
            self.line(rollouts),
            f"  seconds: {parts}",
            f"  share of the ranks' time that is work and not waiting: {working}",
            *(f"  assumed: {line}" for line in self.assumptions.lines(run)),
        ]

    def as_json(self) -> dict[str, object]:
        """For scripts, and for the run directory."""
        return {
            "seconds": round(self.seconds, 3),
            "parts": {name: round(value, 3) for name, value in self.parts.items()},
            "balance": {name: round(value, 3) for name, value in self.balance.items()},
            "tokens": round(self.tokens),
            "assumptions": asdict(self.assumptions),
        }


def time_plan(
    run: RunShape, hardware: Hardware, assumptions: Assumptions = DEFAULT
) -> TimePlan | None:
    """Seconds of a rollout; None for a machine without GPUs, of which nothing is known."""
    if run.cpu or not hardware.gpus or not run.engines:
        return None
    tokens = _mean_tokens(run, assumptions) * run.samples
    shares = {
        "scoring": _balance(run, assumptions, run.rollout_micro, run.samples, "pieces"),
        "update": _balance(run, assumptions, run.train_micro, run.train_batch, "shuffled"),
    }
    parts = {
        "sampling": sampling(run, hardware, assumptions),
        "scoring": scoring(run, hardware, assumptions) / shares["scoring"],
        "update": update(run, hardware, assumptions) / shares["update"],
        "optimizer": optimizer_steps(run, hardware, assumptions),
        "weight sync": weight_sync(run, hardware, assumptions),
        "offload": offload(run, hardware, assumptions),
        "saving": saving(run, assumptions),
    }
    return TimePlan(
        parts=parts, balance=shares, tokens=tokens, assumptions=assumptions,
        samples_ahead=run.samples_ahead,
    )  # fmt: skip


def _mean_tokens(run: RunShape, given: Assumptions) -> float:
    responses = quantiles(256, given.mean_response(run), given.response_spread, run.max_new_tokens)
    return sum(responses) / len(responses) + given.prompt(run)


def _balance(run: RunShape, given: Assumptions, micro: int, step: int, upstreams: Way) -> float:
    if run.train_tokens:
        return given.dynamic_balance
    return balance(
        run.prompts, run.group, run.data_parallel, micro, given.mean_response(run),
        given.response_spread, run.max_new_tokens, given.prompt(run), run.packing, step,
        "dealt" if run.dealt else upstreams,
    )  # fmt: skip


def forward_flops(run: RunShape, tokens: float) -> float:
    """:func:`sequence_flops` of the run's model."""
    return sequence_flops(run.model, tokens)


def sequence_flops(model: ModelShape, tokens: float) -> float:
    """Of one sequence: 2P a token, and 2 q T^2 a layer for causal attention (arXiv 2001.08361).

    Without the embedding, which is looked up; with the head.
    """
    matmul = 2 * (model.parameters - (0 if model.tied else model.head_parameters))
    return matmul * tokens + 2 * model.num_layers * model.num_heads * model.head_dim * tokens**2


def sampling(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Prefill, then decoding until the longest response has ended.

    A decoding step reads the weights and the running sequences' keys and values, or multiplies,
    whichever takes longer; under tensor parallelism two all-reduces a layer come on top.
    """
    model, kind, parts = run.model, hardware.type, run.engine_tp
    of_engine = -(-run.samples // run.engines)
    written = given.written_share if run.turns > 1 else 1.0
    mean = given.mean_response(run)
    lengths = quantiles(of_engine, mean, given.response_spread, run.max_new_tokens)
    lengths[-1] = quantiles(run.samples, mean, given.response_spread, run.max_new_tokens)[-1]
    cache = cache_of(run, hardware)
    fitting = cache.sequences * run.max_len / (mean + given.prompt(run))
    at_once = max(1, min(of_engine, gpu.ENGINE_SEQUENCES, int(fitting)))
    read = kind.bandwidth * 1e9 * given.bandwidth
    flops = kind.tflops * 1e12 * given.prefill_mfu
    link = hardware.link_gb_per_s * 1e9 * given.link
    weights, of_token, prompt = (
        gpu.engine_weights(run),
        gpu.kv_bytes_per_token(run),
        given.prompt(run),
    )
    seconds = 0.0
    for sequences, done in in_batches([written * n for n in lengths], at_once, STEP):
        loaded = weights + sequences * (prompt + done / written) * of_token
        computed = weights * sequences
        step = max(loaded / read, computed / flops) + given.step_seconds
        if parts > 1:
            moved = 2 * 2 * model.hidden_size * sequences
            step += 2 * model.num_layers * (given.reduce_seconds + moved / link)
        seconds += STEP * step
    prefilled = prompt + (1 - written) * mean
    if run.turns > 1 and not run.prefix_caching:
        prefilled += run.turns * mean / 2
    seconds += of_engine * forward_flops(run, prefilled) / (flops * parts)
    return seconds + (run.turns - 1) * given.turn_seconds


def collective(run: RunShape, hardware: Hardware, size: float, given: Assumptions) -> float:
    """Seconds in which every rank gathers ``size`` bytes that all ranks share, or reduces them.

    Within a node every GPU receives all of it over its link; between nodes the network interfaces
    of a node's GPUs share it.
    """
    if run.ranks == 1:
        return 0.0
    inside = size / (hardware.link_gb_per_s * 1e9)
    if run.nodes == 1:
        return inside / given.link
    between = size / (hardware.type.network * 1e9 * run.gpus_per_node)
    return max(inside, between) / given.link


def _passes(
    run: RunShape,
    hardware: Hardware,
    given: Assumptions,
    *,
    forwards: float,
    collectives: int,
    micro: int,
) -> float:
    """Passes of every rank over its samples: arithmetic or collectives, whichever takes longer."""
    of_rank = run.samples / run.data_parallel
    peak = hardware.type.tflops * 1e12 * given.mfu * run.shards
    computed = of_rank * forwards * forward_flops(run, _mean_tokens(run, given)) / peak
    if run.zero_stage < 3:
        return computed
    once = collective(run, hardware, 2 * run.model.parameters, given)
    return max(computed, collectives * once * -(-of_rank // micro))


def scoring(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """The old log-probs that need a pass and the reference's, without waiting."""
    models = run.old_share + run.reference
    return models * _passes(
        run, hardware, given, forwards=1, collectives=1, micro=run.rollout_micro
    )


def update(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Forward and backward passes: 6P a token, 8P with recomputed layers (arXiv 1604.06174).

    ZeRO-3 gathers the weights twice and reduces the gradients.
    """
    forwards = 4 if run.checkpointing else 3
    return run.epochs * _passes(
        run, hardware, given, forwards=forwards, collectives=3, micro=run.train_micro
    )


def optimizer_steps(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Adam reads and writes 28 bytes a parameter: of the GPU's memory, or of the node's.

    With ``ds.adam_offload`` gradients and weights cross PCIe as well, 4 bytes a parameter.
    """
    own = run.trainable / run.ranks
    if run.adam_offload:
        on_host = 28 * own * run.gpus_per_node / (given.host_bandwidth * 1e9)
        seconds = on_host + 4 * own / (hardware.type.pcie * 1e9 * given.link)
    else:
        seconds = 28 * own / (hardware.type.bandwidth * 1e9 * given.bandwidth)
    if run.zero_stage < 3:
        seconds += collective(run, hardware, 2 * (2.0 * run.trainable), given)
    return run.optimizer_steps * seconds


def weight_sync(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """All weights gathered and sent, in buckets or in upstream's loop.

    A bucket is a remote call to each engine, two barriers, and 6 passes over its bytes in the GPU's
    memory: packed and loaded, 2 each, its sums formed on both sides. Upstream's loop has
    for each tensor a gather, a remote call to each engine and a barrier.
    """
    size = 2 * run.model.parameters
    moved = collective(run, hardware, size, given) if run.zero_stage == 3 else 0.0
    if not run.colocated:
        moved += size / (hardware.type.network * 1e9 * given.link)
    if not run.sync_bucket:
        each = given.tensor_seconds + given.call_seconds * run.engines
        return run.model.tensors * each + moved
    buckets = math.ceil(size / run.sync_bucket)
    each = given.bucket_seconds + given.call_seconds * run.engines
    passes = 6 * size / (hardware.type.bandwidth * 1e9 * given.bandwidth)
    return buckets * each + run.model.tensors * given.packed_seconds + passes + moved


def offload(run: RunShape, hardware: Hardware, given: Assumptions = DEFAULT) -> float:
    """Over PCIe, to and fro: vLLM's weights (``vllm.enable_sleep``), DeepSpeed's states."""
    pcie = hardware.type.pcie * 1e9 * given.link
    moved = 2 * gpu.engine_weights(run) if run.engines_sleep else 0.0
    if run.trainer_sleeps and not run.adam_offload:
        moved += 2 * (gpu.optimizer(run) + gpu.gradients(run))
    return moved / pcie


def saving(run: RunShape, given: Assumptions = DEFAULT) -> float:
    """A checkpoint's folders, written by all nodes at once, over the rollouts between two."""
    if not run.save_steps:
        return 0.0
    states = host.deepspeed_folder(run) * run.save_optimizer / max(1, run.nodes)
    folder = host.hugging_face_folder(run) * run.save_hf
    return (states + folder) / (given.disk * 1e9) / run.save_steps
