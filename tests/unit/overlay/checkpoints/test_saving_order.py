"""A checkpoint and its plain folder, of a process that is killed between the two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openrlhf.trainer.ray import ppo_actor as upstream

from sg_rlhf.overlay.learner.actor import SGPolicyModelActor
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY


class Killed(BaseException):
    """Nothing catches it."""


class Disk:
    """The strategy's two ways to save; the process is killed after the first ``alive`` of them."""

    def __init__(self, folder: Path, alive: int, is_first: bool = True) -> None:
        self.is_first = is_first
        self.states: dict[str, Any] = {}
        self.args = SimpleNamespace(
            ckpt=SimpleNamespace(
                path=str(folder), max_num=2, max_mem=1000, disable_ds=False,
                output_dir=str(folder / "final"),
            ),
            train=SimpleNamespace(enable_ema=False),
        )  # fmt: skip
        self._left = alive

    def is_rank_0(self) -> bool:
        return self.is_first

    def _write(self, folder: Path) -> None:
        if not self._left:
            raise Killed
        self._left -= 1
        folder.mkdir(parents=True)

    def save_ckpt(self, _model: Any, folder: str, tag: str, *given: Any, **__: Any) -> None:
        self.states = next(one for one in given if isinstance(one, dict))
        self._write(Path(folder) / tag)

    def save_model(self, _model: Any, _tokenizer: Any, folder: str) -> None:
        self._write(Path(folder))


@pytest.mark.parametrize("save_hf", [True, False])
@pytest.mark.parametrize("disable_ds", [True, False])
@pytest.mark.parametrize("alive", [0, 1, 2])
def test_no_checkpoint_is_without_its_plain_folder(
    alive: int, disable_ds: bool, save_hf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "torch_dist_barrier_and_cuda_sync", lambda: None)
    rank = SGPolicyModelActor.__new__(SGPolicyModelActor)
    rank.actor, rank.tokenizer = SimpleNamespace(model=None), None
    rank.strategy = Disk(tmp_path, alive)
    rank.strategy.args.ckpt.disable_ds = rank.disable_ds_ckpt = disable_ds
    rank.save_hf_ckpt = save_hf
    wanted = save_hf + (not disable_ds)
    if alive < wanted:
        with pytest.raises(Killed):
            rank.save_checkpoint("global_step3")
    else:
        rank.save_checkpoint("global_step3")
    plain = (tmp_path / "global_step3_hf").is_dir()
    resumable = (tmp_path / "_actor" / "global_step3").is_dir()
    assert plain + resumable == min(alive, wanted)
    assert plain or not (save_hf and resumable)
    assert (rank.disable_ds_ckpt, rank.save_hf_ckpt) == (disable_ds, save_hf)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_samples_that_wait_for_their_update_are_in_the_first_ranks_file_alone(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "torch_dist_barrier_and_cuda_sync", lambda: None)
    rank = SGPolicyModelActor.__new__(SGPolicyModelActor)
    rank.actor, rank.tokenizer = SimpleNamespace(model=None), None
    rank.strategy = Disk(tmp_path, 1, is_first)
    rank.disable_ds_ckpt = rank.save_hf_ckpt = False
    rank.save_checkpoint(
        "global_step3", client_states={"global_step": 3, BUFFER_KEY: {"units": []}}
    )
    assert rank.strategy.states["global_step"] == 3
    assert (BUFFER_KEY in rank.strategy.states) is is_first
