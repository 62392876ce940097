"""The final model of a run: its folder, and whether it is complete."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.data_io.model_folder import TOKENIZER_FILES

#: One of these has the weights; the index is written after its parts.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "adapter_model.bin",
)  # fmt: skip


def final_checkpoint(run_dir: Path) -> Path:
    """Folder of a run's trained model, in Hugging Face's format."""
    return run_dir / "checkpoints" / "final"


def final_checkpoint_complete(run_dir: Path) -> bool:
    """Whether the run has ended and saved its model completely.

    config.json alone is no proof: transformers writes it before the weights.
    """
    folder = final_checkpoint(run_dir)
    needed = (("config.json",), WEIGHTS, ("tokenizer_config.json",), TOKENIZER_FILES)
    return all(any(_has_content(folder / name) for name in names) for names in needed)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
