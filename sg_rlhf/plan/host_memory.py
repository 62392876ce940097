"""Memory of one node and disk of a run, bytes: each function is a line of the plan.

Torch takes page-locked memory in powers of two (c10's ``pinned_max_round_threshold``, unlimited by
default), so a buffer may cost up to twice its size.
"""

from __future__ import annotations

from sg_rlhf.plan.gpu_memory import GIB, SUB_GROUP
from sg_rlhf.plan.run_shape import RunShape

#: A Python process with torch, DeepSpeed or vLLM, without models: assumed on a GPU's host. On the
#: CPU processes share what they have imported; measured runs are planned to -18, -5 and +13 %.
PROCESS = 2.5 * GIB
PROCESS_CPU = 0.55e9
#: Metrics, samples, pictures, logs of a run. Assumed.
LOGS = 1e9


def pinned(size: float) -> float:
    """Bytes that torch takes of the host for a page-locked buffer."""
    return float(1 << (max(1, int(size)) - 1).bit_length())


def engine_gpus_of_node(run: RunShape) -> int:
    """GPUs of engines on a node, where they share the policy's."""
    gpus = run.engines * run.engine_tp
    return min(run.gpus_per_node, gpus) if run.colocated else gpus


def sleep_backup(run: RunShape) -> float:
    """vLLM's weights while it sleeps: a page-locked copy of every allocation (its cumem.py).

    torch's CUDA allocator makes one of each tensor above 10 MiB, rounded to 2 MiB.
    """
    if not run.engines_sleep:
        return 0.0
    model, parts = run.model, run.engine_tp
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, middle = model.hidden_size, model.intermediate_size
    layer = [
        hidden * (queries + 2 * keys), hidden * queries, 2 * hidden * middle, hidden * middle,
    ]  # fmt: skip
    heads = [model.head_parameters] * (1 if model.tied else 2)
    copies = model.num_layers * sum(_backup(run.weight_bytes * size / parts) for size in layer)
    copies += sum(_backup(run.weight_bytes * size / parts) for size in heads)
    return copies * engine_gpus_of_node(run)


def _backup(size: float) -> float:
    if size <= 10 * 2**20:  # of a segment that others share
        return size
    step = 2 * 2**20
    return pinned(-(-size // step) * step)


def optimizer_states(run: RunShape) -> float:
    """DeepSpeed's states on the host, per node; bytes of a parameter.

    ``ds.enable_sleep``: page-locked master weights and moments, 4 each, and gradients, 2.
    ``ds.adam_offload``: the states, 12, page-locked float32 gradients, 4, and their shard, 2.
    """
    own = run.trainable / run.ranks
    shard = pinned(run.grad_bytes * own)
    if run.adam_offload:
        return run.gpus_per_node * (12 * own + _groups(own) + shard)
    if run.trainer_sleeps:
        return run.gpus_per_node * (3 * _groups(own) + shard)
    return 0.0


def _groups(entries: float) -> float:
    """A float32 buffer of each sub-group of at most 1e9 entries."""
    whole, rest = divmod(entries, SUB_GROUP)
    return whole * pinned(4 * SUB_GROUP) + (pinned(4 * rest) if rest else 0.0)


def offloaded_weights(run: RunShape) -> float:
    """A reference in host memory (``ref.offload``) and a moving average of the policy."""
    copies = (run.reference and run.reference_offload) + run.ema
    return copies * run.weight_bytes * run.model.parameters / max(1, run.nodes)


def model_file(run: RunShape) -> float:
    """The model's file in the page cache, once for all that map it (safetensors)."""
    return 2.0 * run.model.parameters


def consolidated(run: RunShape) -> float:
    """The first rank's copy of all weights when a Hugging Face folder is saved."""
    return float(run.weight_bytes * run.model.parameters)


def object_store(run: RunShape) -> float:
    """A rollout in Ray's object store (/dev/shm): about 40 bytes a token, twice."""
    return 2 * 40.0 * run.samples * run.max_len


def processes(run: RunShape) -> float:
    """Python processes of a node: policy, reference, engines (two each), controller and driver."""
    trainers = run.gpus_per_node * (1 + (run.reference and run.reference_beside))
    engines = 2 * -(-engine_gpus_of_node(run) // max(1, run.engine_tp))
    return (PROCESS_CPU if run.cpu else PROCESS) * (trainers + engines + 2)


def deepspeed_folder(run: RunShape) -> float:
    """A checkpoint to resume from: 12 bytes of each trained parameter; below ZeRO-3, and of a
    frozen model, the bf16 weights as well, 2P.
    """
    weights = (
        run.weight_bytes * run.model.parameters if run.zero_stage < 3 or run.lora_rank else 0.0
    )
    return 12.0 * run.trainable + weights


def hugging_face_folder(run: RunShape) -> float:
    """A folder to evaluate or serve: 2P; of adapters alone with LoRA."""
    return float(run.weight_bytes * run.trainable)
