"""Prompts that stand once in a row: the values and gradients of a row that repeats them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sg_rlhf.overlay.model import packed_attention, prefix_sharing
from sg_rlhf.overlay.settings import worker_settings
from tests.unit.overlay.model.test_log_prob_head import VOCABULARY, actor_of, model_folder, results
from tests.unit.overlay.model.test_packed_attention import model_of

PROMPTS = ([5, 6, 7, 8, 9], [5, 6, 7], [11])
#: (prompt, tokens of the response) of each sample, not in order of prompts.
SAMPLES = ((0, 4), (1, 1), (0, 6), (2, 3), (1, 5), (0, 1))


def batch_of(
    samples: Any = SAMPLES, left: int = 0, silent: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """Samples padded on the right, and on the left by ``left``; of the silent no token counts."""
    generator = torch.Generator().manual_seed(3)
    texts = [
        (PROMPTS[p], torch.randint(0, VOCABULARY, (n,), generator=generator).tolist())
        for p, n in samples
    ]
    length = left + max(len(prompt) + len(response) for prompt, response in texts)
    sequences = torch.zeros(len(texts), length, dtype=torch.long)
    attention, action = torch.zeros_like(sequences), torch.zeros(len(texts), length - 1)
    for b, (prompt, response) in enumerate(texts):
        own = prompt + response
        sequences[b, left : left + len(own)] = torch.tensor(own)
        attention[b, left : left + len(own)] = 1
        start = left + len(prompt) - 1
        if b not in silent:
            action[b, start : start + len(response)] = 1
            # What an environment writes in the middle is no action.
            action[b, start + 2 : start + 3] = 0
    return {"sequences": sequences, "action_mask": action.bool(), "attention_mask": attention}


@pytest.fixture
def row_counts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    original, seen = prefix_sharing.pack_with_shared_prompts, []

    def count(*args: Any) -> Any:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(prefix_sharing, "pack_with_shared_prompts", count)
    return seen


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("more", [{}, {"left": 2}, {"silent": (1, 3)}])
def test_log_probs_entropies_and_gradients(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row_counts: list[Any],
    family: str,
    more: dict[str, Any],
) -> None:
    window = {"sliding_window": 4} if family == "mistral" else {}
    actor = actor_of(model_folder(tmp_path, family, **window), packing_samples=True)
    actor.model.set_attn_implementation(packed_attention.VARLEN)
    assert actor.packing_samples
    batch = batch_of(**more)
    apart = results(actor, type(actor).forward, batch, 0.1)
    settings = worker_settings.WorkerSettings(share_prompts=True)
    monkeypatch.setenv(worker_settings.VARIABLE, settings.to_json())
    together = results(actor, type(actor).forward, batch, 0.1)
    (row,) = row_counts
    tokens = sum(len(PROMPTS[p]) for p in {p for p, _ in SAMPLES}) + sum(n for _, n in SAMPLES)
    if not more.get("silent"):  # a sample without an action is a prompt of its own
        assert row.tokens.shape == (1, tokens)
    for found, expected in zip(together[:2], apart[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert together[2].keys() == apart[2].keys()
    for name, gradient in apart[2].items():
        torch.testing.assert_close(together[2][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_a_row_in_full() -> None:
    batch = batch_of(((1, 2), (2, 1), (1, 1)))
    chosen = torch.zeros_like(batch["sequences"], dtype=torch.bool)
    chosen[:, :-1] = batch["action_mask"]
    row = prefix_sharing.pack_with_shared_prompts(
        batch["sequences"], batch["attention_mask"], chosen
    )
    assert row is not None and row.row.keys is not None
    texts = batch["sequences"].tolist()
    assert row.tokens[0].tolist() == [5, 6, 7, *texts[0][3:], texts[2][3], 11, texts[1][1]]
    assert row.positions[0].tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert row.row.lengths == [3, 2, 1, 1, 1]
    assert row.row.keys.prefix_of == [-1, 0, 0, -1, 3]
    assert row.row.keys.gather_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 6, 7]
    assert row.row.keys.cu_seq_lens.tolist() == [0, 3, 8, 12, 13, 15]
    assert (row.row.max_length, row.row.keys.max_length) == (3, 5)
    assert row.positions_of_batch.tolist() == [
        [0, 1, 2, 3, 4],
        [6, 7, -1, -1, -1],
        [0, 1, 2, 5, -1],
    ]


def test_different_prompts_share_nothing() -> None:
    batch = batch_of(((0, 2), (1, 2)))
    chosen = torch.zeros_like(batch["sequences"], dtype=torch.bool)
    chosen[:, :-1] = batch["action_mask"]
    found = prefix_sharing.pack_with_shared_prompts(
        batch["sequences"], batch["attention_mask"], chosen
    )
    assert found is None


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_keys_on_a_gpu_are_those_on_the_host(window: int | None) -> None:
    """What the kernel gets, its causal mask laid as its authors describe it: the last query sees
    the last key."""
    torch.manual_seed(0)
    row = packed_attention.row_with_prefixes([3, 2, 4, 1], [-1, 0, 0, -1], "cpu")
    assert row.keys is not None
    query = torch.randn(10, 4, 8)
    key, value = torch.randn(2, 10, 2, 8)
    found = packed_attention.packed_attention(query, key, value, row, window=window)
    keys, values = key[row.keys.gather_index], value[row.keys.gather_index]
    expected = []
    for i, length in enumerate(row.lengths):
        mine = slice(int(row.cu_seq_lens[i]), int(row.cu_seq_lens[i + 1]))
        of = slice(int(row.keys.cu_seq_lens[i]), int(row.keys.cu_seq_lens[i + 1]))
        count = of.stop - of.start
        last = torch.arange(count - length, count)[:, None]
        seen = torch.arange(count)[None] <= last
        if window is not None:
            seen &= torch.arange(count)[None] > last - window
        q, k, v = (x.transpose(0, 1) for x in (query[mine], keys[of], values[of]))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~seen, -torch.inf)
        expected.append((scores.softmax(-1) @ v).transpose(0, 1))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_copy_of_the_positions_is_refused() -> None:
    """Nothing but the tensor itself says that a row shares prompts."""
    from tests.unit.overlay.model.test_packed_attention import FAMILIES

    model = model_of(FAMILIES["qwen2"], packed_attention.VARLEN)
    positions = torch.tensor([[0, 1, 2, 2]])
    packed_attention.cache_row(
        positions, packed_attention.row_with_prefixes([2, 1, 1], [-1, 0, 0], "cpu")
    )
    tokens = torch.tensor([[1, 2, 3, 4]])
    model(tokens, position_ids=positions)
    with pytest.raises(RuntimeError, match="gives no packed row"):
        model(tokens, position_ids=positions.clone())
