"""Where a rollout's time goes, in words, and which settings change it.

A rule names the parts of :mod:`sg_rlhf.run_dir.timing_keys` that it speaks of, and the share of a
rollout above which it does. The largest share is named in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sg_rlhf.config.derived.log_probs import old_log_prob_rule

Setting = Callable[[str], Any]

#: Passes that make logits where ``actor.fused_logprobs`` is off.
_LOGITS = (
    "old_log_probs", "update_old_log_probs", "reference_log_probs", "update_reference_log_probs",
    "update_forward", "update_backward",
)  # fmt: skip


class Hint(NamedTuple):
    """One thing to change.

    Attributes:
        text: ``{key}`` in it stands for the run's value of that key.
        applies: whether the hint is for a run with these settings.
    """

    text: str
    applies: Callable[[Setting], bool] = lambda setting: True


class Rule(NamedTuple):
    """What to say of some parts.

    Attributes:
        what: the parts, as the sentence names them.
        parts: their names.
        above: share of a rollout from which they are worth a sentence.
        hints: what to do; a rule none of whose hints applies is left out.
    """

    what: str
    parts: tuple[str, ...]
    above: float
    hints: tuple[Hint, ...]

    def change(self, setting: Setting) -> str:
        """The hints that apply to a run, as alternatives; "" of none."""
        found = [_filled(hint.text, setting) for hint in self.hints if hint.applies(setting)]
        *most, last = found or [""]
        return f"{', '.join(most)}, or {last}" if most else last


def _when(key: str, value: Any) -> Callable[[Setting], bool]:
    return lambda setting: setting(key) == value


def _old_log_probs(of: str) -> Callable[[Setting], bool]:
    """Whether the old log-probs are computed of ``all`` samples, or of the ``later`` steps'."""
    return lambda setting: (
        setting("train.batch_size") is not None and old_log_prob_rule(setting).of == of
    )


def _filled(text: str, setting: Setting) -> str:
    def value(match: re.Match[str]) -> str:
        key = match[1]
        if key == "why":
            return old_log_prob_rule(setting).why
        return "not known" if setting(key) is None else f"now {setting(key)}"

    return re.sub(r"\{([\w.]+)\}", value, text)


RULES = (
    Rule("waiting for the longest response", ("longest_response",), 0.2, (
        Hint("a smaller rollout.max_new_tokens ({rollout.max_new_tokens})"),
        Hint("a larger rollout.batch_size ({rollout.batch_size}), which has the engines busy for "
             "longer before they wait"),
    )),
    Rule("generation with all engines busy", ("generation",), 0.5, (
        Hint("more engines (vllm.num_engines, {vllm.num_engines})"),
        Hint("CUDA graphs on a GPU (vllm.enforce_eager=false)", _when("vllm.enforce_eager", True)),
        Hint("a smaller rollout.max_new_tokens ({rollout.max_new_tokens})"),
    )),
    Rule("waking the engines and sending them to sleep", ("engines_wake",), 0.1, (
        Hint("vllm.enable_sleep=false where the memory allows it (python -m sg_rlhf.plan says so)",
             _when("vllm.enable_sleep", True)),
        Hint("a larger rollout.batch_size, which has fewer of them"),
    )),
    Rule("passes that make float32 logits of every token", _LOGITS, 0.3, (
        Hint("actor.fused_logprobs=true", _when("sg.fused_logprobs", False)),
    )),
    Rule("old log-probs", ("old_log_probs", "update_old_log_probs"), 0.1, (
        Hint("a larger train.batch_size, as {why}", _old_log_probs("later")),
        Hint("all samples need a pass for them, as {why}", _old_log_probs("all")),
    )),
    Rule("reference log-probs", ("reference_log_probs", "update_reference_log_probs"), 0.2, (
        Hint("a larger rollout.micro_batch_size ({rollout.micro_batch_size})"),
        Hint("algo.kl.init_coef=0, which has no reference model"),
    )),
    Rule("forward and backward passes", ("update_forward", "update_backward"), 0.5, (
        Hint("a larger train.micro_batch_size ({train.micro_batch_size})"),
        Hint("ds.zero_stage=2 where the memory allows it, which gathers no parameters",
             _when("ds.zero_stage", 3)),
        Hint("ds.packing_samples=true, which computes no padding",
             _when("ds.packing_samples", False)),
        Hint("actor.gradient_checkpointing_enable=false where the memory allows it",
             _when("actor.gradient_checkpointing_enable", True)),
        Hint("ds.adam_offload=false where the memory allows it", _when("ds.adam_offload", True)),
    )),
    Rule("the update outside its passes", ("ppo_train",), 0.15, (
        Hint("responses of more even length (rank 0 waits for the slowest rank here)"),
        Hint("sg.batches=balanced, which deals samples to the ranks by length",
             _when("sg.batches", "upstream")),
        Hint("ds.enable_sleep=false, which keeps the optimizer's states on the GPU",
             _when("ds.enable_sleep", True)),
    )),
    Rule("weight sync", ("broadcast",), 0.1, (
        Hint("a larger rollout.batch_size ({rollout.batch_size}), which syncs less often for the "
             "same samples"),
        Hint("sg.weight_sync=buckets, which sends fewer and larger messages",
             _when("sg.weight_sync", "upstream")),
        Hint("ds.zero_stage=2 where the memory allows it, which gathers no parameters",
             _when("ds.zero_stage", 3)),
    )),
    Rule("the check of the weight sync", ("sync_check",), 0.1, (
        Hint("sg.sync_check_every=0 ({sg.sync_check_every}), which checks the first sync only",
             lambda setting: bool(setting("sg.sync_check_every"))),
    )),
    Rule("sending samples to the ranks", ("hand_over",), 0.05, (
        Hint("a shorter data.max_len"),
        Hint("the ranks on the controller's node: samples are copied"),
    )),
    Rule("logging", ("logging",), 0.1, (
        Hint("fewer sg.samples_per_step ({sg.samples_per_step})"),
    )),
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
        if change := rule.change(setting):
            found.append((share, rule, change))
    found.sort(key=lambda item: -item[0])
    told = [item for item in found if item[0] >= item[1].above] or found[:1]
    sentences = [f"{rule.what} {share:.0%}: {change}" for share, rule, change in told]
    return f"Of {total:.1f} s a rollout: " + "; ".join(sentences) + "."
