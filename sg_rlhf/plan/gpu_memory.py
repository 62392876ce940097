"""Memory of one GPU of a run, bytes: each function is a line of the plan, with its formula.

P is the number of parameters, P' of those that are trained, n of the ranks, V of the vocabulary, T
of the tokens of a pass, h the hidden size. Read in DeepSpeed 0.19.8, as OpenRLHF 0.11.2 configures
it (every bucket and limit is DeepSpeed's default), and in vLLM 0.32.0.
"""

from __future__ import annotations

from sg_rlhf.machine.hardware import Hardware
from sg_rlhf.plan.run_shape import RunShape
from sg_rlhf.sampling import vllm_settings

GIB = 2**30
#: DeepSpeed's defaults (deepspeed/runtime/zero/config.py), in entries.
REDUCE_BUCKET = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000
PREFETCH_BUCKET = 50_000_000
#: What gradients are collected in before they are reduced, 2 bytes an entry.
BUCKET = 2.0 * REDUCE_BUCKET
#: A block of the fused head on a GPU: its tokens, vocabulary and logits at most (`_ROWS`,
#: `_CUDA_COLUMNS`, `_CUDA_LOGITS` of `sg_rlhf.algo.log_probs.fused_log_probs`).
FUSED_ROWS, FUSED_COLUMNS, FUSED_LOGITS = 4096, 2**15, 2**24
#: Share of the tensors that lies in gaps of the allocator's blocks, too small for the next tensor.
#: Updates of 3B and 7B ran on a software GPU with 1.11 and 1.14 times their tensors, and not with
#: 1.09 (tests/software_gpu/README.md). With room to spare the allocator keeps more.
GAPS = 0.12
#: A CUDA context with the kernels that were loaded: on an H200 with PyTorch 2.11, .80 GiB of the
#: device beyond what PyTorch's allocator held (tests/gpu/results/h_memory_nvidia_h200.json).
CONTEXT = 0.8 * GIB
#: NCCL's buffers of one process group of several ranks. Assumed.
NCCL = 0.6 * GIB
#: What a vLLM engine keeps asleep, beside its context: CUDA graphs and workspaces. On the H200 a 3B
#: engine with graphs had 1.38 GiB asleep, with its context. Without graphs: assumed.
ENGINE_GRAPHS = 0.6 * GIB
ENGINE_EAGER = 0.4 * GIB


def policy(run: RunShape) -> float:
    """bf16 weights: 2P, under ZeRO-3 a shard of 2P / n (arXiv 1910.02054, table 1)."""
    return run.weight_bytes * run.model.parameters / (run.ranks if run.zero_stage == 3 else 1)


def reference(run: RunShape) -> float:
    """As the policy's weights; none of it where it is offloaded or on GPUs of its own."""
    if not run.reference or not run.reference_beside or run.reference_offload:
        return 0.0
    return policy(run)


def optimizer(run: RunShape) -> float:
    """float32 master weights and Adam's two moments: 12 P' / n; none with ``ds.adam_offload``."""
    if run.adam_offload:
        return 0.0
    return 12 * run.trainable / (run.ranks if run.zero_stage else 1)


def gradients(run: RunShape) -> float:
    """The shard that accumulates: 2 P' / n (4 with ``ds.grad_accum_dtype=fp32``).

    With ``ds.adam_offload`` it is on the host, but for ZeRO-2's float32 sums (stage_1_and_2.py,
    ``_build_compact_grad_partition_buffer``). ZeRO 0 and 1 hold all gradients.
    """
    if run.zero_stage < 2:
        return run.grad_bytes * run.trainable
    on_host = run.adam_offload and not (run.zero_stage == 2 and run.grad_bytes > run.weight_bytes)
    return 0.0 if on_host else run.grad_bytes * run.trainable / run.ranks


def reduction(run: RunShape) -> float:
    """While gradients are reduced: a copy of the bucket, and the embedding's gradient."""
    copy = min(REDUCE_BUCKET, run.trainable) if run.ranks > 1 else 0
    return 2.0 * copy + largest_gradient(run)


def largest_gradient(run: RunShape) -> float:
    """Of the embedding or head: 2 V h bytes."""
    return 2.0 * run.model.head_parameters if not run.lora_rank else 0.0


def gathered(run: RunShape) -> float:
    """Parameters that ZeRO-3 has whole at a time (``stage3_max_live_parameters``), 2 bytes each."""
    if run.zero_stage < 3 or run.ranks == 1:
        return 0.0
    live = min(run.model.parameters, MAX_LIVE_PARAMETERS)
    return 2.0 * max(live, run.model.head_parameters)


def gathered_in_scoring(run: RunShape) -> float:
    """As above, and what ZeRO-3 fetches ahead in vain, after an update.

    It still follows the order of a training pass, so it keeps the last layers for a backward pass
    that does not come. At each of them, the norm and the head it fetches a bucket of the layers
    before them (``stage3_prefetch_bucket_size``).
    """
    kept = gathered(run)
    if not kept:
        return 0.0
    layers = max(0.0, kept / 2 - run.model.head_parameters) / run.model.layer_parameters
    return kept + 2.0 * PREFETCH_BUCKET * (min(layers, run.model.num_layers) + 2)


def checkpoints(run: RunShape) -> float:
    """What a forward pass of L layers leaves for the backward pass, without the head.

    With gradient checkpointing the layers' inputs, 2 h T L bytes (arXiv 1604.06174); without it
    :attr:`ModelShape.activation_bytes`. Both: the last norm's, 6h + 4.
    """
    model, tokens = run.model, run.train_pass_tokens
    layer = 2 * model.hidden_size if run.checkpointing else model.activation_bytes
    return tokens * (model.num_layers * layer + 6 * model.hidden_size + 4)


def recomputed_layer(run: RunShape) -> float:
    """With checkpointing, one layer's activations while its backward pass runs."""
    if not run.checkpointing:
        return 0.0
    return run.train_pass_tokens * run.model.activation_bytes


def logits_of_update(run: RunShape) -> float:
    """The largest that logits and their gradients are in an update.

    full: float32 logits of every token, 4 V T bytes a copy, and their gradient. At temperature 1
    that is 2.5 copies, else 3 (the gradient once more, divided by the temperature).
    fused: of a block the float32 logits and their bf16 gradient; the gradient of a block of the
    head in float32, if there are several blocks; of every token the hidden state and its gradients
    in float32 and bf16, 8 h T.
    """
    if run.logits == "fused":
        hidden = run.model.hidden_size
        rows, columns = _fused_block(run, run.train_pass_tokens)
        block = 6.0 * rows * columns
        if run.train_pass_tokens > rows:
            block += 4.0 * columns * hidden
        return block + 8.0 * hidden * run.train_pass_tokens
    copies = 2.5 if run.temperature == 1.0 else 3.0
    return copies * _copy_of_logits(run, run.train_pass_tokens)


def logits_in_layers(run: RunShape) -> float:
    """While the layers' backward passes run: upstream still holds the logits it returned."""
    return 0.0 if run.logits == "fused" else _copy_of_logits(run, run.train_pass_tokens)


def logits_of_scoring(run: RunShape) -> float:
    """Without gradients: the bf16 logits and their float32 copy, 1.5 copies; fused: two blocks."""
    if run.logits == "fused":
        rows, columns = _fused_block(run, run.rollout_pass_tokens)
        return 8.0 * rows * columns
    return 1.5 * _copy_of_logits(run, run.rollout_pass_tokens)


def _fused_block(run: RunShape, tokens: int) -> tuple[int, int]:
    """Rows and columns of the fused head's largest block."""
    rows = max(1, min(FUSED_ROWS, tokens))
    return rows, min(FUSED_COLUMNS, FUSED_LOGITS // rows, run.model.vocab_size)


def _copy_of_logits(run: RunShape, tokens: int) -> float:
    return 4.0 * run.model.vocab_size * tokens


def scoring_layer(run: RunShape) -> float:
    """A layer's forward pass without gradients: four hidden states and the MLP's three, bf16."""
    model = run.model
    return run.rollout_pass_tokens * (8 * model.hidden_size + 6 * model.intermediate_size)


def optimizer_step(run: RunShape) -> float:
    """Gradients flattened and in float32, 6 bytes an entry (measured: tests/gpu/README.md).

    ZeRO-3 does 1e9 entries at a time.
    """
    if run.adam_offload:
        return 0.0
    own = run.trainable / (run.ranks if run.zero_stage else 1)
    return 6.0 * (min(SUB_GROUP, own) if run.zero_stage == 3 else own)


def building(run: RunShape) -> float:
    """While DeepSpeed builds its optimizer: float32 weights of a sub-group twice, 4 bytes."""
    if run.adam_offload:
        return 0.0
    return 4.0 * min(SUB_GROUP, run.trainable / (run.ranks if run.zero_stage else 1))


def sync_buffers(run: RunShape) -> float:
    """A bucket, or the largest tensor if it is larger, and under ZeRO-3 gathered once more."""
    largest = 2.0 * run.model.head_parameters
    bucket = max(largest, min(run.sync_bucket, 2.0 * run.model.parameters))
    return bucket * (2 if run.zero_stage == 3 else 1)


def contexts(run: RunShape) -> float:
    """CUDA contexts and NCCL's buffers of the trainer's processes on a GPU."""
    processes = 1 + (run.reference and run.reference_beside)
    return processes * (CONTEXT + (NCCL if run.ranks > 1 else 0.0))


def engine_weights(run: RunShape) -> float:
    """vLLM's weights in the policy's dtype, over its tensor-parallel GPUs: 2P, 4P in float32."""
    return run.weight_bytes * run.model.parameters / run.engine_tp


def engine_asleep(run: RunShape) -> float:
    """What a sleeping engine keeps: its context, and CUDA graphs unless it runs eagerly."""
    return CONTEXT + (ENGINE_EAGER if run.eager_engines else ENGINE_GRAPHS)


def engine_awake(run: RunShape, hardware: Hardware) -> float:
    """All that vLLM takes: ``vllm.gpu_memory_utilization`` of the GPU."""
    return run.gpu_memory_utilization * hardware.gpu_memory_gib * GIB


def engine_sequences(hardware: Hardware) -> int:
    """Sequences that an engine runs at a time; ``vllm.engine_args`` is not read."""
    return vllm_settings.sequences_at_a_time(hardware.gpu_memory_gib)


def engine_activations(run: RunShape, hardware: Hardware) -> float:
    """What vLLM's profiling run measures: a batch of 8,192 tokens, and the sampler's logits.

    The MLP's widest moment, 6f + 4h bytes a token, and three float32 copies of all logits.
    """
    model = run.model
    wide = 6 * model.intermediate_size / run.engine_tp + 4 * model.hidden_size
    logits = 4.0 * engine_sequences(hardware) * model.vocab_size
    return vllm_settings.BATCHED_TOKENS * wide + 3 * logits


def kv_cache(run: RunShape, hardware: Hardware) -> float:
    """What is left of vLLM's share for keys and values; below 0 where the weights do not fit."""
    taken = engine_weights(run) + engine_activations(run, hardware) + engine_asleep(run)
    return engine_awake(run, hardware) - taken


def kv_bytes_per_token(run: RunShape) -> float:
    """On one GPU of an engine: heads of keys are split as far as there are any."""
    bytes_per_token = run.model.kv_bytes_per_token * run.weight_bytes / 2
    return bytes_per_token / min(run.engine_tp, run.model.num_kv_heads)
