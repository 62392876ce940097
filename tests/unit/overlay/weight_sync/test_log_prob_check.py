"""The log-prob checks: the trainer's log-probs of fixed sequences, and those of a rollout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from openrlhf.models import Actor

from sg_rlhf.config import load_config
from sg_rlhf.overlay.learner.actor import SGPolicyModelActor
from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.weight_sync.log_prob_check import MISMATCH, check_rollout
from tests.unit.overlay.model.test_log_prob_head import VOCABULARY, model_folder

LENGTHS = (3, 12, 7, 2, 12)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_sequences_of_all_lengths_have_the_models_own_log_probs_at_temperature_1(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    folder = model_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    rank = SGPolicyModelActor.__new__(SGPolicyModelActor)
    rank.actor = Actor(folder, attn_implementation="sdpa", temperature=0.7).float()
    rank.strategy = SimpleNamespace(
        args=SimpleNamespace(rollout=SimpleNamespace(micro_batch_size=size)), ring_attn_group=None
    )
    sequences = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in LENGTHS]
    found = rank.prompt_log_probs(sequences)
    for tokens, log_probs in zip(sequences, found, strict=True):
        ids = torch.tensor([tokens])
        expected = torch.log_softmax(rank.actor.model(ids).logits[0, :-1].float(), dim=-1)
        expected = expected.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)
    assert rank.actor.temperature == 0.7 and rank.actor.training


def arguments(
    top_p: float = 1.0, correction: str = "off", asynchronous: bool = False, staleness: int = 1
) -> SimpleNamespace:
    """Upstream's arguments of a run with the default tolerance."""
    tolerance = load_config(None, []).sg.sync_check_tolerance
    return SimpleNamespace(
        sg=SimpleNamespace(sync_check_tolerance=tolerance, max_staleness=staleness),
        train=SimpleNamespace(async_enable=asynchronous),
        rollout=SimpleNamespace(top_p=top_p),
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level=correction)),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rollout_from_other_weights_stops_the_run(asynchronous: bool) -> None:
    """Also the first rollout: no sync precedes it. Zeroed weights differed by 0.25."""
    with pytest.raises(SyncError, match=r"in rollout 1 .* by 0.2500 on average") as raised:
        check_rollout(
            {MISMATCH: 0.25}, arguments(asynchronous=asynchronous, staleness=0), rollout=1
        )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "metrics", [{MISMATCH: 0.0135}, {}], ids=["random 0.5B in bf16 on an H100", "not measured"]
)
def test_rounding_does_not_stop_a_run(metrics: dict[str, float]) -> None:
    check_rollout(metrics, arguments(), rollout=1)


@pytest.mark.parametrize(
    "args",
    [arguments(top_p=0.9), arguments(asynchronous=True)],
    ids=["truncated sampling", "older weights"],
)
def test_policies_that_differ_by_intent_are_not_compared(args: SimpleNamespace) -> None:
    check_rollout({MISMATCH: 0.25}, args, rollout=1)


@pytest.mark.parametrize(("mismatch", "correction"), [(0.25, "token"), (0.1, "off")])
def test_a_correction_or_a_small_mismatch_gets_a_warning(
    mismatch: float, correction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_rollout({MISMATCH: mismatch}, arguments(correction=correction), rollout=3)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: in rollout 3 ")
