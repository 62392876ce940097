"""Log-probs of the policy, old and reference passes without materialising the logits.

Upstream's ``Actor.forward`` computes float32 logits [T, V] and selects one value per row: at 3B and
7B half of a GPU's memory. Here the model's head returns log-probs instead
(:mod:`sg_rlhf.algo.log_probs.fused_log_probs`), while a request is set. It is still the head's own
forward pass, so its hooks run: ZeRO-3 gathers the head once in forward and once in backward.

Some models scale or cap their logits (:data:`sg_rlhf.config.derived.log_probs.FUSED_FAMILIES`). The
head then does it, and the model's own change is off during the pass. Other families, heads that are
not plain linear layers, and ``actor.fused_logprobs=false`` keep upstream's path.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from torch import Tensor
from transformers import PreTrainedModel

from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from sg_rlhf.config.derived.log_probs import FUSED_FAMILIES
from sg_rlhf.overlay.model import packed_attention, prefix_sharing, rotary
from sg_rlhf.overlay.settings import worker_settings


@dataclass
class _HeadRequest:
    """The log-probs that the head computes in one forward pass.

    Attributes:
        rows: [N], indices of the hidden states; None for all.
        targets: [N], token ids that follow them.
        at: [N], where the log-probs go in the flattened result; None for all positions.
        shape: of the result, (1 or B, T); 0 where no log-prob is requested.
        entropy: set by the head, in ``shape``; None without ``with_entropy``.
    """

    rows: Tensor | None
    targets: Tensor
    at: Tensor | None
    shape: torch.Size
    temperature: float
    with_entropy: bool
    softcap: float | None = None
    entropy: Tensor | None = None


def _model_of(actor: Actor) -> PreTrainedModel:
    """The actor's transformers model, also inside of DeepSpeed's engine."""
    return getattr(actor.model, "module", actor.model)


def _log_prob_head(actor: Actor) -> torch.nn.Linear | None:
    """The model's patched head, None if it must give logits; DeepSpeed may replace it before."""
    if not hasattr(actor, "log_prob_head"):
        model, head = _model_of(actor), None
        if getattr(model.config, "model_type", None) in FUSED_FAMILIES:
            head = model.get_output_embeddings()
        # An exact match: a quantised or adapted head computes something else.
        if type(head) is torch.nn.Linear:
            _patch_head(head)
        else:
            head = None
        # Bypasses Module.__setattr__: the head is a submodule of the model already.
        object.__setattr__(actor, "log_prob_head", head)
    found: torch.nn.Linear | None = actor.log_prob_head
    return found


def _patch_head(head: Any) -> None:
    head.log_prob_request = None
    head.forward = functools.partial(_head_forward, head, head.forward)


def _head_forward(head: Any, original: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The head's forward pass: logits, or log-probs [..., 1] if a request is set."""
    request: _HeadRequest | None = head.log_prob_request
    if request is None:
        return original(hidden)
    rows = hidden.flatten(0, 1)
    log_probs, entropy = selected_log_probs(
        rows if request.rows is None else rows[request.rows],
        head.weight,
        request.targets,
        bias=head.bias,
        temperature=request.temperature,
        softcap=request.softcap,
        with_entropy=request.with_entropy,
    )

    def scattered(values: Tensor) -> Tensor:
        if request.at is not None:
            values = values.new_zeros(request.shape.numel()).index_copy(0, request.at, values)
        return values.view(request.shape)

    if entropy is not None:
        request.entropy = scattered(entropy)
    return scattered(log_probs).unsqueeze(-1)


@contextlib.contextmanager
def _head_request(model: PreTrainedModel, head: Any, request: _HeadRequest) -> Iterator[None]:
    """Set the request. The model's own change of logits moves into it for the pass."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    change = FUSED_FAMILIES[base.config.model_type]
    owner = base if change is not None and change.how == "multiply" else base.config
    number = None if change is None else getattr(owner, change.attribute)
    if change is None or number is None:
        changes: dict[str, Any] = {}
    elif change.how == "softcap":
        request.softcap, changes = number, {change.attribute: None}
    else:
        request.temperature *= number if change.how == "divide" else 1 / number
        changes = {change.attribute: 1.0}
    head.log_prob_request = request
    try:
        for name, neutral in changes.items():
            setattr(owner, name, neutral)
        yield
    finally:
        head.log_prob_request = None
        for name in changes:
            setattr(owner, name, number)


class PolicyModel(Actor):  # type: ignore[misc]  # upstream has no types
    """Upstream's model with float32 rotary frequencies, and log-probs without logits.

    It has upstream's arguments, without those of images and ring attention.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rotary.restore(self.model)

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        return_logprobs: bool = False,
        return_entropy: bool = False,
        **options: Any,
    ) -> Any:
        """Log-probs, from the head if no logits are needed; with the output if requested.

        ``sequences``, ``attention_mask``: [B, L]. ``action_mask`` [B, T]: the response tokens, of
        the last T. Log-probs: float32, [B, T] with ``action_mask`` (0 where it is 0), else
        [B, L - 1]; ``entropy`` of the output: [B, L - 1].
        """
        wants_log_probs = return_logprobs or action_mask is not None
        is_fused = wants_log_probs and worker_settings.current().fused_log_probs
        head = _log_prob_head(self) if is_fused else None
        if head is None:
            return super().forward(
                sequences,
                action_mask,
                attention_mask=attention_mask,
                return_output=return_output,
                return_logprobs=return_logprobs,
                return_entropy=return_entropy,
                **options,
            )
        assert attention_mask is not None
        batch, length = sequences.shape
        actions_BL = _action_positions(action_mask, sequences)
        shared = None
        if actions_BL is not None and _uses_prefix_sharing(self):
            shared = prefix_sharing.pack_with_shared_prompts(sequences, attention_mask, actions_BL)
        if shared is not None:
            assert actions_BL is not None
            tokens, positions, mask = shared.tokens, shared.positions, None
            packed_attention.cache_row(positions, shared.row)
            at = actions_BL.flatten().nonzero()[:, 0]
            rows, targets = shared.positions_of_batch.flatten()[at], sequences.flatten()[at + 1]
            request = _HeadRequest(
                rows, targets, at, sequences.shape, self.temperature, return_entropy
            )
        elif self.packing_samples:
            tokens, positions, targets, pad, indices = unpad_and_slice_tensor(
                sequences, attention_mask, None
            )
            mask, actions = None, None
            if actions_BL is not None:
                actions = actions_BL.flatten()[indices][None]
            request = _request_at(actions, targets, self.temperature, return_entropy)
        else:
            tokens, targets, mask = sequences, sequences.roll(-1, dims=1), attention_mask
            positions = attention_mask.long().cumsum(-1) - 1
            positions.masked_fill_(attention_mask == 0, 1)
            request = _request_at(actions_BL, targets, self.temperature, return_entropy)
        with _head_request(_model_of(self), head, request):
            output = self.model(tokens, attention_mask=mask, position_ids=positions)

        def per_response(values: Tensor) -> Tensor:
            if self.packing_samples and shared is None:
                values = gather_and_pad_tensor(values, None, pad, indices, batch, length)
            return values[:, :-1]

        if output["logits"].shape[-1] != 1:
            raise RuntimeError(
                "the model's head returned logits instead of log-probs: other code "
                "replaced it after loading; set actor.fused_logprobs=false"
            )
        log_probs = per_response(output["logits"].squeeze(-1))
        output["logits"] = None
        if request.entropy is not None:
            output.entropy = per_response(request.entropy)
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs


def _request_at(
    actions: Tensor | None, targets: Tensor, temperature: float, with_entropy: bool
) -> _HeadRequest:
    """The request for the marked positions of a row or a batch; None for all positions."""
    at = None if actions is None else actions.flatten().nonzero()[:, 0]
    flat_targets = targets.flatten()
    if at is not None:
        flat_targets = flat_targets[at]
    return _HeadRequest(at, flat_targets, at, targets.shape, temperature, with_entropy)


def _uses_prefix_sharing(actor: Actor) -> bool:
    """Whether this actor's packed rows contain each prompt once; needs :data:`VARLEN` attention."""
    if not (worker_settings.current().share_prompts and actor.packing_samples):
        return False
    return str(_model_of(actor).config._attn_implementation) == packed_attention.VARLEN


def _action_positions(action_mask: Tensor | None, sequences: Tensor) -> Tensor | None:
    """Positions whose next token the policy sampled, bool [B, L]; None for all positions."""
    if action_mask is None:
        return None
    actions_BL = torch.zeros_like(sequences, dtype=torch.bool)
    length = action_mask.shape[1]
    actions_BL[:, sequences.shape[1] - 1 - length : -1] = action_mask.bool()
    return actions_BL
