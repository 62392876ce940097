"""Types and ranges of upstream's values. Upstream does not check ranges and fails much later.

``checks.layout`` refuses counts without a default that are not set. Keys of ours have their ranges
in ``sg_settings``. A key without a row takes any finite number.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from sg_rlhf.common.redaction import redact
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.upstream_flags import Flag


class Interval(NamedTuple):
    """An interval of numbers.

    Attributes:
        low: the smallest value.
        high: the largest value.
        above: low itself is not allowed.
        below: high itself is not allowed.
        also: one value outside with a special meaning, such as -1 for "never".
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    also: float | None = None

    def has(self, value: float) -> bool:
        """Whether a number is in the interval."""
        if value == self.also:
            return True
        fits_low = value > self.low if self.above else value >= self.low
        return fits_low and (value < self.high if self.below else value <= self.high)

    def describe(self) -> str:
        """The interval in words, for the end of a message."""
        low, high = f"{self.low:g}", f"{self.high:.12g}"
        if math.isinf(self.high):
            words = f"above {low}" if self.above else f"{low} or more"
        else:
            words = f"{'above ' if self.above else ''}{low} to {high}"
            words += " without it" if self.below else ""
        return words if self.also is None else f"{words}, or {self.also:g}"


_COUNT, _SHARE, _POSITIVE, _NOT_NEGATIVE = (
    Interval(1),
    Interval(0, 1),
    Interval(0, above=True),
    Interval(0),
)
#: vLLM raises lower temperatures to 0.01, so the trainer would use another one.
MIN_TEMPERATURE = 0.01
#: Upstream writes "never" as -1.
_STEPS = Interval(1, also=-1)

#: Keys, or patterns of them.
RANGES: dict[str, Interval] = {
    "*.num_nodes": _COUNT,
    "*.num_gpus_per_node": _COUNT,
    "vllm.num_engines": _COUNT,
    "vllm.tensor_parallel_size": _COUNT,
    "vllm.gpu_memory_utilization": _SHARE,
    "eval.steps": _STEPS,
    "ckpt.save_steps": _STEPS,
    "logger.logging_steps": _COUNT,
    "ckpt.max_num": _COUNT,
    "ckpt.max_mem": _POSITIVE,
    "ds.zero_stage": Interval(0, 3),
    "train.ema_beta": _SHARE,
    "data.dataloader_num_workers": _NOT_NEGATIVE,
    "*.max_tokens_per_gpu": _COUNT,
    "ds.lora.rank": _NOT_NEGATIVE,
    "ds.lora.alpha": _COUNT,
    "ds.lora.dropout": Interval(0, 1, below=True),
    "train.num_episodes": _COUNT,
    "train.max_epochs": _COUNT,
    "*.batch_size": _COUNT,
    "*.micro_batch_size": _COUNT,
    "data.max_len": Interval(2),
    "rollout.max_new_tokens": _COUNT,
    "data.max_samples": _COUNT,
    "data.max_images_per_prompt": _NOT_NEGATIVE,
    "actor.eps_clip": _NOT_NEGATIVE,
    "actor.dual_clip": _POSITIVE,
    "critic.value_clip": _NOT_NEGATIVE,
    "algo.advantage.lambd": _SHARE,
    "algo.advantage.gamma": _SHARE,
    # The log-probs are divided by it.
    "rollout.temperature": Interval(MIN_TEMPERATURE),
    "rollout.top_p": Interval(0, 1, above=True),
    "rollout.n_samples_per_prompt": _COUNT,
    "eval.temperature": Interval(MIN_TEMPERATURE, also=0),
    "eval.n_samples_per_prompt": _COUNT,
    "train.seed": Interval(0, 2**31 - 1),
    "algo.kl.init_coef": _NOT_NEGATIVE,
    "algo.kl.target": _POSITIVE,
    "algo.kl.horizon": _COUNT,
    "actor.aux_loss_coef": _NOT_NEGATIVE,
    "*.muon.lr": _NOT_NEGATIVE,
    "*.adam.lr": _NOT_NEGATIVE,
    "*.muon.momentum": Interval(0, 1, below=True),
    "*.adam.betas": Interval(0, 1, below=True),
    "*.adam.eps": _POSITIVE,
    "*.adam.weight_decay": _NOT_NEGATIVE,
    "*.lr_warmup_ratio": _SHARE,
    "*.min_lr_ratio": _SHARE,
    "*.max_norm": _NOT_NEGATIVE,
    "reward.overlong_buffer_len": _NOT_NEGATIVE,
    "reward.overlong_penalty_factor": _NOT_NEGATIVE,
    "ds.tensor_parallel_size": _COUNT,
    "ds.ring_attn_size": _COUNT,
    "ds.ring_attn_head_stride": _COUNT,
}
#: Keys that may be infinite: upstream's "no limit".
MAY_BE_INFINITE = ("ckpt.max_mem", "algo.advantage.is_correction_threshold", "*.clip_range")


def violation(key: str, value: Any) -> str | None:
    """The expected values of a key, in words, if a number is outside; else None.

    Args:
        value: a number, or the list of them that the key takes.
    """
    values = value if isinstance(value, list) else [value]
    numbers = [item for item in values if _is_number(item)]
    interval = range_of(key)
    if any(math.isinf(number) for number in numbers) and not _matches(key, MAY_BE_INFINITE):
        return "a finite number"
    if all(interval.has(number) for number in numbers):
        return None
    return interval.describe()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


@functools.cache
def range_of(key: str) -> Interval:
    """The range of a key; any number without a row."""
    return next((r for pattern, r in RANGES.items() if _matches(key, (pattern,))), Interval())


def checked_value(flag: Flag, value: Any, where: str) -> Any:
    """A recipe's value of an upstream setting, in the setting's type.

    ``null`` stays None where upstream's default is None. Elsewhere it is refused, as upstream would
    train with its default.

    Args:
        flag: the setting.
        value: as YAML has read it.
        where: the file or the command line that sets it, for the message.

    Raises:
        ConfigError: one line with the key, the value and what was expected.
    """

    def fail() -> ConfigError:
        return ConfigError(
            f"{where}: {flag.dest}={redact(flag.dest, value)!r}: expected {flag.describe()}"
        )

    if value is None:
        if flag.default is not None:
            raise ConfigError(_null_message(flag, where))
        return None
    if flag.kind == "switch":
        if not isinstance(value, bool):
            raise fail()
        return value
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        if isinstance(flag.nargs, int) and len(items) != flag.nargs:
            raise fail()
        return _in_range(flag, [_scalar(flag, item, fail) for item in items], where)
    return _in_range(flag, _scalar(flag, value, fail), where)


def _null_message(flag: Flag, where: str) -> str:
    default = list(flag.default) if isinstance(flag.default, tuple) else flag.default
    shown = str(default).lower() if isinstance(default, bool) else default
    return (
        f"{where}: {flag.dest}=null: expected {flag.describe()}; OpenRLHF would take its default, "
        f"{redact(flag.dest, shown)!r}: set a value, or leave the key out"
    )


def _in_range(flag: Flag, value: Any, where: str) -> Any:
    expected = violation(flag.dest, value)
    if expected is not None:
        raise ConfigError(f"{where}: {flag.dest}={value}: expected {expected}")
    return value


def _scalar(flag: Flag, value: Any, fail: Callable[[], ConfigError]) -> Any:
    if isinstance(value, bool) and flag.choices and "off" in flag.choices:
        value = "on" if value else "off"  # YAML reads the bare words as booleans
    if (
        value is None
        or isinstance(value, (list, dict))
        or (isinstance(value, bool) and flag.type is not str)
    ):
        raise fail()
    if flag.type is int and not (isinstance(value, int) or _is_whole(value)):
        raise fail()
    try:
        typed = flag.type(value)
    except (TypeError, ValueError, OverflowError):
        raise fail() from None
    if isinstance(typed, str) and not _is_text(typed):
        raise fail()
    if isinstance(typed, float) and math.isnan(typed):
        raise fail()
    if flag.choices is not None and typed not in flag.choices:
        raise fail()
    return typed


def _is_text(value: str) -> bool:
    """Whether a process can get it as an argument: no NUL, and no byte that is not UTF-8."""
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
