"""The folder that a training writes at its end, and whether all of it is there."""

from __future__ import annotations

from pathlib import Path

#: One of these holds the weights, or (the index) is written after the parts that do.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "adapter_model.bin",
)  # fmt: skip
#: Upstream saves the tokenizer after the model, and transformers one of these as its last file.
VOCABULARY = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip


def final_checkpoint(run_dir: Path) -> Path:
    """Where a run leaves its trained model: a plain Hugging Face folder."""
    return run_dir / "checkpoints" / "final"


def final_checkpoint_complete(run_dir: Path) -> bool:
    """Whether the run ended: False also for one that was killed while it saved its model.

    config.json alone says nothing, because transformers writes it before the weights.
    """
    folder = final_checkpoint(run_dir)
    needed = (("config.json",), WEIGHTS, ("tokenizer_config.json",), VOCABULARY)
    return all(any(_has_content(folder / name) for name in names) for names in needed)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
