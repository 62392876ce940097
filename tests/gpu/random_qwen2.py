"""A Qwen2 with random weights and a tokenizer of its vocabulary's size, made on the spot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sg_rlhf.plan.shapes import table
from sg_rlhf.tiny import build
from sg_rlhf.tiny.tokenizer import build_tokenizer

PUBLISHED = "Qwen/Qwen2.5-0.5B-Instruct"
#: Heads of 32 are the smallest that vLLM's CPU attention has.
SMALL = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip


def tokenizer_of_size(size: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny Knights and Knaves model, filled up to ``size`` entries.

    A model of random weights samples every id of its vocabulary, so each needs a text. What fills
    up is "<unused7>" and the like, which no text is encoded to.
    """
    made = build_tokenizer(build.find("kk"))
    known: dict[str, Any] = json.loads(made.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = known["model"]["vocab"]
    added = known["added_tokens"]
    for index in range(len(vocabulary), size - len(added)):
        vocabulary[f"<unused{index}>"] = index
    merges = [tuple(pair) for pair in known["model"]["merges"]]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    for special in (True, False):
        entries = [
            AddedToken(entry["content"], normalized=False, special=special)
            for entry in added
            if entry["special"] == special
        ]
        (core.add_special_tokens if special else core.add_tokens)(entries)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=made.eos_token,
        pad_token=made.pad_token,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=made.model_max_length,
        chat_template=made.chat_template,
    )


def config_of(fields: dict[str, Any], **more: Any) -> Qwen2Config:
    """The configuration of a shape of sg_rlhf/plan, or of :data:`SMALL`."""
    known = {k: v for k, v in fields.items() if k not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": fields.get("rope_theta", 1e6)}
    return Qwen2Config(**known, rope_parameters=rope, **more)


def write(folder: Path, small: bool, published: str = PUBLISHED) -> None:
    """The model in bfloat16 and its tokenizer; small, or of a published model's shape."""
    fields = SMALL if small else table()[published]
    tokenizer = tokenizer_of_size(fields["vocab_size"])
    config = config_of(
        fields,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    # Drawn where it is fast: three billion numbers take a CPU a minute.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    # A process of its own gives the GPU back: python -m tests.gpu.random_qwen2 FOLDER PUBLISHED
    write(Path(sys.argv[1]), small=False, published=sys.argv[2])
