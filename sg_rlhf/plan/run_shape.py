"""What of a recipe decides memory and time, taken out of its keys once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sg_rlhf.config import Config, local_path
from sg_rlhf.config.checks.layout import check_engine_count
from sg_rlhf.config.derived import topology
from sg_rlhf.config.derived.log_probs import (
    FUSED_FAMILIES,
    fused_log_probs_supported,
    old_log_prob_rule,
)
from sg_rlhf.config.derived.weight_sync import bucket_bytes
from sg_rlhf.plan.shapes import ModelShape, shape_of

#: full: logits of every token in float32, as upstream has them. fused: log-probs from the hidden
#: states in chunks, logits of the whole batch never exist.
Logits = Literal["full", "fused"]


def _key(name: str) -> Any:
    """A field that has the value of a recipe's key."""
    return field(metadata={"key": name})


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A run's sizes."""

    model: ModelShape  # of the policy; reference and engines have the same
    local_model: bool  # a folder, so that nothing is downloaded
    hardware: str  # the name that the recipe is for; "" without one
    cpu: bool  # for a machine without GPUs
    turns: int  # of the model in a dialogue; 1 without an environment
    not_planned: tuple[str, ...]  # models whose memory and time are left out: reward

    # GPUs
    nodes: int = _key("actor.num_nodes")
    gpus_per_node: int = _key("actor.num_gpus_per_node")
    gpus_apart: int  # of models and engines that are not on the policy's, on all nodes
    colocated: bool  # policy, reference and engines share their GPUs

    # engines
    engine_tp: int = _key("vllm.tensor_parallel_size")
    engines: int = _key("vllm.num_engines")
    gpu_memory_utilization: float = _key("vllm.gpu_memory_utilization")
    engines_sleep: bool = _key("vllm.enable_sleep")  # weights in host memory during training
    eager_engines: bool = _key("vllm.enforce_eager")
    prefix_caching: bool = _key("vllm.enable_prefix_caching")
    sync_bucket: int  # bytes
    samples_ahead: bool  # engines sample while the policy trains

    # models on the trainer's GPUs and their host
    zero_stage: int = _key("ds.zero_stage")
    trainer_sleeps: bool = _key("ds.enable_sleep")  # optimizer states there during sampling
    adam_offload: bool = _key("ds.adam_offload")
    reference: bool  # algo.kl.init_coef above 0
    reference_offload: bool = _key("ref.offload")
    reference_beside: bool  # on the policy's GPUs
    ema: bool = _key("train.enable_ema")  # a moving average of the policy, on the host
    lora_rank: int = _key("ds.lora.rank")  # 0 trains every parameter
    weight_bytes: int  # of one weight: 4 with ds.param_dtype=fp32, else 2
    grad_bytes: int  # of one accumulated gradient: 4 in float32, else 2

    # batches
    prompts: int = _key("rollout.batch_size")
    group: int = _key("rollout.n_samples_per_prompt")
    train_batch: int = _key("train.batch_size")  # samples of an optimizer step
    train_micro: int = _key("train.micro_batch_size")
    rollout_micro: int = _key("rollout.micro_batch_size")
    train_tokens: int | None  # train.max_tokens_per_gpu of dynamic batches
    rollout_tokens: int | None  # rollout.max_tokens_per_gpu of dynamic batches
    epochs: int  # passes over a rollout: train.max_epochs, twice that for Lopti
    old_share: float  # of the samples, how many need a pass for their old log-probs
    max_len: int = _key("data.max_len")
    max_new_tokens: int  # rollout.max_new_tokens; of a dialogue, all of it
    temperature: float = _key("rollout.temperature")
    checkpointing: bool = _key("actor.gradient_checkpointing_enable")
    packing: bool = _key("ds.packing_samples")
    logits: Logits

    # checkpoints
    save_steps: int  # ckpt.save_steps; 0 for none before the end
    keep: int = _key("ckpt.max_num")
    save_hf: bool = _key("ckpt.save_hf")
    save_optimizer: bool  # a DeepSpeed folder, from which a run can resume
    best: bool  # ckpt.best_metric_key is set

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that have the value of a recipe's key, by that key."""
        return {f.metadata["key"]: getattr(self, f.name) for f in fields(self) if f.metadata}

    @property
    def ranks(self) -> int:
        """GPUs of the policy."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus(self) -> int:
        """Of all models and engines, on all nodes."""
        return self.ranks + self.gpus_apart

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
        return self.train_tokens or self.train_micro * self.max_len

    @property
    def rollout_pass_tokens(self) -> int:
        """Tokens of the largest scoring pass of one rank."""
        return self.rollout_tokens or self.rollout_micro * self.max_len

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
        ConfigError: the model is a module that is not installed, or no number of engines is set.
        ValueError: a local model's ``config.json`` is unreadable, or of another kind of model.
    """
    value = config.value
    named = value("actor.model_name_or_path")
    model = shape_of(local_path("actor.model_name_or_path", str(named))) if named else None
    if model is None:
        return None
    check_engine_count(value)
    hardware = config.hardware
    dynamic = bool(value("train.dynamic_batch_enable"))
    train_tokens = value("train.max_tokens_per_gpu") if dynamic else None
    max_len = value("data.max_len")
    cpu = hardware == "cpu" or value("vllm.sync_backend") == "gloo"
    keyed = {f.name: value(f.metadata["key"]) for f in fields(RunShape) if f.metadata}
    return RunShape(
        **keyed,
        model=model,
        hardware=hardware,
        cpu=cpu,
        gpus_apart=topology.gpus(value) - topology.gpus_of(value, "actor"),
        not_planned=tuple(n for n in topology.models(value) if n == "reward"),
        colocated=topology.engines_share(value),
        samples_ahead=bool(value("train.async_enable")) and config.sg.max_staleness > 0,
        sync_bucket=bucket_bytes(value),
        reference=topology.has_reference(value),
        reference_beside=bool(value("train.colocate_all") or value("train.colocate_actor_ref")),
        old_share=old_log_prob_rule(value).share,
        grad_bytes=4 if "fp32" in (value("ds.grad_accum_dtype"), value("ds.param_dtype")) else 2,
        weight_bytes=4 if value("ds.param_dtype") == "fp32" else 2,
        train_tokens=train_tokens,
        rollout_tokens=(value("rollout.max_tokens_per_gpu") or train_tokens) if dynamic else None,
        epochs=value("train.max_epochs") * (2 if config.sg.update == "lopti" else 1),
        max_new_tokens=min(value("rollout.max_new_tokens") or max_len, max_len),
        logits=_logits(config, model),
        save_steps=max(0, value("ckpt.save_steps")),
        save_optimizer=not value("ckpt.disable_ds"),
        best=value("ckpt.best_metric_key") != "none",
        turns=_turns(config),
        local_model=Path(model.name).is_dir(),
    )


def _logits(config: Config, model: ModelShape) -> Logits:
    fused = model.family in FUSED_FAMILIES and fused_log_probs_supported(
        config.sg.fused_logprobs, config.value("ds.deepcompile")
    )
    return "fused" if fused else "full"


def _turns(config: Config) -> int:
    """Turns of a dialogue, where the recipe trains an agent whose domain counts them."""
    if not config.value("train.agent_func_path"):
        return 1
    found: list[Any] = [
        getattr(settings, "max_turns", None) for settings in config.sg.domains.values()
    ]
    return 1 + max((turns for turns in found if isinstance(turns, int)), default=0)
