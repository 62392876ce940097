"""For which runs log-probs come without logits (``actor.fused_logprobs``): one rule for all."""

from __future__ import annotations

#: transformers' families whose logits are what the head gives, nothing added, scaled or capped.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def fits(asked: bool, tensor_parallel_size: int, deepcompile: bool) -> bool:
    """Whether the passes of a run can go without logits: not with a head that is cut over ranks,
    nor with a model that is compiled as a whole, with what its head is asked for left out.

    Args:
        asked: ``actor.fused_logprobs``.
        tensor_parallel_size: ``ds.tensor_parallel_size``.
        deepcompile: ``ds.deepcompile``.
    """
    return asked and tensor_parallel_size == 1 and not deepcompile
