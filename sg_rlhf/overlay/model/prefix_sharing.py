"""A micro-batch as one packed row in which every prompt stands once, however many responses it has.

The responses of a group begin with the same tokens, and what a causal model computes of these does
not depend on what follows. A packed row repeats them for every response; here a prompt is one
segment of the row, and each of its responses one that attends to the prompt's keys and to its own:
the same log-probs and gradients but for rounding, by fewer tokens. (Prefix Grouper,
arXiv:2506.05433, does it by two calls of attention; here it is one, with keys longer than queries.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sg_rlhf.overlay.model.packed_attention import PackedRow, row_with_prefixes


class SharedRow(NamedTuple):
    """The row and where the tokens of the micro-batch are in it.

    Attributes:
        tokens: [1, T] token ids.
        positions: [1, T] of each in its own sample, from 0.
        row: the segments for attention: a prompt, its responses, the next prompt and so on.
        places: [B, L] the place in the row of each token of the batch; -1 for padding.
    """

    tokens: Tensor
    positions: Tensor
    row: PackedRow
    places: Tensor


def pack_with_shared_prompts(
    sequences_BL: Tensor, attention_BL: Tensor, chosen_BL: Tensor
) -> SharedRow | None:
    """The micro-batch with each prompt once; None where no two prompts are the same.

    Args:
        sequences_BL: token ids, on any device; on CUDA they are fetched with a host
            synchronisation.
        attention_BL: which of them are tokens.
        chosen_BL: whose next token the policy sampled. A prompt ends with the first of them.
    """
    batch, length = sequences_BL.shape
    sequences = sequences_BL.cpu()
    valid, chosen = attention_BL.cpu().bool(), chosen_BL.cpu().bool()
    # The first chosen position; a row without one is a prompt alone.
    firsts = torch.where(chosen.any(1), chosen.int().argmax(1), length).tolist()
    prompts: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for b in range(batch):
        places = valid[b].nonzero()[:, 0]
        ends = int((places <= firsts[b]).sum())
        tokens = tuple(sequences[b, places[:ends]].tolist())
        flat = places + b * length
        prompts.setdefault(tokens, []).append((flat[:ends], flat[ends:]))
    if len(prompts) == batch:
        return None
    places_BL = torch.full((batch * length,), -1)
    sources: list[Tensor] = []
    positions: list[Tensor] = []
    lengths: list[int] = []
    behind: list[int] = []
    total = 0
    for samples in prompts.values():
        prompt = samples[0][0]
        own = len(lengths)
        segments = [(prompt, -1), *((rest, own) for _, rest in samples if len(rest))]
        for same, _ in samples:
            places_BL[same] = torch.arange(total, total + len(same))
        for source, after in segments:
            places_BL[source] = torch.arange(total, total + len(source))
            start = 0 if after < 0 else len(prompt)
            positions.append(torch.arange(start, start + len(source)))
            sources.append(source)
            lengths.append(len(source))
            behind.append(after)
            total += len(source)
    device = sequences_BL.device
    return SharedRow(
        sequences.flatten()[torch.cat(sources)][None].to(device),
        torch.cat(positions)[None].to(device),
        row_with_prefixes(lengths, behind, device),
        places_BL.view(batch, length).to(device),
    )
