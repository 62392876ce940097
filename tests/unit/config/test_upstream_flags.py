"""Upstream's flags, and the ranges of their values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from sg_rlhf.config import ConfigError, load_config, upstream_flags
from sg_rlhf.config.upstream_flags import SHIPPED, UpstreamMissing, as_json, flags
from sg_rlhf.config.value_ranges import RANGES, _matches, violation
from sg_rlhf.overlay.driver.arguments import upstream_arguments

# -- The shipped table of upstream's flags, which stands in where OpenRLHF is not installed ------


WRITE = "from sg_rlhf.config import upstream_flags as u; u.SHIPPED.write_text(u.as_json(u.flags()))"
ARGUMENTS = [
    "actor.model_name_or_path=m", "data.prompt_dataset=d", "reward.remote_url=r.py",
    "vllm.num_engines=1", "algo.advantage.estimator=reinforce",
]  # fmt: skip


def test_the_shipped_table_is_that_of_the_installed_upstream() -> None:
    assert SHIPPED.read_text() == as_json(flags()), f"python -c '{WRITE}'"
    assert as_json(upstream_flags.shipped_flags()) == as_json(flags())


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


def test_a_recipe_can_be_read_without_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        return None

    overrides = ["actor.adam.lr=1e-6", "actor.policy_loss_type=cispo", "ds.packing_samples=true"]
    real = load_config(None, overrides)
    upstream_flags.flags.cache_clear()
    upstream_flags.main_block.cache_clear()
    monkeypatch.setattr(upstream_flags.importlib.util, "find_spec", missing)
    try:
        with pytest.raises(UpstreamMissing, match=r"scripts/bootstrap\.sh"):
            upstream_flags.build_parser()
        found = load_config(None, overrides)
        assert found == real
        with pytest.raises(UpstreamMissing):
            upstream_arguments(load_config(None, ARGUMENTS))
    finally:
        upstream_flags.flags.cache_clear()


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_flags.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(upstream_flags, "PIPELINE_PYTHON", (3, 10))
    with pytest.raises(UpstreamMissing, match=r"^training needs Python 3\.11, .* this is 3\.\d+"):
        upstream_flags.upstream_root()


def test_checking_flags_imports_no_heavy_package() -> None:
    # They would be seconds of every start and of every dry run.
    code = (
        "import sys\n"
        "from sg_rlhf.config.upstream_flags import build_parser, validate_args\n"
        "args = build_parser().parse_args(['--actor.model_name_or_path', 'm',"
        " '--reward.remote_url', 'r', '--vllm.num_engines', '1'])\n"
        "assert validate_args(args).actor.model_name_or_path == 'm'\n"
        "print({'torch', 'transformers', 'openrlhf.utils'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_a_recipe_is_refused_without_a_heavy_import() -> None:
    recipe = Path(__file__).parents[3] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
    code = (
        "import sys\n"
        "from sg_rlhf.train import main\n"
        f"status = main(['--config', {str(recipe)!r}, 'actor.adam.rl=1'])\n"
        "print(status, {'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 set()\n", done.stderr


# -- Numbers that no run can use are refused where the recipe is read ----------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.temperature=0", "rollout.temperature=0.0: expected 0.01 or more"),
        ("rollout.temperature=0.005", "rollout.temperature=0.005: expected 0.01 or more"),
        ("eval.temperature=0.005", "eval.temperature=0.005: expected 0.01 or more, or 0"),
        ("rollout.temperature=.inf", "rollout.temperature=inf: expected a finite number"),
        ("rollout.temperature=.nan", "rollout.temperature=nan: expected a number"),
        ("rollout.top_p=2", "rollout.top_p=2.0: expected above 0 to 1"),
        ("actor.adam.lr=-1", "actor.adam.lr=-1.0: expected 0 or more"),
        ("actor.adam.betas=[0.9, 1]", "actor.adam.betas=[0.9, 1.0]: expected 0 to 1 without it"),
        ("train.num_episodes=0", "train.num_episodes=0: expected 1 or more"),
        ("ckpt.save_steps=0", "ckpt.save_steps=0: expected 1 or more, or -1"),
        ("data.max_samples=-4", "data.max_samples=-4: expected 1 or more"),
        ("train.seed=-1", "train.seed=-1: expected 0 to 2147483647"),
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
    for key, flag in flags().items():
        default = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        assert default is None or violation(key, default) is None, key
    unused = [name for name in RANGES if not any(_matches(key, (name,)) for key in flags())]
    assert not unused


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
