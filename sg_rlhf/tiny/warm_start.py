"""Supervised warm start on demonstrations of a domain, in fp32 on a CPU.

First right work alone, for the skill; then the recipe's mixture of it with bad habits. The mixture
is worse on purpose than the best that the demonstrations could teach. A model trained on right
work alone is sure of itself (entropy about 0.1) and reinforcement learning finds nothing better
to move to; one that has seen guesses and slips as well holds both modes, and the reward tells
them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sg_rlhf.tasks.tiny import Recipe
from sg_rlhf.tiny.muon import Muon


@dataclass(frozen=True)
class Demonstration:
    """One training sequence; only the response (with the end token) is learnt."""

    prompt: list[int]
    response: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def demonstrations(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int, *, clean: bool = False
) -> Iterator[Demonstration]:
    """An endless stream of demonstrations (see `Recipe.texts`)."""
    for prompt, response in recipe.texts(seed, clean=clean):
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        yield Demonstration(prompt_ids, [*response_ids, tokenizer.eos_token_id])


@dataclass(frozen=True)
class Batch:
    """Packed rows [R, T]: `positions` restart at each demonstration, which keeps them apart in
    attention; `labels` are the inputs, with -100 where nothing is learnt.
    """

    inputs: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


def batches(stream: Iterator[Demonstration], recipe: Recipe, pad_id: int) -> Iterator[Batch]:
    """Fill rows first-fit until a demonstration fits nowhere; that one opens the next batch.

    Lengths stay mixed within a batch: sorting by length would over-weight the short demonstrations.
    """
    packed: list[list[Demonstration]] = [[] for _ in range(recipe.rows)]
    for demo in stream:
        if len(demo) > recipe.row_tokens:
            continue
        row = _first_fit(packed, demo, recipe.row_tokens)
        if row is None:
            yield _pack(packed, recipe.row_tokens, pad_id)
            packed = [[] for _ in range(recipe.rows)]
            row = packed[0]
        row.append(demo)


def _first_fit(
    packed: list[list[Demonstration]], demo: Demonstration, room: int
) -> list[Demonstration] | None:
    return next((row for row in packed if sum(map(len, row)) + len(demo) <= room), None)


def _pack(packed: list[list[Demonstration]], width: int, pad_id: int) -> Batch:
    inputs, positions, labels = [], [], []
    for row in packed:
        ids: list[int] = []
        at: list[int] = []
        wanted: list[int] = []
        for demo in row:
            ids += demo.prompt + demo.response
            at += range(len(demo))
            wanted += [-100] * len(demo.prompt) + demo.response
        rest = width - len(ids)
        inputs.append(ids + [pad_id] * rest)
        positions.append(at + list(range(rest)))
        labels.append(wanted + [-100] * rest)
    return Batch(torch.tensor(inputs), torch.tensor(positions), torch.tensor(labels))


def _two_phases(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, seed: int) -> Iterator[Batch]:
    n_clean = round(recipe.clean_share * recipe.steps)
    clean, mixed = (
        batches(demonstrations(recipe, tokenizer, seed, clean=c), recipe, tokenizer.pad_token_id)
        for c in (True, False)
    )
    return itertools.chain(itertools.islice(clean, n_clean), mixed)


def learning_rate_factor(step: int, steps: int) -> float:
    """1 in the first half, then a straight line to 0."""
    return min(1.0, 2.0 * (1.0 - step / steps))


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Warm-start `model` in place.

    Returns:
        The loss of each step: mean over response tokens, in nats.
    """
    model.train()
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=recipe.muon_lr),
        torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: learning_rate_factor(s, recipe.steps))
        for o in optimizers
    ]
    losses: list[float] = []
    stream = _two_phases(tokenizer, recipe, seed)
    for step, batch in zip(range(recipe.steps), stream, strict=False):
        logits = model(input_ids=batch.inputs, position_ids=batch.positions, use_cache=False).logits
        # Only the response positions pay for a softmax.
        learnt = batch.labels[:, 1:] != -100
        loss = F.cross_entropy(logits[:, :-1][learnt], batch.labels[:, 1:][learnt])
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        on_step(step, losses[-1])
    model.eval()
    return losses
