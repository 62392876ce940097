"""Log-probabilities of given tokens: from hidden states without logits, or from logits at hand.

With ``z = (h W^T + b) / T`` the logits of a position over V tokens:

    log p(target) = z_target - lse(z),        lse(z) = log sum_j exp(z_j)
    H             = lse(z) - sum_j p_j z_j,   p = softmax(z)

and their gradients, which are computed from z again, block by block, instead of being stored:

    d log p / d z_j = [j = target] - p_j
    d H     / d z_j = -p_j (log p_j + H)

A block is some rows times some of the vocabulary. Over the blocks of a row the sum of
exponentials, the largest logit and the entropy's sum are carried along (online softmax,
arXiv 1805.02867).

Shape suffixes: ``N`` positions, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Logits of a block; in float32 16 MiB, of which the backward pass holds three.
_BLOCK = 2**22
#: Vocabulary of a block: wide enough for a matrix product to be efficient.
_VOCABULARY = 8192
_ROWS = 1024


def selected_log_probs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets_N`` under a language model's head, without its logits.

    Args:
        hidden_NH: the last hidden states, float64, float32, bfloat16 or float16.
        weight_VH: the head, of the same dtype; tied to the embedding or not.
        targets_N: token ids, 0 <= target < V.
        bias: the head's bias [V], if it has one.
        temperature: the logits are divided by it, T > 0.
        with_entropy: whether to compute the entropy as well; it has a gradient.
        chunk: vocabulary of a block; None for the default.

    Returns:
        ``(log_probs_N, entropy_N)`` in float32 (float64 for float64), in nats; the entropy is None
        unless asked for. A log-probability is never above 0. A position with a logit that is NaN
        has NaN; others do not notice.

    Products are accumulated in float32 whatever the dtype. Gradients: hidden, weight, bias. Extra
    memory: a few blocks of 16 MiB, in the backward pass two float32 tensors [chunk, H] and one
    [N, H], and the gradients. Equal to the path over logits but for the order of sums.

    Raises:
        ValueError: shapes, dtypes or values that do not fit together.
    """
    _check(hidden_NH, weight_VH, targets_N, bias, temperature, chunk)
    log_probs_N, entropy_N = _SelectedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, targets_N, float(temperature), with_entropy, chunk
    )
    return log_probs_N, entropy_N if with_entropy else None


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of ``labels`` where the logits are there; upstream's name and arguments.

    Without flash-attn upstream's own function makes, in its backward pass, a tensor of all logits
    for every 1,024 rows. This one makes the gradient once and nothing else of that size.

    Args:
        logits: [..., V]; divided by ``temperature`` in place unless that is 1, as upstream does.
        labels: [...], token ids.

    Returns:
        [...], in the dtype of the logits.
    """
    if temperature != 1.0:
        logits.div_(temperature)
    log_probs: Tensor = _FromLogits.apply(logits, labels)  # type: ignore[no-untyped-call]
    return log_probs


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    chunk: int | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [N, H], [V, H]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {list(targets.shape)}: expected [{hidden.shape[0]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)}: expected [{weight.shape[0]}]")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: expected the same")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number above 0")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: expected a positive number of tokens")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _factor(tensor: Tensor) -> Tensor:
    """As :func:`_product` takes it: the CPU has no products of 16 bits with a result of 32."""
    return tensor if tensor.is_cuda else tensor.to(_wide(tensor.dtype))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose sums, and result, are in float32 (float64 for float64)."""
    wide = _wide(left.dtype)
    return left @ right if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _blocks(rows: int, vocabulary: int, chunk: int | None) -> tuple[list[slice], list[slice]]:
    """Rows and vocabulary of the blocks."""
    columns = min(vocabulary, chunk or _VOCABULARY)
    return _slices(rows, min(_ROWS, max(1, _BLOCK // columns))), _slices(vocabulary, columns)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = _product(hidden, weight.t())
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    return logits


class _Softmax:
    """The softmax of some rows, from one block of the vocabulary after the other."""

    def __init__(self, rows: Tensor, with_entropy: bool) -> None:
        new: dict[str, Any] = {"dtype": _wide(rows.dtype), "device": rows.device}
        self.largest_N = torch.full((len(rows),), -torch.inf, **new)
        self.sum_N = torch.zeros(len(rows), **new)
        # Of the targets met so far; NaN stays where a target is none of the vocabulary.
        self.chosen_N = torch.full((len(rows),), torch.nan, **new)
        # sum_j exp(z_j - largest) (z_j - largest), of which the entropy follows.
        self.moment_N = torch.zeros_like(self.sum_N) if with_entropy else None

    def take(self, logits: Tensor, targets: Tensor, block: slice) -> None:
        """The next block of these rows' logits, which is overwritten."""
        inside, index = _target_in(targets, block)
        # Of the same product as the sum: so no log-prob is above 0.
        found = logits.gather(1, index[:, None])[:, 0]
        self.chosen_N = torch.where(inside, found, self.chosen_N)
        largest = torch.maximum(self.largest_N, logits.amax(dim=1))
        # Where all logits so far are -inf there is nothing to shift, and -inf - -inf would be NaN.
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        carried = torch.exp(self.largest_N - shift)
        logits -= shift[:, None]
        if self.moment_N is None:
            self.sum_N = carried * self.sum_N + logits.exp_().sum(dim=1)
        else:
            exponentials = logits.exp()
            moved = torch.where(self.sum_N > 0, self.largest_N - shift, 0.0)
            self.moment_N = carried * (self.moment_N + moved * self.sum_N)
            self.sum_N = carried * self.sum_N + exponentials.sum(dim=1)
            # exp(-inf) (-inf) is 0 here.
            product = torch.where(exponentials == 0, exponentials, exponentials * logits)
            self.moment_N += product.sum(dim=1)
        self.largest_N = largest

    def log_sum_exp(self) -> Tensor:
        return self.largest_N + torch.log(self.sum_N)

    def entropy(self) -> Tensor:
        assert self.moment_N is not None
        # Not below 0 by rounding.
        return (torch.log(self.sum_N) - self.moment_N / self.sum_N).clamp(min=0.0)


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        parts, blocks = _blocks(len(hidden), len(weight), chunk)
        rows = _factor(hidden)
        states = [_Softmax(hidden[part], with_entropy) for part in parts]
        for block in blocks:
            head = _factor(weight[block])
            of_block = None if bias is None else bias[block]
            for part, state in zip(parts, states, strict=True):
                logits = _logits(rows[part], head, of_block, temperature)
                state.take(logits, targets[part], block)
        empty = torch.empty(0, dtype=_wide(hidden.dtype), device=hidden.device)
        lse_N = torch.cat([empty, *(state.log_sum_exp() for state in states)])
        chosen_N = torch.cat([empty, *(state.chosen_N for state in states)])
        entropy_N = torch.cat([empty, *(s.entropy() for s in states)]) if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, lse_N, entropy_N)
        # An entropy that is only logged has no gradient, and costs nothing in backward.
        ctx.set_materialize_grads(False)
        ctx.settings = temperature, parts, blocks
        return chosen_N - lse_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse_N, entropy_N = ctx.saved_tensors
        temperature, parts, blocks = ctx.settings
        if grad_log_probs_N is None:
            grad_log_probs_N = torch.zeros_like(lse_N)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows, dtype = _factor(hidden), hidden.dtype
        new: dict[str, Any] = {"dtype": _wide(dtype), "device": hidden.device}
        grad_hidden = torch.zeros(hidden.shape, **new) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros(len(weight), **new) if needs_bias else None
        # A block of the head after the other, so that its gradient is summed in float32 over all
        # rows and no second tensor of the head's size is made.
        for block in blocks:
            head = _factor(weight[block])
            of_block = None if bias is None else bias[block]
            sum_weight = torch.zeros(head.shape, **new) if grad_weight is not None else None
            for part in parts:
                slope = _logits(rows[part], head, of_block, temperature)
                slope -= lse_N[part, None]
                _to_slope(
                    slope,
                    grad_log_probs_N[part],
                    None if entropy_N is None else entropy_N[part],
                    None if grad_entropy_N is None else grad_entropy_N[part],
                    *_target_in(targets[part], block),
                )
                if temperature != 1.0:
                    slope /= temperature
                if grad_bias is not None:
                    grad_bias[block] += slope.sum(dim=0)
                # Rounded as the gradient of 16-bit logits is.
                slope = _factor(slope.to(dtype))
                if grad_hidden is not None:
                    grad_hidden[part] += _product(slope, head)
                if sum_weight is not None:
                    sum_weight += _product(slope.t(), rows[part])
            if grad_weight is not None and sum_weight is not None:
                grad_weight[block] = sum_weight
        return (
            None if grad_hidden is None else grad_hidden.to(dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def _target_in(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Whether a row's target is in the block, and where there (somewhere, if it is not)."""
    inside = (targets >= block.start) & (targets < block.stop)
    return inside, (targets - block.start).clamp(0, block.stop - block.start - 1)


def _to_slope(
    log_p: Tensor,
    grad_log_probs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    inside: Tensor,
    index: Tensor,
) -> None:
    """Turn the log-probabilities of a block [rows, columns] into the gradient in z, in place."""
    if entropy is None or grad_entropy is None:
        log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        p = log_p.exp()
        # p log p is 0 at p = 0.
        log_p.masked_fill_(p == 0, 0.0).add_(entropy[:, None]).mul_(grad_entropy[:, None])
        log_p.add_(grad_log_probs[:, None]).mul_(p).neg_()
    at_target = torch.where(inside, grad_log_probs, 0.0)
    log_p.scatter_add_(1, index[:, None], at_target[:, None].to(log_p.dtype))


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        flat_NV, labels_N = logits.flatten(0, -2), labels.flatten()
        lse_N = torch.empty_like(flat_NV[:, 0])
        for part in _slices(len(lse_N), _ROWS):
            lse_N[part] = torch.logsumexp(flat_NV[part], dim=-1)
        ctx.save_for_backward(logits, labels, lse_N)
        chosen_N = flat_NV.gather(-1, labels_N[:, None])[:, 0]
        return (chosen_N - lse_N).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor) -> tuple[Tensor, None]:
        logits, labels, lse_N = ctx.saved_tensors
        flat_NV, labels_N, grad_N = (
            logits.flatten(0, -2),
            labels.flatten(),
            grad_log_probs.flatten(),
        )
        grad_NV = torch.empty_like(flat_NV)
        for part in _slices(len(lse_N), _ROWS):
            block = torch.sub(flat_NV[part], lse_N[part, None], out=grad_NV[part])
            block.exp_().mul_(-grad_N[part, None])
        grad_NV.scatter_add_(1, labels_N[:, None], grad_N[:, None])
        return grad_NV.view(logits.shape), None
