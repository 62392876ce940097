"""`sg.model_revision`: the commit's folder in the hub's cache replaces the model's id."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from sg_rlhf.config import load_config
from sg_rlhf.config.checks.input_files import token_counter
from sg_rlhf.overlay.driver import model_revision
from sg_rlhf.overlay.driver.arguments import UsageError, upstream_arguments

ROOT = Path(__file__).parents[4]
RECIPE = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model as a commit of org/model in a cache of its own; the hub is out of reach."""
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    shutil.copytree(ROOT / "sg_rlhf" / "tiny" / "kk_tiny", snapshot)
    return snapshot


def overrides(revision: str, model: str = "org/model") -> list[str]:
    return [f"actor.model_name_or_path={model}", f"sg.model_revision={revision}"]


def pinned(*words: str) -> argparse.Namespace:
    args = upstream_arguments(load_config(RECIPE, list(words)))
    model_revision.pin(args)
    return args


def test_every_role_gets_the_commits_folder(folder: Path) -> None:
    args = pinned(
        *overrides(COMMIT),
        "algo.advantage.estimator=gae",
        "critic.num_nodes=1",
        "critic.num_gpus_per_node=1",
        "sg.trust_remote_code=[org/model]",
    )
    assert args.actor.model_name_or_path == args.critic.model_name_or_path == str(folder)
    assert args.sg.trust_remote_code == ["org/model", str(folder)]


def test_without_a_revision_the_id_stays(folder: Path) -> None:
    assert pinned("actor.model_name_or_path=org/model").actor.model_name_or_path == "org/model"


def test_the_tokens_of_prompts_are_counted_with_the_commits_tokenizer(folder: Path) -> None:
    count = token_counter(load_config(RECIPE, overrides(COMMIT)))
    assert count is not None and count(["knight"])[0] > 0
    assert token_counter(load_config(RECIPE, overrides("f" * 40))) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (overrides("f" * 40), "org/model/commits/main has its commits"),
        (overrides(COMMIT, str(ROOT / "sg_rlhf" / "tiny" / "kk_tiny")), "has no revisions"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(folder: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        pinned(*words)
    assert str(caught.value).startswith("sg.model_revision=") and "\n" not in str(caught.value)
