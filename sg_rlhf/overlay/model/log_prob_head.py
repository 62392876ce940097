"""Log-probs of the policy, old and reference passes without the logits of a whole vocabulary.

Upstream's ``Actor.forward`` has the model make logits [T, V], turns them into float32 and takes a
number of each row: at 3B and 7B half of a GPU's memory. Here the model's head answers, while it is
asked to, with the log-probs of given tokens (:func:`sg_rlhf.algo.log_probs.fused_log_probs`), of
the response
tokens alone. It is still the head's own forward pass: whatever is hooked to it runs as it does for
logits, so that ZeRO-3 gathers the head once in forward and once in backward.

A model whose head is no plain linear layer, or that does something to its logits, keeps upstream's
path, as does all of it with ``actor.fused_logprobs=false``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from torch import Tensor

from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from sg_rlhf.common.without_logits import FAMILIES
from sg_rlhf.overlay.model import packed_attention, prefix_sharing
from sg_rlhf.overlay.settings import worker_settings


@dataclass
class _HeadRequest:
    """What the head is asked for in one forward pass, and the entropy that it found.

    Attributes:
        rows: [N] of the hidden states, from which a log-prob is wanted each; None for all of them.
        targets: token ids [N], which follow them.
        at: [N] their places in the answer, flattened; None for all of them.
        shape: of the answer, (1 or B, T), which is 0 wherever no log-prob was wanted.
        temperature: of the policy.
        entropy: of that shape; None unless it was asked for.
    """

    rows: Tensor | None
    targets: Tensor
    at: Tensor | None
    shape: torch.Size
    temperature: float
    with_entropy: bool
    entropy: Tensor | None = None


def _log_prob_head(actor: Any) -> Any:
    """The model's head, which can be asked for log-probs from now on; None if logits are needed.

    Looked for when it is first needed: until then DeepSpeed may have put another in its place.
    """
    if not hasattr(actor, "log_prob_head"):
        model: Any = getattr(actor.model, "module", actor.model)
        head: Any = None
        if getattr(model.config, "model_type", None) in FAMILIES:
            head = model.get_output_embeddings()
        # An exact match: a quantised or adapted head computes something else.
        if type(head) is torch.nn.Linear:
            _patch_head(head)
        else:
            head = None
        # Not as a submodule, which it is of the model.
        object.__setattr__(actor, "log_prob_head", head)
    return actor.log_prob_head


def _patch_head(head: Any) -> None:
    head.log_prob_request = None
    head.forward = functools.partial(_head_forward, head, head.forward)


def _head_forward(head: Any, of_logits: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The head's forward pass: logits, or [..., 1] log-probs where it was asked for them."""
    request: _HeadRequest | None = head.log_prob_request
    if request is None:
        return of_logits(hidden)
    rows = hidden.flatten(0, 1)
    log_probs, entropy = selected_log_probs(
        rows if request.rows is None else rows[request.rows],
        head.weight,
        request.targets,
        bias=head.bias,
        temperature=request.temperature,
        with_entropy=request.with_entropy,
    )

    def in_place(values: Tensor) -> Tensor:
        if request.at is not None:
            values = values.new_zeros(request.shape.numel()).index_copy(0, request.at, values)
        return values.view(request.shape)

    if entropy is not None:
        request.entropy = in_place(entropy)
    return in_place(log_probs).unsqueeze(-1)


@contextlib.contextmanager
def _head_request(head: Any, request: _HeadRequest) -> Iterator[_HeadRequest]:
    head.log_prob_request = request
    try:
        yield request
    finally:
        head.log_prob_request = None


def forward_without_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's ``Actor.forward`` by the head's log-probs, wherever they are all it needs."""

    @functools.wraps(original)
    def forward(
        self: Any,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: Any = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        asked = return_logprobs or action_mask is not None
        head = _log_prob_head(self) if asked and not mm_inputs else None
        if head is None:
            return original(
                self,
                sequences,
                action_mask,
                attention_mask=attention_mask,
                return_output=return_output,
                allgather_logits=allgather_logits,
                return_logprobs=return_logprobs,
                ring_attn_group=ring_attn_group,
                packed_seq_lens=packed_seq_lens,
                return_entropy=return_entropy,
                **mm_inputs,
            )
        assert attention_mask is not None
        batch, length = sequences.shape
        chosen = _action_positions(action_mask, sequences)
        shared = None
        if chosen is not None and ring_attn_group is None and _uses_prefix_sharing(self):
            shared = prefix_sharing.pack_with_shared_prompts(sequences, attention_mask, chosen)
        if shared is not None:
            assert chosen is not None
            tokens, positions, mask = shared.tokens, shared.positions, None
            packed_attention.cache_row(positions, shared.row)
            at = chosen.flatten().nonzero()[:, 0]
            rows, targets = shared.places.flatten()[at], sequences.flatten()[at + 1]
            request = _HeadRequest(
                rows, targets, at, sequences.shape, self.temperature, return_entropy
            )
        elif self.packing_samples:
            tokens, positions, targets, pad, indices = unpad_and_slice_tensor(
                sequences, attention_mask, ring_attn_group
            )
            mask = None
            # A rank of a ring has a slice of the row: it answers for all of it.
            if chosen is not None:
                chosen = None if ring_attn_group else chosen.flatten()[indices][None]
            request = _request_at(chosen, targets, self.temperature, return_entropy)
        else:
            tokens, targets, mask = sequences, sequences.roll(-1, dims=1), attention_mask
            positions = attention_mask.long().cumsum(-1) - 1
            positions.masked_fill_(attention_mask == 0, 1)
            request = _request_at(chosen, targets, self.temperature, return_entropy)
        with _head_request(head, request):
            output = self.model(tokens, attention_mask=mask, position_ids=positions)

        def per_response(values: Tensor) -> Tensor:
            if self.packing_samples and shared is None:
                values = gather_and_pad_tensor(values, ring_attn_group, pad, indices, batch, length)
            return values[:, :-1]

        if output["logits"].shape[-1] != 1:
            raise RuntimeError(
                "the model's head gave logits where it was asked for log-probs: something replaced "
                "it after loading; actor.fused_logprobs=false goes by logits"
            )
        log_probs = per_response(output["logits"].squeeze(-1))
        output["logits"] = None
        if request.entropy is not None:
            output.entropy = per_response(request.entropy)
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    return forward


def _request_at(
    chosen: Tensor | None, targets: Tensor, temperature: float, with_entropy: bool
) -> _HeadRequest:
    """The request for the chosen positions of a row or a batch; None for all of them."""
    at = None if chosen is None else chosen.flatten().nonzero()[:, 0]
    wanted = targets.flatten()
    if at is not None:
        wanted = wanted[at]
    return _HeadRequest(at, wanted, at, targets.shape, temperature, with_entropy)


def _uses_prefix_sharing(actor: Any) -> bool:
    """Whether a prompt stands once in this actor's packed rows: its attention must know them."""
    if not (worker_settings.share_prompts() and actor.packing_samples):
        return False
    model: Any = getattr(actor.model, "module", actor.model)
    return str(model.config._attn_implementation) == packed_attention.VARLEN


def _action_positions(action_mask: Tensor | None, sequences: Tensor) -> Tensor | None:
    """The positions [B, T] whose next token the policy sampled; None for all positions."""
    if action_mask is None:
        return None
    chosen = torch.zeros_like(sequences, dtype=torch.bool)
    actions = action_mask.shape[1]
    chosen[:, sequences.shape[1] - 1 - actions : -1] = action_mask.bool()
    return chosen
