"""When a run counts as finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete

#: The files of a save in the order in which upstream and transformers write them.
ORDER = (
    "config.json", "generation_config.json", "model.safetensors", "chat_template.jinja",
    "tokenizer_config.json", "tokenizer.json",
)  # fmt: skip


def test_a_save_counts_from_its_last_file_on(tmp_path: Path) -> None:
    final_checkpoint(tmp_path).mkdir(parents=True)
    for name in ORDER:
        assert not final_checkpoint_complete(tmp_path), f"before {name}"
        (final_checkpoint(tmp_path) / name).write_text("{}")
    assert final_checkpoint_complete(tmp_path)


@pytest.mark.parametrize(
    "weights", ["model.safetensors.index.json", "adapter_model.bin", "adapter_model.safetensors"]
)
def test_sharded_weights_and_adapters_count(tmp_path: Path, weights: str) -> None:
    final_checkpoint(tmp_path).mkdir(parents=True)
    for name in ("config.json", weights, "tokenizer_config.json", "tokenizer.model"):
        (final_checkpoint(tmp_path) / name).write_text("{}")
    assert final_checkpoint_complete(tmp_path)


@pytest.mark.parametrize("cut", ["model.safetensors", "tokenizer.json"])
def test_an_empty_file_is_no_file(tmp_path: Path, cut: str) -> None:
    final_checkpoint(tmp_path).mkdir(parents=True)
    for name in ORDER:
        (final_checkpoint(tmp_path) / name).write_text("" if name == cut else "{}")
    assert not final_checkpoint_complete(tmp_path)
