"""Prefix sharing: a micro-batch as one packed row that contains every prompt once.

A plain packed row repeats the prompt for every response of a group. Here a prompt is one segment of
the row, and each response is a segment that attends to the prompt's keys and its own. Log-probs and
gradients are the same up to rounding, with fewer tokens. Prefix Grouper (arXiv:2506.05433) uses two
attention calls; here it is one, with more keys than queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sg_rlhf.overlay.model.packed_attention import PackedRow, row_with_prefixes


class SharedRow(NamedTuple):
    """A packed row: ``tokens`` and ``positions`` [1, T], from 0 in each sample.

    ``positions_of_batch`` [B, L]: index in the row of each token of the batch; -1 for padding.
    """

    tokens: Tensor
    positions: Tensor
    row: PackedRow
    positions_of_batch: Tensor


def pack_with_shared_prompts(
    sequences_BL: Tensor, attention_BL: Tensor, actions_BL: Tensor
) -> SharedRow | None:
    """Pack a micro-batch with each prompt once; None if no two prompts are equal.

    Args:
        sequences_BL: [B, L], token ids; from CUDA they are copied with a host synchronisation.
        attention_BL: [B, L], not 0 on tokens.
        actions_BL: bool [B, L], positions whose next token the policy sampled. A prompt ends with
            the first of them.
    """
    batch, length = sequences_BL.shape
    sequences = sequences_BL.cpu()
    valid, actions = attention_BL.cpu().bool(), actions_BL.cpu().bool()
    # The first action's position; a row without actions is a prompt only.
    firsts = torch.where(actions.any(1), actions.int().argmax(1), length).tolist()
    prompts: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for b in range(batch):
        columns = valid[b].nonzero()[:, 0]
        prompt_length = int((columns <= firsts[b]).sum())
        tokens = tuple(sequences[b, columns[:prompt_length]].tolist())
        flat = columns + b * length
        prompts.setdefault(tokens, []).append((flat[:prompt_length], flat[prompt_length:]))
    if len(prompts) == batch:
        return None
    positions_of_batch = torch.full((batch * length,), -1)
    sources: list[Tensor] = []
    positions: list[Tensor] = []
    lengths: list[int] = []
    prefix_of: list[int] = []
    total = 0
    for samples in prompts.values():
        prompt = samples[0][0]
        prompt_index = len(lengths)
        segments = [(prompt, -1), *((rest, prompt_index) for _, rest in samples if len(rest))]
        for same, _ in samples:
            positions_of_batch[same] = torch.arange(total, total + len(same))
        for source, prefix in segments:
            positions_of_batch[source] = torch.arange(total, total + len(source))
            start = 0 if prefix < 0 else len(prompt)
            positions.append(torch.arange(start, start + len(source)))
            sources.append(source)
            lengths.append(len(source))
            prefix_of.append(prefix)
            total += len(source)
    device = sequences_BL.device
    return SharedRow(
        sequences.flatten()[torch.cat(sources)][None].to(device),
        torch.cat(positions)[None].to(device),
        row_with_prefixes(lengths, prefix_of, device),
        positions_of_batch.view(batch, length).to(device),
    )
