"""What of a recipe decides memory and time, taken out of its keys once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sg_rlhf.config import Config, ConfigError, local_path, topology
from sg_rlhf.config.log_probs import FUSED_FAMILIES, fused_log_probs_supported, old_log_prob_rule
from sg_rlhf.plan.shapes import ModelShape, shape_of

#: Keys that count something of which there must be one.
COUNTS = (
    "actor.num_nodes", "actor.num_gpus_per_node", "vllm.tensor_parallel_size",
    "ds.ring_attn_size", "ds.tensor_parallel_size", "rollout.batch_size",
    "rollout.n_samples_per_prompt", "rollout.micro_batch_size", "train.batch_size",
    "train.micro_batch_size", "train.max_epochs", "data.max_len",
)  # fmt: skip

#: Others without a sense outside some range.
RANGES = {
    "vllm.num_engines": (0, None),
    "vllm.gpu_memory_utilization": (0, 1),
    "ds.zero_stage": (0, 3),
    "ds.lora.rank": (0, None),
    "ckpt.max_num": (0, None),
}

#: full: logits of every token in float32, as upstream has them. fused: log-probs from the hidden
#: states in chunks, logits of the whole batch never exist.
Logits = Literal["full", "fused"]


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A run's sizes.

    Attributes:
        model: the policy's shape; the reference and the engines have the same.
        hardware: what the recipe is for, by its name; "" where
            it names none.
        cpu: whether it is for a machine without GPUs.
        nodes: of the policy.
        gpus_per_node: ranks of the policy on each.
        gpus_apart: GPUs of models and engines that are not on the policy's, on all nodes.
        not_planned: models that run and whose memory and time are not in the plan: a critic, a
            reward model.
        engines: vLLM engines.
        engine_tp: GPUs of one engine (``vllm.tensor_parallel_size``).
        colocated: whether policy, reference and engines share their GPUs: ``train.colocate_all``
            without ``train.async_enable``, whose engines have GPUs of their own.
        samples_ahead: whether engines sample while the policy trains (``train.async_enable`` with
            ``sg.max_staleness`` above 0).
        engines_sleep: ``vllm.enable_sleep``: while the policy trains, weights in host memory and no
            KV cache.
        trainer_sleeps: ``ds.enable_sleep``: while vLLM samples, optimizer states in host memory.
        eager_engines: ``vllm.enforce_eager``: without CUDA graphs.
        gpu_memory_utilization: share of a GPU that vLLM may take.
        prefix_caching: whether responses of a prompt share its keys and values.
        sync_backend: ``vllm.sync_backend``.
        sync_bucket: bytes of ``sg.sync_bucket_mb``; 0 in upstream's loop.
        zero_stage: of DeepSpeed.
        shards: ranks that share a sequence or its tensors (``ds.ring_attn_size`` times
            ``ds.tensor_parallel_size``): with n of them there are 1/n as many data-parallel ranks.
        ring: ``ds.ring_attn_size`` alone.
        adam_offload: optimizer states always in host memory, stepped by the CPU.
        reference_offload: the reference's parameters in host memory.
        reference: whether there is a reference model (``algo.kl.init_coef`` above 0).
        reference_beside: whether it is on the policy's GPUs.
        old_share: of a rollout's samples, how many need a pass for their old log-probs.
        ema: whether a moving average of the policy is kept, on the host.
        lora_rank: 0 trains every parameter.
        grad_bytes: of one gradient entry as it accumulates: 4 with
            ``ds.grad_accum_dtype=fp32`` or float32 weights, else 2.
        weight_bytes: of one weight: 4 with ``ds.param_dtype=fp32``, which needs the CPU, else 2.
        prompts: of a rollout.
        group: responses of each.
        train_batch: samples of an optimizer step.
        train_micro: samples of a forward and backward pass of one rank.
        rollout_micro: samples of a scoring pass of one rank.
        train_tokens: with dynamic batches, the most tokens of such a pass; else None.
        rollout_tokens: with dynamic batches, the most tokens of a scoring pass; else None.
        epochs: passes over a rollout (``train.max_epochs``, twice that for Lopti).
        max_len: tokens of a sample at most.
        max_new_tokens: of a response at most; of a dialogue with an environment, all of it.
        temperature: of the rollout.
        entropy: whether the entropy of every token is computed (``actor.entropy_coef`` is set).
        checkpointing: ``actor.gradient_checkpointing_enable``.
        packing: without padding (``ds.packing_samples``).
        dealt: whether samples are dealt to micro-batches by length (``sg.batches``).
        logits: see :data:`Logits`.
        save_steps: rollouts from one checkpoint to the next; 0 for none before the end.
        keep: checkpoints that are kept (``ckpt.max_num``).
        save_hf: whether each is also a Hugging Face folder.
        save_optimizer: whether each is a DeepSpeed folder, from which a run can resume.
        best: whether the best checkpoint by an evaluation is kept beside them.
        turns: model turns of a response: 1 without an environment.
        local_model: whether the model is a folder, so that nothing is downloaded.
    """

    model: ModelShape
    hardware: str
    cpu: bool
    nodes: int
    gpus_per_node: int
    gpus_apart: int
    not_planned: tuple[str, ...]
    engines: int
    engine_tp: int
    colocated: bool
    samples_ahead: bool
    engines_sleep: bool
    trainer_sleeps: bool
    eager_engines: bool
    gpu_memory_utilization: float
    prefix_caching: bool
    sync_backend: str
    sync_bucket: int
    zero_stage: int
    shards: int
    ring: int
    adam_offload: bool
    reference_offload: bool
    reference: bool
    reference_beside: bool
    old_share: float
    ema: bool
    lora_rank: int
    grad_bytes: int
    weight_bytes: int
    prompts: int
    group: int
    train_batch: int
    train_micro: int
    rollout_micro: int
    train_tokens: int | None
    rollout_tokens: int | None
    epochs: int
    max_len: int
    max_new_tokens: int
    temperature: float
    entropy: bool
    checkpointing: bool
    packing: bool
    dealt: bool
    logits: Logits
    save_steps: int
    keep: int
    save_hf: bool
    save_optimizer: bool
    best: bool
    turns: int
    local_model: bool

    @property
    def ranks(self) -> int:
        """Of the policy: its GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus(self) -> int:
        """Of all models and engines, on all nodes."""
        return self.ranks + self.gpus_apart

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return max(1, self.ranks // self.shards)

    @property
    def samples(self) -> int:
        """Responses of a rollout."""
        return self.prompts * self.group

    @property
    def optimizer_steps(self) -> int:
        """Of a rollout."""
        return max(1, self.samples // self.train_batch) * self.epochs

    @property
    def train_pass_tokens(self) -> int:
        """Tokens of the largest training pass of one rank, prompts and responses."""
        return (self.train_tokens or self.train_micro * self.max_len) // self.ring

    @property
    def rollout_pass_tokens(self) -> int:
        """Tokens of the largest scoring pass of one rank."""
        return (self.rollout_tokens or self.rollout_micro * self.max_len) // self.ring

    @property
    def trainable(self) -> int:
        """Parameters that have a gradient and optimizer states."""
        if not self.lora_rank:
            return self.model.parameters
        return lora_parameters(self.model, self.lora_rank)


def lora_parameters(model: ModelShape, rank: int) -> int:
    """Of adapters on every projection: rank * (inputs + outputs) of each (arXiv 2106.09685)."""
    hidden, middle = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    return model.num_layers * rank * (attention + 3 * (hidden + middle))


def run_shape(config: Config) -> RunShape | None:
    """The sizes of a loaded recipe; None where the model's shape is known neither here nor on disk.

    Raises:
        ConfigError: the model is a module that is not installed, or a number is out of its range.
        ValueError: a local model's ``config.json`` is unreadable or describes another kind of
            model.
    """
    value = config.value
    for key in COUNTS:
        if value(key) is None or value(key) < 1:
            raise ConfigError(f"{key}={value(key)}: expected 1 or more")
    for key, (least, most) in RANGES.items():
        found = value(key) or 0
        if found < least or (most is not None and found > most):
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            raise ConfigError(f"{key}={found}: expected {expected}")
    named = value("actor.model_name_or_path")
    model = shape_of(local_path("actor.model_name_or_path", str(named))) if named else None
    if model is None:
        return None
    hardware = config.hardware
    dynamic = bool(value("train.dynamic_batch_enable"))
    train_tokens = value("train.max_tokens_per_gpu") if dynamic else None
    max_len = value("data.max_len")
    shards = value("ds.ring_attn_size") * value("ds.tensor_parallel_size")
    cpu = hardware == "cpu" or value("vllm.sync_backend") == "gloo"
    ranks = value("actor.num_nodes") * value("actor.num_gpus_per_node")
    names = {name for group in topology.groups(value) for name in group.who.split(", ")}
    return RunShape(
        model=model,
        hardware=hardware,
        cpu=cpu,
        nodes=value("actor.num_nodes"),
        gpus_per_node=value("actor.num_gpus_per_node"),
        gpus_apart=topology.gpus(value) - ranks,
        not_planned=tuple(name for name in ("critic", "reward") if name in names),
        engines=value("vllm.num_engines") or 0,
        engine_tp=value("vllm.tensor_parallel_size"),
        colocated=topology.engines_share(value),
        samples_ahead=bool(value("train.async_enable")) and config.sg.max_staleness > 0,
        engines_sleep=bool(value("vllm.enable_sleep")),
        trainer_sleeps=bool(value("ds.enable_sleep")),
        eager_engines=bool(value("vllm.enforce_eager")),
        gpu_memory_utilization=float(value("vllm.gpu_memory_utilization")),
        prefix_caching=bool(value("vllm.enable_prefix_caching")),
        sync_backend=value("vllm.sync_backend"),
        sync_bucket=_sync_bucket(config),
        zero_stage=value("ds.zero_stage"),
        shards=shards,
        ring=value("ds.ring_attn_size"),
        adam_offload=bool(value("ds.adam_offload")),
        reference_offload=bool(value("ref.offload")),
        reference=value("algo.kl.init_coef") > 0,
        reference_beside=bool(value("train.colocate_all") or value("train.colocate_actor_ref")),
        old_share=old_log_prob_rule(value).share,
        ema=bool(value("train.enable_ema")),
        lora_rank=value("ds.lora.rank"),
        grad_bytes=4 if "fp32" in (value("ds.grad_accum_dtype"), value("ds.param_dtype")) else 2,
        weight_bytes=4 if value("ds.param_dtype") == "fp32" else 2,
        prompts=value("rollout.batch_size"),
        group=value("rollout.n_samples_per_prompt"),
        train_batch=value("train.batch_size"),
        train_micro=value("train.micro_batch_size"),
        rollout_micro=value("rollout.micro_batch_size"),
        train_tokens=train_tokens,
        rollout_tokens=(value("rollout.max_tokens_per_gpu") or train_tokens) if dynamic else None,
        epochs=value("train.max_epochs") * (2 if config.sg.update == "lopti" else 1),
        max_len=max_len,
        max_new_tokens=min(value("rollout.max_new_tokens") or max_len, max_len),
        temperature=float(value("rollout.temperature")),
        entropy=value("actor.entropy_coef") is not None,
        checkpointing=bool(value("actor.gradient_checkpointing_enable")),
        packing=bool(value("ds.packing_samples")),
        dealt=config.sg.batches == "balanced" and not dynamic and shards == 1,
        logits=_logits(config, model),
        save_steps=max(0, value("ckpt.save_steps")),
        keep=value("ckpt.max_num"),
        save_hf=bool(value("ckpt.save_hf")),
        save_optimizer=not value("ckpt.disable_ds"),
        best=value("ckpt.best_metric_key") != "none",
        turns=_turns(config),
        local_model=Path(model.name).is_dir(),
    )


def _logits(config: Config, model: ModelShape) -> Logits:
    fused = model.family in FUSED_FAMILIES and fused_log_probs_supported(
        config.sg.fused_logprobs,
        config.value("ds.tensor_parallel_size"),
        config.value("ds.deepcompile"),
    )
    return "fused" if fused else "full"


def _sync_bucket(config: Config) -> int:
    in_buckets = config.sg.weight_sync == "buckets" and config.value("ds.tensor_parallel_size") <= 1
    return config.sg.sync_bucket_mb * 2**20 if in_buckets else 0


def _turns(config: Config) -> int:
    """Turns of a dialogue, where the recipe trains an agent whose domain counts them."""
    if not config.value("train.agent_func_path"):
        return 1
    found: list[Any] = [
        getattr(settings, "max_turns", None) for settings in config.sg.domains.values()
    ]
    return 1 + max((turns for turns in found if isinstance(turns, int)), default=0)
