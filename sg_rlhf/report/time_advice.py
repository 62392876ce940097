"""Where a rollout's time goes, in words, and which settings change it.

A rule names the parts of :mod:`sg_rlhf.run_dir.timing_keys` that it speaks of, and the share of a
rollout above which it does. The largest share is named in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sg_rlhf.config.log_probs import old_log_prob_rule

Setting = Callable[[str], Any]

#: Passes that make logits where ``actor.fused_logprobs`` is off.
_LOGITS = (
    "old_log_probs", "update_old_log_probs", "reference_log_probs", "update_reference_log_probs",
    "update_forward", "update_backward",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What to say of some parts.

    Attributes:
        what: the parts, as the sentence names them.
        parts: their names.
        above: share of a rollout from which they are worth a sentence.
        change: of the run's settings, what to do; "" where this rule has nothing to say of them.
    """

    what: str
    parts: tuple[str, ...]
    above: float
    change: Callable[[Setting], str]


def _longest(setting: Setting) -> str:
    return (
        f"a smaller rollout.max_new_tokens ({_value(setting, 'rollout.max_new_tokens')}), or a "
        f"larger rollout.batch_size ({_value(setting, 'rollout.batch_size')}), which has the "
        "engines busy for longer before they wait"
    )


def _generation(setting: Setting) -> str:
    eager = setting("vllm.enforce_eager") is True
    return (
        f"more engines (vllm.num_engines, {_value(setting, 'vllm.num_engines')})"
        + (", CUDA graphs on a GPU (vllm.enforce_eager=false)" if eager else "")
        + f", or a smaller rollout.max_new_tokens ({_value(setting, 'rollout.max_new_tokens')})"
    )


def _wake(setting: Setting) -> str:
    return (
        "vllm.enable_sleep=false where the memory allows it (python -m sg_rlhf.plan says so)"
        if setting("vllm.enable_sleep") is True
        else "a larger rollout.batch_size, which has fewer of them"
    )


def _logits(setting: Setting) -> str:
    return "actor.fused_logprobs=true" if setting("sg.fused_logprobs") is False else ""


def _old(setting: Setting) -> str:
    if setting("train.batch_size") is None:
        return ""
    rule = old_log_prob_rule(setting)
    if rule.of == "later":
        return f"a larger train.batch_size, as {rule.why}"
    return f"all samples need a pass for them, as {rule.why}" if rule.of == "all" else ""


def _reference(setting: Setting) -> str:
    return (
        "a larger rollout.micro_batch_size "
        f"({_value(setting, 'rollout.micro_batch_size')}), or algo.kl.init_coef=0, which has no "
        "reference model"
    )


def _update(setting: Setting) -> str:
    found = [f"a larger train.micro_batch_size ({_value(setting, 'train.micro_batch_size')})"]
    if setting("ds.packing_samples") is False:
        found.append("ds.packing_samples=true, which computes no padding")
    if setting("actor.gradient_checkpointing_enable") is True:
        found.append("actor.gradient_checkpointing_enable=false where the memory allows it")
    if setting("ds.adam_offload") is True:
        found.append("ds.adam_offload=false where the memory allows it")
    return _either(found)


def _update_rest(setting: Setting) -> str:
    found = ["responses of more even length (rank 0 waits for the slowest rank here)"]
    if setting("sg.batches") == "upstream":
        found.append("sg.batches=balanced, which deals samples to the ranks by length")
    if setting("ds.enable_sleep") is True:
        found.append("ds.enable_sleep=false, which keeps the optimizer's states on the GPU")
    return _either(found)


def _sync(setting: Setting) -> str:
    found = [
        f"a larger rollout.batch_size ({_value(setting, 'rollout.batch_size')}), which syncs less "
        "often for the same samples"
    ]
    if setting("sg.weight_sync") == "upstream":
        found.append("sg.weight_sync=buckets, which sends fewer and larger messages")
    if setting("ds.zero_stage") == 3:
        found.append("ds.zero_stage=2 where the memory allows it, which gathers no parameters")
    return _either(found)


def _check(setting: Setting) -> str:
    every = setting("sg.sync_check_every")
    return f"sg.sync_check_every=0 ({every}), which checks the first sync only" if every else ""


def _hand_over(_setting: Setting) -> str:
    return "a shorter data.max_len, or the ranks on the controller's node: samples are copied"


def _logging(setting: Setting) -> str:
    return f"fewer sg.samples_per_step ({_value(setting, 'sg.samples_per_step')})"


RULES = (
    Rule("waiting for the longest response", ("longest_response",), 0.2, _longest),
    Rule("generation with all engines busy", ("generation",), 0.5, _generation),
    Rule("waking the engines and sending them to sleep", ("engines_wake",), 0.1, _wake),
    Rule("passes that make float32 logits of every token", _LOGITS, 0.3, _logits),
    Rule("old log-probs", ("old_log_probs", "update_old_log_probs"), 0.1, _old),
    Rule(
        "reference log-probs", ("reference_log_probs", "update_reference_log_probs"), 0.2,
        _reference,
    ),
    Rule("forward and backward passes", ("update_forward", "update_backward"), 0.5, _update),
    Rule("the update outside its passes", ("ppo_train",), 0.15, _update_rest),
    Rule("weight sync", ("broadcast",), 0.1, _sync),
    Rule("the check of the weight sync", ("sync_check",), 0.1, _check),
    Rule("sending samples to the ranks", ("hand_over",), 0.05, _hand_over),
    Rule("logging", ("logging",), 0.1, _logging),
)  # fmt: skip


def advice(seconds: Mapping[str, float], setting: Setting) -> str:
    """What takes most of a rollout and what to change, in one or a few sentences; "" of nothing.

    Args:
        seconds: of a rollout by part, as :func:`sg_rlhf.run_dir.timing_keys.exclusive_seconds` has
        them. setting: the run's value of a dotted key; None where it is not known.
    """
    total = sum(seconds.values())
    if not total > 0:
        return ""
    if not seconds.get("update_forward"):  # of an earlier version, which times no passes
        seconds = {**seconds, "update_forward": seconds.get("ppo_train", 0.0), "ppo_train": 0.0}
    found = []
    for rule in RULES:
        share = sum(seconds.get(part, 0.0) for part in rule.parts) / total
        change = rule.change(setting)
        if change:
            found.append((share, rule, change))
    found.sort(key=lambda item: -item[0])
    told = [item for item in found if item[0] >= item[1].above] or found[:1]
    sentences = [f"{rule.what} {share:.0%}: {change}" for share, rule, change in told]
    return f"Of {total:.1f} s a rollout: " + "; ".join(sentences) + "."


def _value(setting: Setting, key: str) -> str:
    value = setting(key)
    return "not known" if value is None else f"now {value}"


def _either(found: list[str]) -> str:
    *most, last = found
    return f"{', '.join(most)}, or {last}" if most else last
