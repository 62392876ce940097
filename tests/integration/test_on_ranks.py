"""Parts of the trainer on two gloo ranks, each in processes that run a script of this folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import run_ranks
from tests.integration.test_experts import experts_folder

# -- Tests with several ranks end their process groups, whatever their scripts do ----------------


def test_a_process_group_is_ended() -> None:
    assert run_ranks("left_open.py", 2) == ["0 False\n", "1 False\n"]


# -- Two ZeRO-3 ranks: without a pass for old log-probs the update is upstream's, bit for bit ----


@pytest.mark.parametrize(
    ("rows", "epochs"),
    [
        ("packed", 1),
        pytest.param("packed", 2, marks=pytest.mark.full),
        pytest.param("padded", 1, marks=pytest.mark.full),
    ],
)
def test_the_update_is_upstreams(tmp_path: Path, rows: str, epochs: int) -> None:
    found = {}
    for way in ("pass", "skipped"):
        out = tmp_path / f"{way}.pt"
        run_ranks("old_log_probs_on_ranks.py", 2, way, rows, str(epochs), str(out))
        found[way] = torch.load(out, weights_only=True)
    old, new = found["pass"], found["skipped"]
    assert len(new["rows"]) == 4 * epochs
    assert new["rows"] == old["rows"]
    assert torch.equal(new["after"], old["after"])
    assert not torch.equal(new["after"], new["before"])
    # The second optimizer step is off the policy that sampled.
    assert new["rows"][0]["ppo_kl"] == 0 and new["rows"][1]["ppo_kl"] != 0


# -- Training without logits on two ZeRO-3 ranks: the parameters of training with them -----------


@pytest.mark.full
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_four_steps_on_two_ranks(tmp_path: Path, rows: str) -> None:
    found = {}
    for way in ("fused", "logits"):
        run_ranks("fused_on_ranks.py", 2, way, rows, str(tmp_path / way))
        found[way] = torch.load(tmp_path / way, weights_only=True)
    ours, theirs = found["fused"], found["logits"]
    assert torch.equal(ours["before"], theirs["before"])
    learned = (theirs["after"] - theirs["before"]).norm()
    assert learned > 0
    # Float32's rounding, four Adam steps later.
    assert (ours["after"] - theirs["after"]).norm() < 1e-3 * learned
    assert len(ours["rows"]) == len(theirs["rows"]) == 4
    for mine, expected in zip(ours["rows"], theirs["rows"], strict=True):
        for key in ("actor_grad_norm", "policy_loss", "kl", "entropy_loss", "sg/weight_mean"):
            assert mine[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


# -- LoRA under ZeRO-3: the frozen parameters of the base model are partitioned again after each use
# DeepSpeed 0.19.3 to 0.19.7 left them gathered after a recomputation, each rank the whole model.


@pytest.mark.full
def test_no_frozen_parameter_stays_gathered(tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("lora_on_ranks.py", 2, str(out))
    found = torch.load(out, weights_only=True)
    assert len(found) == 3
    for case, moments in found.items():
        assert moments == {"backward": [], "step": []}, case


# -- An optimizer step that leaves tensors as they were stops the run with their names -----------


FOUND = {"cut off": "no gradient comes back to model.layers.0.self_attn.v_proj.weight"}


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_each_place_where_a_gradient_can_be_lost_is_named(stage: int, tmp_path: Path) -> None:
    """A step too small to move a bf16 number, or most float32 ones, is sane."""
    out = tmp_path / "found.pt"
    run_ranks("frozen_tensors.py", 2, str(stage), str(out))
    found = torch.load(out, weights_only=True)
    for fault, line in FOUND.items():
        assert found[fault].startswith("the first optimizer step did not train "), found
        assert line in found[fault], found
    assert "did not train" not in found["none"], found


# -- A backward pass that gives NaN stops a run before DeepSpeed's optimizer puts it into weights --


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_rank_stops_with_the_weights_of_the_step_before(stage: int, tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("non_finite_gradient.py", 2, str(stage), str(out))
    found = torch.load(out, weights_only=True)
    assert found["trained"]
    assert found["unharmed"]
    for message in found["stopped"]:
        assert message is not None and "optimizer step 2: nothing was trained on it" in message
        # The backward pass of the last norm gave NaN to what is below it.
        assert "(model.embed_tokens.weight, model.layers.0." in message and " more)" in message


@pytest.mark.full
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 2), (3, 1), (3, 2)])
def test_a_skipped_step_changes_nothing_but_the_schedule(
    stage: int, ranks: int, tmp_path: Path
) -> None:
    """NaN of one rank: all skip, and go on as if its rollout had never been, until the bound."""
    found = {}
    for how in ("nan", "without"):
        out = tmp_path / f"{how}.pt"
        run_ranks("skipped_steps.py", ranks, str(stage), how, str(out))
        found[how] = torch.load(out, weights_only=True)
    skipped, expected = found["nan"], found["without"]
    assert skipped["trained"] and skipped["kept"] == [True] * 3
    assert torch.equal(skipped["state"], expected["state"])
    assert bool(skipped["state"].isfinite().all())
    (step,), (other,) = skipped["applied"], expected["applied"]
    assert (step["optimizer_step"], other["optimizer_step"]) == (4, 2)
    assert {**step, "optimizer_step": 2} == other  # its learning rate among the rest
    assert skipped["steps"] == [0, 0] and all(map(math.isfinite, skipped["figures"]))
    assert skipped["same_schedule"]
    # 1 applied, 2 skipped, 1 applied, 3 skipped; 8 responses are 4 micro-batches of 2.
    assert skipped["counts"] == [7, 5, 7 * 4 // ranks]
    for rows in skipped["rows"]:  # the same on every rank
        (loss,), (gradient,) = rows
        assert (loss["cause"], loss["optimizer_step"]) == ("the policy loss", 2)
        assert loss["prompts"] == [ranks - 1] and "policy loss nan" in loss["message"]
        assert (gradient["cause"], gradient["in_a_row"]) == ("the gradient", 2)
        assert gradient["prompts"] == list(range(8))
    assert skipped["last"] == [(1, "the policy loss"), (2, "the gradient")]
    (message,) = {*skipped["stopped"]}
    assert "optimizer step 7: nothing was trained on it" in message
    assert "2 optimizer steps in a row were skipped before it (their prompts: " in message


# -- What the checkpoint of a sleeping optimizer holds, and what is loaded of it -----------------


STATE = ["exp_avg", "exp_avg_sq", "step"]
WITH_BUFFERS = sorted([*STATE, "exp_avg_offload_buffer", "exp_avg_sq_offload_buffer"])


@pytest.mark.full
def test_a_resumed_optimizer_has_its_moments_and_no_buffers_of_the_sleep(tmp_path: Path) -> None:
    out = tmp_path / "found.pt"
    run_ranks("resumed_optimizer.py", 1, str(tmp_path / "checkpoints"), str(out))
    found = torch.load(out, weights_only=True)
    assert found["kept"] == WITH_BUFFERS
    # On a GPU torch would load those two beside the parameter, and nothing put them back.
    assert found["loaded_by_upstream"] == WITH_BUFFERS
    assert found["loaded"] == STATE
    assert found["asleep_again"] == WITH_BUFFERS
    assert found["moved"] and found["equal"]
    # A buffer is the moment's own storage, which torch saves once.
    assert found["asleep"] <= found["bytes"] < 1.01 * found["asleep"]


# -- Two ranks write a checkpoint, one's file is altered, and both load the one before it --------


SHARD = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def on_two_ranks(tmp_path: Path, shared: bool) -> list[Any]:
    out = tmp_path / "found"
    run_ranks("torn_on_two_ranks.py", 2, str(tmp_path / "run"), str(int(shared)), str(out))
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1)]


def test_ranks_without_a_shared_folder_are_refused(tmp_path: Path) -> None:
    for error in on_two_ranks(tmp_path, shared=False):
        assert "_actor/global_step1: not every rank sees this folder: set ckpt.path to" in error


def test_ranks_agree_on_the_one_that_is_whole(tmp_path: Path) -> None:
    found = on_two_ranks(tmp_path, shared=True)
    assert found[0]["files"] == ["metric.json", SHARD.format(0), SHARD.format(1)]
    assert found[1]["files"] == found[0]["files"]
    assert found[0]["hidden"] == found[1]["hidden"] == []
    for of_rank, other in (found, found[::-1]):
        first, second, third = of_rank["chosen"]
        assert (first, second) == ("global_step2", "global_step1")
        assert third.startswith("no checkpoint is intact: ")
        assert f"{SHARD.format(1)} was altered" in third
        assert third.count(SHARD.format(1)) == other["chosen"][2].count(SHARD.format(1)) == 2


# -- The weight sync: ZeRO-3 ranks put whole tensors into its buckets ----------------------------


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_two_zero_3_ranks_put_whole_tensors_into_the_buckets(tmp_path: Path, model: str) -> None:
    out = tmp_path / "found.pt"
    folder = [] if model == "dense" else [str(experts_folder(tmp_path / "model"))]
    run_ranks("weight_sync_on_ranks.py", 2, str(out), *folder)
    sent = torch.load(out, weights_only=True)
    assert sent["sharded"] and (sent["adapted"] > 10) == (model == "dense")
    assert sent["names"] == sent["expected"] and len(sent["names"]) > 20
    assert all(sent["equal"])
    # Which bucket is the first, and which the last.
    between = [(False, False)] * (len(sent["calls"]) - 2)
    assert sent["calls"] == [(True, False), *between, (False, True)]
