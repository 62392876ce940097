"""Upstream's flags, and the ranges of their values."""

from __future__ import annotations

import argparse
import copy
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from sg_rlhf.config import ConfigError, load_config, upstream_flags
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.overlay.patches import version
from sg_rlhf.overlay.patches.version import UpstreamMissing
from tests.unit import upstream_script

# -- The list of upstream's flags, and what is derived from them, are those of the installed one --


TINY = Path(__file__).parents[3] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
ASYNC = ["train.async_enable=true", "vllm.enable_sleep=false", "sg.correction=tis"]


def as_listed(action: argparse.Action) -> dict[str, Any]:
    """An action of upstream's parser as an entry of the list."""
    if isinstance(action, argparse._StoreTrueAction):
        return {"type": "bool", "default": action.default}
    default = action.default
    if isinstance(default, str):
        default = re.sub(r"_\d{4}T\d\d:\d\d$", "", default)  # the time of day
    entry = {"type": (action.type or str).__name__, "nargs": action.nargs, "default": default}
    choices = [*action.choices] if action.choices else None
    entry = {**entry, "choices": choices}
    return {k: v for k, v in entry.items() if v is not None or k == "default"}


def test_the_list_is_that_of_the_installed_upstream() -> None:
    ours = ("help", "infinite", "also", *upstream_flags.BOUNDS)
    listed = {
        key: {name: value for name, value in entry.items() if name not in ours}
        for key, entry in json.loads(upstream_flags.LIST.read_text()).items()
    }
    skipped = (argparse._HelpAction, argparse._StoreFalseAction)  # --no-X has the key of --X
    actions = (a for a in upstream_script.parser()._actions if not isinstance(a, skipped))
    installed = {action.dest: as_listed(action) for action in actions}
    assert listed == json.loads(json.dumps(installed))
    assert all(flag.help for flag in flags().values())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.eps_clip_low_high=null", "actor.eps_clip=0.3"],
        ["actor.eps_clip_low_high=[0.2, 0.3]", "algo.advantage.is_correction_threshold=2.0"],
        ["train.dynamic_batch_enable=true", "ds.packing_samples=false"],
        ["train.colocate_all=false", "vllm.enable_sleep=true"],
        ["train.agent_func_path=domain:kk", "reward.remote_url=null"],
        ["reward.remote_url='http://a/,http://b/'"],
        [*ASYNC, "rollout.vllm_generate_batch_size=16"],
    ],
)
def test_derived_settings_are_upstreams(overrides: list[str]) -> None:
    config = load_config(TINY, ["actor.model_name_or_path=m", *overrides])
    flat = {key: copy.deepcopy(config.value(key)) for key in flags()}
    ours, theirs = upstream_arguments(config), upstream_script.validated(flat)
    del theirs["ds.attn_implementation"]  # a test of its own
    assert {key: operator.attrgetter(key)(ours) for key in theirs} == theirs


def runs(schedule: str) -> bool:
    """Whether it runs as OpenRLHF makes it and DeepSpeed steps it."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    more = {"min_lr_rate": 0.1} if schedule.endswith("_with_min_lr") else {}
    try:
        scheduler = get_scheduler(schedule, optimizer, 2, 20, more)
        for _ in range(25):
            optimizer.step()
            scheduler.step()
    except TypeError:
        return False
    return all(0 <= rate <= 1e-3 for rate in scheduler.get_last_lr())


def test_every_schedule_that_runs_is_accepted_and_no_other() -> None:
    for schedule in (each.value for each in SchedulerType):
        overrides = [f"{who}.lr_scheduler={schedule}" for who in ("actor", "critic")]
        if runs(schedule):
            assert load_config(None, overrides).value("actor.lr_scheduler") == schedule
            continue
        for override in overrides:
            with pytest.raises(ConfigError, match=f"'{schedule}': expected one of constant, "):
                load_config(None, [override])
    assert set(upstream_flags.SCHEDULES) == {s.value for s in SchedulerType if runs(s.value)}


def test_a_run_without_upstream_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UpstreamMissing, match=r"not installed; run scripts/bootstrap\.sh"):
        version.check_version()
    monkeypatch.setattr(version, "PIPELINE_PYTHON", (3, 10))
    with pytest.raises(UpstreamMissing, match=r"^training needs Python 3\.11, .* this is 3\.\d+"):
        version.check_version()


def test_a_recipe_is_refused_without_a_heavy_import() -> None:
    code = (
        "import sys\n"
        "from sg_rlhf.train import main\n"
        f"status = main(['--config', {str(TINY)!r}, 'actor.adam.rl=1'])\n"
        "print(status, {'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 set()\n", done.stderr


# -- Numbers that no run can use are refused where the recipe is read ----------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temperature=0", "rollout.temperature=0: expected a number, 0.01 or more"),
        ("rollout.temperature=0.005", "rollout.temperature=0.005: expected a number, 0.01 or more"),
        ("eval.temperature=0.005", "=0.005: expected a number, 0.01 or more, or 0"),
        ("rollout.temperature=.inf", "rollout.temperature=inf: expected a number"),
        ("rollout.temperature=.nan", "rollout.temperature=nan: expected a number"),
        ("ckpt.max_mem=.nan", "ckpt.max_mem=nan: expected a number, above 0"),
        ("reward.clip_range=[.nan, 1]", "reward.clip_range=[nan, 1]: expected a list (2 times a"),
        ("rollout.top_p=2", "rollout.top_p=2: expected a number, above 0, at most 1"),
        ("actor.adam.lr=-1", "actor.adam.lr=-1: expected a number, 0 or more"),
        ("actor.adam.lr=true", "actor.adam.lr=True: expected a number, 0 or more"),
        ("actor.adam.betas=[0.9, 1]", "expected a list (2 times a number, 0 or more, below 1)"),
        ("actor.dual_clip=1", "actor.dual_clip=1: expected a number, above 1"),
        ("actor.eps_clip_low_high=[-0.1, 0.2]", "a list (2 times a number, 0 or more)"),
        ("train.num_episodes=0", "train.num_episodes=0: expected an integer, 1 or more"),
        ("train.num_episodes=[1]", "train.num_episodes=[1]: expected an integer, 1 or more"),
        ("ckpt.save_steps=0", "ckpt.save_steps=0: expected an integer, 1 or more, or -1"),
        ("data.max_samples=-4", "data.max_samples=-4: expected an integer, 1 or more"),
        ("train.seed=-1", "train.seed=-1: expected an integer, 0 or more, at most 2147483647"),
        ('data.input_key="a\\0b"', "expected text"),
        ("logger.wandb.project=\udcff", "not a YAML value"),
        ("actor.adam.lr=" + "9" * 400, "actor.adam.lr=" + "9" * 20),
    ],
)
def test_a_number_out_of_range_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_has_no_limit_may_be_infinite_and_every_default_is_in_range() -> None:
    assert load_config(None, ["ckpt.max_mem=.inf"]).value("ckpt.max_mem") == float("inf")
    assert load_config(None, ["ckpt.save_steps=-1"]).value("ckpt.save_steps") == -1
    for flag in flags().values():
        assert flag.default is None or flag.checked(flag.default, "") is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: " + b"[" * 3000 + b"]" * 3000, "not a valid YAML recipe"),
        (b'"0"', "not a valid YAML recipe"),
        (b'sg: {weighting: {"a\\nb": 1}}', "sg.weighting.a b"),
        (b"extends: 5", "extends=5: expected a recipe or a list of them"),
        (b"extends: {a: 1}", "extends={'a': 1}: expected a recipe"),
        (b"\xff\xfe\x00", "not a valid YAML recipe"),
        (b"a: !!python/object/apply:os.system ['true']", "not a valid YAML recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_that_is_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    with pytest.raises(ConfigError, match=r"loop\.yaml: no such recipe"):
        load_config(tmp_path / "loop.yaml")
