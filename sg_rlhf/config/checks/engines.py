"""What the rollout engines can sample and be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check(value: Callable[[str], Any]) -> None:
    """Refuse settings of weight sync, sampling and LoRA that do not go together.

    Args:
        value: dotted key -> its value.

    Raises:
        ValueError: one line with the keys, their values and the remedy.
    """
    if value("vllm.sync_with_ray") and value("sg.weight_sync") == "buckets":
        raise ValueError(
            "vllm.sync_with_ray=true: not with sg.weight_sync=buckets; set it to false, or "
            "sg.weight_sync=upstream"
        )
    if value("rollout.top_p") < 1 and value("sg.truncated_sampling") == "refuse":
        raise ValueError(
            f"rollout.top_p={value('rollout.top_p'):g}: the engine would renormalise, "
            "and the trainer's log-probs would not match; set it to 1, or "
            "sg.truncated_sampling=keep"
        )
    if value("ds.lora.rank") > 0:
        _check_lora(value)


def _check_lora(value: Callable[[str], Any]) -> None:
    """LoRA is merged before sending. Only bucketed sync does that, and not into 4-bit weights."""
    shards, sync = value("ds.tensor_parallel_size"), value("sg.weight_sync")
    for applies, setting, remedy in (
        (value("ds.load_in_4bit"), "ds.load_in_4bit=true", "set it to false"),
        (
            sync != "buckets" or shards > 1,  # upstream's loop sends without merging
            f"sg.weight_sync={sync}, ds.tensor_parallel_size={shards}",
            "use sg.weight_sync=buckets and ds.tensor_parallel_size=1",
        ),
    ):
        if applies:
            raise ValueError(
                f"ds.lora.rank={value('ds.lora.rank')}: not with {setting}: the engine takes "
                f"adapters merged into their layers; {remedy}"
            )
