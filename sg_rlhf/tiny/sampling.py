"""Responses sampled from a small model in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    ends: frozenset[int] | None = None,
) -> list[list[int]]:
    """One response per prompt as token ids, with the end token if it came in time.

    Finished rows leave the batch, so the cost follows the sum of the lengths, not the longest one.
    A prompt that comes several times is read once.

    Args:
        prompts: token ids; at least one each.
        temperature: 0 takes the most probable token.
        ends: ids that end a response; None: the model's end token.
    """
    device = model.device
    stops = torch.tensor(
        sorted(ends) if ends is not None else [model.config.eos_token_id], device=device
    )
    generator = torch.Generator(device).manual_seed(seed)
    responses: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts), device=device)
    width, pad = max(map(len, prompts)), pad_id(model)
    places = {row: place for place, row in enumerate(dict.fromkeys(map(tuple, prompts)))}
    padded = [[pad] * (width - len(row)) + list(row) for row in places]
    real = [[0] * (width - len(row)) + [1] * len(row) for row in places]
    tokens, mask = torch.tensor(padded, device=device), torch.tensor(real, device=device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    # The prompts' rows are one for each prompt; those of the responses, one for each response.
    row_of = torch.tensor([places[tuple(row)] for row in prompts], device=device)
    for step in range(max_new_tokens):
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float()
        if step == 0:
            logits, mask, positions = logits[row_of], mask[row_of], positions[row_of]
            cache.batch_select_indices(row_of)
        if temperature > 0:
            probs = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(probs, 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(-1)
        for row, token in zip(alive.tolist(), chosen.tolist(), strict=True):
            responses[row].append(token)
        keep = (~torch.isin(chosen, stops)).nonzero()[:, 0]
        if len(keep) == 0:
            break
        if len(keep) < len(alive):
            alive, chosen, mask, positions = alive[keep], chosen[keep], mask[keep], positions[keep]
            cache.batch_select_indices(keep)
        tokens = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = positions[:, -1:] + 1
    return responses


def pad_id(model: PreTrainedModel) -> int:
    """A padding id. Its position is masked, so any id works."""
    chosen = model.config.pad_token_id
    return 0 if chosen is None else int(chosen)
