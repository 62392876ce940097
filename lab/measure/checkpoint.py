"""Load checkpoints, and compute their log-probabilities of given responses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from sg_rlhf.algo.weightings import token_keys
from sg_rlhf.common.text import single_line
from sg_rlhf.config import local_path
from sg_rlhf.data_io import model_folder
from sg_rlhf.tiny.sampling import pad_id

DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Tokens of prompts, responses and padding that go through the model at a time.
PASS_TOKENS = 8192


class MeasureError(ValueError):
    """Wrong input to a measurement; the message is one line for the user."""


@dataclass(frozen=True)
class TokenRow:
    """One response as token ids; both parts have at least one token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = single_line(error).partition(". ")[0]
        raise MeasureError(f"--device {name}: {why}; expected auto, cpu or cuda") from None
    return device


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``--model NAME``: a folder, a hub id or ``module:NAME``."""
    try:
        return AutoTokenizer.from_pretrained(_location(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise MeasureError(
            f"--model {name}: its tokenizer does not load: {single_line(error)}"
        ) from None


def load_model(
    name: str, dtype: torch.dtype, device: torch.device, *, attention: str = "sdpa"
) -> PreTrainedModel:
    """The model without dropout, its parameters leaves with a gradient.

    Args:
        attention: ``eager`` where backward passes are batched; the default needs less memory.

    Raises:
        MeasureError: there is none, or it cannot be read.
    """
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            _location(name), dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise MeasureError(f"--model {name}: does not load: {single_line(error)}") from None
    model.to(device).eval()
    # Buffers (rotary frequencies) keep their dtype; parameters that a checkpoint pins do not.
    for param in model.parameters():
        param.data = param.data.to(dtype)
        param.requires_grad_(True)
    return model


def _location(name: str) -> str:
    location = local_path("--model", name)
    if location.startswith((".", "/", "~")) or location.count("/") > 1:
        folder = Path(location)
        if not folder.is_dir():
            raise MeasureError(f"--model {name}: no such folder")
        if not (folder / "config.json").is_file():
            raise MeasureError(
                f"--model {name}: no config.json there, expected a Hugging Face model"
            )
    if Path(location).is_dir():
        try:
            model_folder.check(Path(location))
        except model_folder.ModelError as error:
            raise MeasureError(f"--model {name}: {error}") from None
    return location


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokens and their ids: equal for tokenizers that can share token ids."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def passes(rows: Sequence[TokenRow], pass_tokens: int = PASS_TOKENS) -> Iterator[list[int]]:
    """Indices of rows, similar lengths together, at most ``pass_tokens`` with padding at a time.

    A longer row goes alone.
    """
    waiting: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        # Rows come in order of length, so this one would be the longest.
        if waiting and len(rows[index]) * (len(waiting) + 1) > pass_tokens:
            yield waiting
            waiting = []
        waiting.append(index)
    if waiting:
        yield waiting


@dataclass(frozen=True)
class Responses:
    """One pass: the logits that predict the tokens at T places, their ids, and which are responses.

    mask_BT is True on each row's response and nowhere else, in order. sequences_BS: prompts and
    responses, whose last T places those are. attention_BS: 1 where that is no padding.
    """

    logits_BTV: Tensor
    targets_BT: Tensor
    mask_BT: Tensor
    sequences_BS: Tensor
    attention_BS: Tensor

    def log_probs_BT(self) -> Tensor:
        """Log-probabilities of the responses' tokens, 0 where masked."""
        nll = F.cross_entropy(
            self.logits_BTV.flatten(0, 1), self.targets_BT.flatten(), reduction="none"
        )
        return -nll.view_as(self.targets_BT).masked_fill(~self.mask_BT, 0.0)

    def entropy_BT(self) -> Tensor:
        """Entropy of the policy at each place, in nats, 0 where masked."""
        log_probs_BTV = self.logits_BTV.log_softmax(-1)
        entropy_BT = -(log_probs_BTV.exp() * log_probs_BTV).sum(-1)
        return entropy_BT.masked_fill(~self.mask_BT, 0.0)

    def keys_BT(self) -> Tensor:
        """A key for each token, see ``token_keys``; no meaning where masked."""
        return token_keys(self.sequences_BS, self.attention_BS)[:, -self.mask_BT.shape[1] :]


def responses(
    model: PreTrainedModel, rows: Sequence[TokenRow], temperature: float = 1.0
) -> Responses:
    """One forward pass over rows, with a graph if gradients are on.

    The policy is softmax(logits / temperature), as it is in training. Padding is at the right,
    where a causal model never looks: at the left, a query that sees padding alone can become NaN.
    """
    width, first = max(map(len, rows)), min(len(row.prompt) for row in rows)
    ids = torch.full((len(rows), width), pad_id(model))
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor([*row.prompt, *row.response])
    ids = ids.to(model.device)
    starts, ends = (
        torch.tensor(lengths, device=model.device)[:, None]
        for lengths in ([len(row.prompt) for row in rows], [len(row) for row in rows])
    )
    places = torch.arange(width, device=model.device)
    attention = (places < ends).long()
    output = model(
        input_ids=ids,
        attention_mask=attention,
        use_cache=False,
        # Drop the logits inside the prompts, and the last position, which predicts no given token.
        logits_to_keep=width - first + 1,
    )
    logits_BTV = output.logits[:, :-1]
    if logits_BTV.dtype not in DTYPES.values():
        logits_BTV = logits_BTV.float()
    if temperature != 1.0:
        logits_BTV = logits_BTV / temperature
    mask_BT = (places >= starts) & (places < ends)
    return Responses(logits_BTV, ids[:, first:], mask_BT[:, first:], ids, attention)
