"""Shapes of language models, from ``model_configs.json`` or the ``config.json`` of a folder.

``model_configs.json`` has the models of the papers and other usual ones, so that a plan needs no
download.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("model_configs.json")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP."""

    name: str  # hub id or folder
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    family: str = ""  # model_type of its configuration

    @property
    def layer_parameters(self) -> int:
        """Of one layer: attention with its biases and norms, gated MLP, two norms."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        attention += queries + 2 * keys if self.qkv_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Of the output head (and of the embedding, which has as many)."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied head counts once."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden_size

    @property
    def tensors(self) -> int:
        """Parameters as a weight sync counts them, one message each."""
        per_layer = 4 + 3 + 2 + (3 if self.qkv_bias else 0) + (2 if self.qk_norm else 0)
        return self.num_layers * per_layer + (1 if self.tied else 2) + 1

    @property
    def activation_bytes(self) -> int:
        """What autograd keeps of one layer for its backward pass, bytes per token in bf16.

        A norm: its input and square root in float32, 4h + 4; the normalized input and its product
        with the weight, 4h. Attention: queries, keys, values and output, 4q + 4k, and a float32
        number per head. MLP: gate, activation, other branch and product, 8f. A norm of queries and
        keys: 6 of their bytes and a number per head. Equal, to the byte, to what
        ``torch.autograd.graph.saved_tensors_hooks`` sees.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = 2 * (8 * self.hidden_size + 4)
        attention = 4 * queries + 4 * keys + 4 * self.num_heads
        if self.qk_norm:
            attention += 6 * (queries + keys) + 4 * (self.num_heads + self.num_kv_heads)
        return norms + attention + 8 * self.intermediate_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, 2 bytes each."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


#: Fields of which there must be at least one of something.
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
)  # fmt: skip


def from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a ``config.json`` describes.

    Raises:
        ValueError: a field is missing or no size, or the model is no dense decoder.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{name}: its config.json is no object")
    for key in SIZES:
        if key in config and not (isinstance(config[key], int) and config[key] > 0):
            raise ValueError(
                f"{name}: its config.json has {key}={config[key]!r}: expected 1 or more"
            )
    if "num_experts" in config or "num_local_experts" in config:
        raise ValueError(f"{name}: a mixture of experts; shapes of dense models alone are known")
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kind = config["model_type"]
        return ModelShape(
            name=name,
            hidden_size=hidden,
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
            qk_norm=kind == "qwen3",
            family=kind,
        )
    except KeyError as missing:
        raise ValueError(f"{name}: its config.json has no {missing}") from None


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """Hub id -> the fields of its ``config.json`` that matter here."""
    published: dict[str, dict[str, Any]] = json.loads(TABLE.read_text())
    return published


def shape_of(model: str) -> ModelShape | None:
    """The shape of a hub id in the table or of a local folder; None where neither is known.

    Raises:
        ValueError: a folder's ``config.json`` is unreadable or describes another kind of model.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        try:
            return from_config(model, json.loads(file.read_text()))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file}: {error}") from None
    published = table().get(model)
    return from_config(model, published) if published else None
