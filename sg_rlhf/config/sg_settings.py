"""The ``sg`` section of a recipe: what GRPO-SG and the overlay add to upstream's flags."""

from __future__ import annotations

import functools
import json
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from sg_rlhf.common.redaction import redact
from sg_rlhf.config import domain_settings
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.settings import DomainSettings

#: vLLM raises lower temperatures to 0.01, so the trainer would use another one.
MIN_TEMPERATURE = 0.01
#: Keys of ours that may also be written among upstream's, where a user looks for them.
ALIASES = {
    "actor.fused_logprobs": "sg.fused_logprobs",
    "data.chat_template_kwargs": "sg.chat_template_kwargs",
    "data.apply_chat_template_kwargs": "sg.chat_template_kwargs",  # verl's
    "vllm.engine_args": "sg.engine_args",
}
_FLAG = "algo.advantage.is_correction_{}"


def _flags(mode: str, low: float, high: float) -> dict[str, Any]:
    values = {"level": "token", "mode": mode, "gating": "ratio", "threshold": [low, high]}
    return {_FLAG.format(name): value for name, value in values.items()}


#: Value of ``sg.correction`` -> upstream's keys that it sets. They compose with every weighting
#: (:mod:`sg_rlhf.algo.rollout_correction`); thresholds are those of the names' projects.
CORRECTIONS = {
    # Truncated: min(pi_trainer / pi_engine, 2), https://fengyao.notion.site/off-policy-rl
    "tis": _flags("clip", 0.0, 2.0),
    # Masked: a token whose ratio is above 2 has no gradient; ms-swift's threshold.
    "mis": _flags("mask", 0.0, 2.0),
    # Masked on both sides; the band of Ring-1T (arXiv 2510.18855), upstream's default.
    "icepop": _flags("mask", 0.5, 5.0),
}


class EvalSet(BaseModel):
    """One held-out set with settings of its own; upstream has one temperature and n for all."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="its name in the metrics")
    dataset: str = Field(
        min_length=1, description="JSONL file, or another value that eval.dataset takes"
    )
    temperature: float = Field(ge=0.0, description="0 is greedy")
    n_samples_per_prompt: int = Field(1, ge=1, description="16 for avg@16 and pass@16")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_new_tokens: int | None = Field(None, ge=1, description="default: rollout.max_new_tokens")
    limit: int | None = Field(None, ge=1, description="only the first prompts")

    @model_validator(mode="after")
    def _one_temperature(self) -> EvalSet:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"vLLM raises lower temperatures to {MIN_TEMPERATURE:g}: set it to 0, or to "
                f"{MIN_TEMPERATURE:g} or more"
            )
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            raise ValueError("temperature 0 gives the same response n times: set it above 0 or n=1")
        return self


class SGSettings(BaseModel):
    """The ``sg`` section with its defaults.

    ``weighting`` and ``objective`` hold all parameters, as ``weighting_resolution`` resolved them.
    The classes of ``sg_rlhf.algo`` define the parameters and check them.
    """

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)

    weighting: dict[str, Any] = Field(
        {"type": "grpo_sg"}, description="token weighting: {type: NAME, parameter: value, ...}"
    )
    objective: dict[str, Any] = Field(
        {}, description="parameters of the objective that actor.policy_loss_type names"
    )
    update: Literal["together", "lopti"] = Field(
        "together", description="lopti: the unlikely tokens of a rollout first, then the rest"
    )
    lopti_threshold: float = Field(
        0.5, ge=0.0, description="update=lopti: a token below this probability is unlikely"
    )
    advantage_std: Literal["sample", "population"] = Field(
        "sample", description="std of Eq. 4 with group_norm; upstream's is the sample std"
    )
    run_dir: str | None = Field(None, description="where metrics, samples and plots are written")
    eval_at_start: bool = Field(True, description="evaluate before the first update")
    eval_sets: list[EvalSet] = Field(
        [],
        description="held-out sets with settings of their own, instead of eval.dataset: "
        "a list of {name, dataset, temperature, n_samples_per_prompt, ...}",
    )
    samples_per_step: int = Field(4, ge=0, description="responses kept in samples.jsonl per step")
    samples_per_prompt: int = Field(
        2, ge=1, description="of these, responses to the same prompt, to compare them"
    )
    sync_check_tolerance: float = Field(
        0.05,
        gt=0,
        description="largest mean absolute log-prob difference that passes as bf16 rounding, of a "
        "checked sync. A rollout above it warns. Before its update, four times that stops the "
        "run; 1 nat does in any mode",
    )
    collective_timeout: float = Field(
        2400.0,
        gt=0.0,
        description="seconds that a rank waits for the others in NCCL or gloo before the run "
        "stops; longer than the engines may take to start, as ranks wait there for them",
    )
    engine_timeout: float = Field(
        300.0,
        ge=0.0,
        description="seconds without a sign of life that end an engine; 0: never. An engine has "
        "six times as long to start, and at least 1,800 s",
    )
    engine_restarts: int = Field(
        3,
        ge=0,
        le=3,
        description="how often each engine that died or hung is started again before the run stops",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="train.async_enable: weight syncs between the sampling of a token and the "
        "update that trains it, at most; 0 samples as a synchronous run does",
    )
    correction: Literal["tis", "mis", "icepop"] | None = Field(
        None,
        description="correction for the mismatch of trainer and engine: tis limits a token's "
        "ratio to 2, mis drops tokens above 2, icepop those outside of 0.5 to 5; sets "
        "algo.advantage.is_correction_*",
    )
    kl_to_engine: float = Field(
        0.0,
        ge=0.0,
        description="coefficient of a KL (k3) to the policy that sampled, by the engine's "
        "log-probs; an addition to the loss that needs no reference model",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="on NaN or infinity: stop the run before the optimizer step, or skip the "
        "step or the sample and continue",
    )
    fused_logprobs: bool = Field(
        True,
        description="log-probs of the policy and the reference without full logits; "
        "actor.fused_logprobs is the same key",
    )
    share_prompts: bool = Field(
        False,
        description="compute a prompt once for all its responses in a micro-batch "
        "(packed samples, log-probs without logits, attention varlen)",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="arguments of the chat template with data.apply_chat_template, such as "
        "{enable_thinking: false}; data.chat_template_kwargs is the same key",
    )
    engine_args: dict[str, Any] = Field(
        {},
        description="vLLM's own arguments for every rollout engine, such as {max_num_seqs: 128}; "
        "vllm.engine_args is the same key",
    )
    model_revision: str | None = Field(
        None,
        description="commit, tag or branch of actor.model_name_or_path on the hub; on a cluster "
        "every machine must see the cache of this one (HF_HOME). null: its main branch",
    )
    trust_remote_code: list[str] = Field(
        [],
        description="models whose own code may run, named as in the recipe",
    )
    wandb: Literal["auto", "offline", "disabled"] = Field(
        "auto",
        description="auto: online with a key, else an offline run in the run directory; offline: "
        "never sends anything",
    )
    trackio: bool = Field(
        False,
        description="log to trackio too, on this machine (pip install '.[trackio]'); the "
        "project is logger.wandb.project, the run has the name of the run directory",
    )
    verbose: bool = Field(False, description="print the workers' output instead of a progress bar")
    domains: dict[str, SerializeAsAny[DomainSettings]] = Field(
        {}, description="sections of the domains, sg.NAME.KEY, by domain"
    )

    @field_validator("eval_sets", "trust_remote_code", mode="before")
    @classmethod
    def _from_command_line(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("expected a list") from None

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _template_kwargs(cls, value: Any) -> Any:
        return chat.check_template_kwargs(value)

    @field_validator("eval_sets")
    @classmethod
    def _distinct_names(cls, sets: list[EvalSet]) -> list[EvalSet]:
        names = [s.name for s in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have the same name: {', '.join(names)}")
        return sets


def apply_correction(
    name: str | None, values: dict[str, Any], origin: dict[str, str]
) -> dict[str, Any]:
    """Add the keys of ``sg.correction`` to a recipe's values."""
    if name is None:
        return values
    for key, value in CORRECTIONS[name].items():
        given = values.get(key)
        if given is not None and given != value:
            raise ConfigError(
                f"{origin.get(key, 'recipe')}: {key}={given}: sg.correction={name} sets it to "
                f"{value}; set only one of the two"
            )
    return values | CORRECTIONS[name]


@functools.cache
def sg_keys() -> dict[str, str]:
    """Key of ``sg`` -> what it is; keys of a domain's section are keys of their own."""
    own = {
        f"sg.{name}": info.description or ""
        for name, info in SGSettings.model_fields.items()
        if name != "domains"
    }
    return {**own, **domain_settings.keys()}


def validation_message(error: ValidationError, section: str = "sg") -> tuple[str, str]:
    """The key of a pydantic error in a section, and one line about it."""
    first = error.errors()[0]
    key = ".".join([section, *map(str, first["loc"])])
    if first["type"] == "missing":
        return key, f"{key}: not set"
    why = first["msg"].removeprefix("Value error, ")
    return key, f"{key}={redact(key, first.get('input'))!r}: {why}"
