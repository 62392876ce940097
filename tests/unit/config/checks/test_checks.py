"""The checks of a recipe before anything starts, but for its files."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from sg_rlhf.common import cuda_home
from sg_rlhf.config import ConfigError, checks, load_config
from sg_rlhf.config.checks import cuda_toolkit, optional_packages
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.overlay.driver.arguments import (
    UnsupportedHere,
    UsageError,
    check_trackers,
    upstream_arguments,
)
from sg_rlhf.overlay.patches import flash_attn_shim
from sg_rlhf.overlay.patches.version import upstream_root
from sg_rlhf.plan.command import main as plan
from sg_rlhf.train import main as train

# -- All problems of a recipe are found at once, and every command that reads recipes shows them --


TINY = Path(__file__).parents[4] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
WRONG = ["rollout.top_p=0.9", "vllm.sync_with_ray=true", "sg.update=lopti", "actor.entropy_coef=1"]


def test_a_shipped_recipe_has_no_problem() -> None:
    config = load_config(TINY)
    assert checks.problems(config) == []
    checks.check(config)


def test_a_problem_of_each_check_is_a_line() -> None:
    config = load_config(TINY, WRONG)
    first, second = checks.problems(config)
    assert first.startswith("vllm.sync_with_ray=true: the weights are sent in buckets")
    assert second.startswith("actor.entropy_coef=1.0: expected 0 with sg.update=lopti")
    with pytest.raises(ConfigError, match="^vllm.sync_with_ray=true"):
        checks.check(config)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "{max_num_seq: 64}",
            "max_num_seq is no argument of vLLM's engine; did you mean max_num_seqs",
        ),
        ("{model: x}", "model is set by the trainer; set actor.model_name_or_path"),
        ("{gpu_memory_utilization: .5}", "set by the trainer; set vllm.gpu_memory_utilization"),
        ("{worker_cls: x}", "worker_cls is set by the trainer; leave it out"),
    ],
)
def test_an_argument_that_vllm_does_not_take_is_one_line(given: str, line: str) -> None:
    (found,) = checks.problems(load_config(TINY, [f"vllm.engine_args={given}"]))
    assert found.startswith("vllm.engine_args: ") and line in found


def test_arguments_of_vllm_are_taken() -> None:
    given = "vllm.engine_args={max_num_seqs: 64, enable_log_requests: true}"
    assert checks.problems(load_config(TINY, [given])) == []


def test_the_mean_over_prompts_needs_a_loss_of_ours() -> None:
    mean = "actor.loss_agg_mode=prompt-mean"
    assert checks.problems(load_config(TINY, [mean])) == []
    (line,) = checks.problems(
        load_config(TINY, [mean, "actor.policy_loss_type=ppo", "algo.kl.estimator=k3"])
    )
    assert line.startswith(f"{mean}: with actor.policy_loss_type=ppo expected token-mean or ")


def test_without_a_count_nothing_else_is_checked() -> None:
    config = load_config(TINY, [*WRONG, "vllm.num_engines=null"])
    assert checks.problems(config) == ["vllm.num_engines: not set: expected 1 or more"]


def test_plan_and_dry_run_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--config", str(TINY), "rollout.top_p=0.9"]) == 0
    assert "train refuses this recipe: rollout.top_p=0.9: " in capsys.readouterr().err
    assert train(["--config", str(TINY), "--dry-run", "rollout.top_p=0.9"]) == 2
    assert capsys.readouterr().err.startswith("error: rollout.top_p=0.9: ")


# -- What does not fit together is one line before anything starts; what is shipped fits ---------


CONFIGS = Path(__file__).parents[4] / "configs"
PAPER = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
RECIPES = sorted(
    path
    for task in ("kk", "math", "search", "arithmetic")
    for path in (CONFIGS / task).glob("*.yaml")
    if path.stem != "common"
)


ASYNC = "train.async_enable=true vllm.enable_sleep=false"


def parse(*overrides: str, recipe: Path = PAPER) -> Any:
    return upstream_arguments(load_config(recipe, overrides))


@pytest.mark.parametrize(
    "more",
    [
        "sg.correction=icepop",
        "sg.max_staleness=0",
        "sg.correction=tis rollout.vllm_generate_batch_size=128",
        "sg.correction=tis vllm.num_engines=3",  # they have accelerators of their own
        "sg.correction=tis train.partial_rollout_enable=true",
    ],
)
def test_an_asynchronous_run(more: str) -> None:
    assert parse(*ASYNC.split(), *more.split()).train.async_enable


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_recipe_divides_evenly(recipe: Path) -> None:
    args = parse(recipe=recipe)
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    steps = samples // args.train.batch_size
    assert steps >= 1 and steps * args.train.batch_size == samples
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    for size, part in ((samples, args.rollout), (args.train.batch_size, args.train)):
        assert size % (part.micro_batch_size * ranks) == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("rollout.batch_size=66", "= 66 * 8 = 528: not divisible by train.batch_size=256"),
        ("train.batch_size=512 rollout.batch_size=32", "not divisible by train.batch_size=512"),
        ("train.micro_batch_size=3", "not divisible by train.micro_batch_size=3 times the 8 data-"),
        ("rollout.micro_batch_size=24", "rollout.micro_batch_size=24 times the 8 data-parallel"),
        ("rollout.vllm_generate_batch_size=32", "=32: expected rollout.batch_size=64 or"),
        ("rollout.vllm_generate_batch_size=128", "set train.async_enable=true, or leave it unset"),
        (
            "rollout.micro_batch_size=0",
            "rollout.micro_batch_size=0: expected an integer, 1 or more",
        ),
        ("train.dynamic_batch_enable=true train.batch_size=4", "=4: not divisible by the 8 data-"),
        ("algo.advantage.estimator=gae", "=gae: a critic is not supported; set algo.advantage."),
        ("critic.model_name_or_path=a/b", "=a/b: a critic is not supported; take it out"),
        ("data.max_images_per_prompt=1", "=1: images are not supported; set it to 0"),
        ("ds.ring_attn_size=2", "ds.ring_attn_size=2: ring attention is not supported; set it to"),
        ("ds.tensor_parallel_size=2", "vllm.tensor_parallel_size is the engines'"),
        ("train.async_enable=true", "vllm.enable_sleep=true: not with train.async_enable=true"),
        ("train.partial_rollout_enable=true", "expected train.async_enable=true, or false"),
        (f"{ASYNC}", "no correction is on: set sg.correction=tis"),
        (f"{ASYNC} sg.correction=tis actor.policy_loss_type=gspo", "with a loss that takes it"),
        (
            f"{ASYNC} sg.correction=tis train.partial_rollout_enable=true "
            "train.full_determinism_enable=true",
            "train.partial_rollout_enable=true: not with train.full_determinism_enable=true",
        ),
        (
            f"{ASYNC} train.async_queue_size=0",
            "train.async_queue_size=0: expected an integer, 1 or more",
        ),
        (
            f"{ASYNC} sg.correction=tis rollout.vllm_generate_batch_size=192",
            "up to 3 rollouts of rollout.batch_size=64, of which the last is 2 weight syncs old",
        ),
        (
            f"{ASYNC} sg.correction=tis rollout.vllm_generate_batch_size=112",  # 48 may be left
            "up to 3 rollouts of rollout.batch_size=64, of which the last is 2 weight syncs old",
        ),
        ("vllm.num_engines=null", "vllm.num_engines: not set: expected 1 or more"),
        ("actor.lr_scheduler=polynomial actor.adam.lr=1e-7", "actor.lr_scheduler=polynomial: ends"),
        ("vllm.num_engines=0", "vllm.num_engines=0: expected an integer, 1 or more"),
        ("reward.remote_url=null", "reward.remote_url: not set"),
        (
            "reward.remote_url=null reward.model_name_or_path=a/b",
            "eval.dataset: not with the reward model of reward.model_name_or_path alone",
        ),
        (
            "reward.remote_url=null reward.model_name_or_path=a/b eval.dataset=null "
            "algo.dynamic_filtering_enable=true",
            "algo.dynamic_filtering_enable=true: not with the reward model",
        ),
        (
            "rollout.n_samples_per_prompt=1 train.batch_size=64",
            "expected 2 or more with group_norm",
        ),
        (
            "rollout.n_samples_per_prompt=1 train.batch_size=64 "
            "algo.dynamic_filtering_enable=true algo.advantage.estimator=reinforce",
            "=1: expected 2 or more with algo.dynamic_filtering_enable=true",
        ),
        (
            "algo.dynamic_filtering_enable=true algo.dynamic_filtering_range=[1,0]",
            "algo.dynamic_filtering_range=[1.0, 0.0]: expected [LOW, HIGH]",
        ),
        ("algo.advantage.is_correction_threshold=[1,2,3]", "expected [HIGH] or [LOW, HIGH]"),
        ("algo.advantage.no_std_norm=true", "with group_norm; set algo.advantage.estimator=dr_g"),
        ("algo.advantage.gamma=0.99", "=0.99: has no effect with group_norm; set it to 1"),
        ("algo.advantage.lambd=0.95", "=0.95: has no effect with group_norm; set it to 1, as a"),
        ("actor.num_gpus_per_node=4 vllm.num_engines=4", "actor.num_gpus_per_node=4, ref.num_gpus"),
        (
            "reward.remote_url=null reward.model_name_or_path=a/b reward.num_gpus_per_node=16 "
            "eval.dataset=null",
            "reward.num_nodes * reward.num_gpus_per_node = 16: more than the actor's 8",
        ),
        ("vllm.num_engines=4", "vllm.tensor_parallel_size = 4: must be equal with"),
        (
            "train.colocate_all=false vllm.enable_sleep=false ref.num_gpus_per_node=3",
            "times the 3 data-parallel ranks of ref",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(overrides: str, words: str) -> None:
    with pytest.raises((UsageError, ConfigError)) as refusal:
        parse(*overrides.split())
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_fits_is_taken() -> None:
    smaller = ("actor.num_gpus_per_node=4", "vllm.num_engines=4")
    assert parse(*smaller, "ref.num_gpus_per_node=4").ref.num_gpus_per_node == 4
    assert parse(*smaller, "algo.kl.init_coef=0").ref.num_gpus_per_node == 8
    assert parse("vllm.num_engines=2", "vllm.tensor_parallel_size=4").vllm.num_engines == 2
    dynamic = parse("train.dynamic_batch_enable=true", "train.micro_batch_size=3")
    assert dynamic.train.batch_size % (3 * dynamic.actor.num_gpus_per_node)  # static ones refuse it
    # One rank runs a smaller last batch of a rollout as well.
    tiny = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    found = parse("rollout.micro_batch_size=24", recipe=tiny)
    assert found.rollout.batch_size * found.rollout.n_samples_per_prompt % 24


# -- Flags whose package the locks leave out are refused in one line, before anything starts -----


ROOT = Path(__file__).parents[4]
USED = {
    "ds.use_liger_kernel": True, "ds.load_in_4bit": True,
    "ds.experts_implementation": "deepgemm", "use_ms": True,
}  # fmt: skip
DEFAULTS = {key: flag.default for key, flag in flags().items()}
BY_KEY = {need.key: need for need in optional_packages.NEEDS}


def value(**given: Any) -> Any:
    return ({**DEFAULTS, **given}).__getitem__


def test_the_defaults_of_upstream_need_nothing() -> None:
    assert set(USED) == set(BY_KEY)
    assert optional_packages.missing(value(), installed=lambda _: False) == []


@pytest.mark.parametrize("key", USED)
def test_each_flag_names_its_package_and_what_to_do(key: str) -> None:
    need, given = BY_KEY[key], value(**{key: USED[key]})
    (line,) = optional_packages.missing(given, installed=lambda _: False)
    assert line.startswith(f"{key}={str(USED[key]).lower()}: needs {need.modules[0]}")
    assert need.install in line and line.endswith(f"or set {key}={need.instead}")
    assert optional_packages.missing(given, installed=lambda _: True) == []
    instead = {"false": False, "1": 1}.get(need.instead, need.instead)
    assert optional_packages.missing(value(**{key: instead}), installed=lambda _: False) == []


def test_only_what_is_lacking_is_named() -> None:
    found = optional_packages.missing(value(**USED), installed=lambda name: name == "flash_attn")
    assert len(found) == len(USED)
    assert "needs liger_kernel, not installed" in found[0]


@pytest.mark.parametrize("need", optional_packages.NEEDS, ids=lambda need: need.key)
def test_a_package_of_a_cuda_lock_is_installed_there(need: optional_packages.Need) -> None:
    """A row says what is missing here; the CUDA lock has bitsandbytes in the version named."""
    locked = (ROOT / "requirements" / "cuda.lock").read_text()
    for pinned in re.findall(r"([\w-]+)==([\w.]+)", need.install):
        lines = re.findall(rf"^{pinned[0]}==\S+", locked, re.M)
        assert lines in ([], ["==".join(pinned)])


def test_no_import_of_upstream_is_without_a_row_or_a_lock() -> None:
    """Every package that upstream imports anywhere on the way of a run."""
    skipped = {"cli/serve_rm.py", "cli/lora_combiner.py"}
    imported = set()
    for path in upstream_root().rglob("*.py"):
        if str(path.relative_to(upstream_root())) not in skipped:
            imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M))
    rows = {module for need in optional_packages.NEEDS for module in need.modules}
    unknown = {
        name for name in imported - rows - {"openrlhf"} if not optional_packages.is_installed(name)
    }
    # The stand-in, or whatever packs samples on CUDA; and of ring attention, which is refused.
    assert unknown <= {"flash_attn", "ring_flash_attn"}
    assert not unknown & set(sys.stdlib_module_names)


def test_a_stand_in_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    before = optional_packages.is_installed("flash_attn")
    flash_attn_shim.install()
    assert optional_packages.is_installed("flash_attn") == before
    for name in flash_attn_shim.MODULES if not before else ():
        monkeypatch.delitem(sys.modules, name)
    assert optional_packages.is_installed("torch") and not optional_packages.is_installed(
        "no_such_module"
    )


def test_a_run_refuses_the_other_hub() -> None:
    with pytest.raises(UnsupportedHere, match="use_ms=true: needs modelscope, not installed: pip"):
        upstream_arguments(load_config(PAPER, ["use_ms=true"]))


def test_a_run_refuses_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
    args = upstream_arguments(load_config(tiny, ["sg.trackio=true"]))
    monkeypatch.setattr(optional_packages, "is_installed", lambda module: module != "trackio")
    with pytest.raises(UnsupportedHere, match="sg.trackio=true: needs trackio, not installed: pip"):
        check_trackers(args)


def test_a_run_refuses_a_wandb_key_of_a_wrong_form(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    in_recipe = upstream_arguments(load_config(tiny, ["logger.wandb.key=short"]))
    with pytest.raises(UsageError, match="^logger.wandb.key: no W&B key: it has 5 characters") as e:
        check_trackers(in_recipe)
    assert "short" not in str(e.value)
    check_trackers(upstream_arguments(load_config(tiny, ["logger.wandb.key=" + "0f" * 20])))
    offline = upstream_arguments(load_config(tiny, ["sg.wandb=offline"]))
    monkeypatch.setenv("WANDB_API_KEY", "0f" * 20 + "\n")
    check_trackers(offline)
    with pytest.raises(UsageError, match="^WANDB_API_KEY: no W&B key: it has 41 characters"):
        check_trackers(in_recipe)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(in_recipe)


# -- Toolkits of any version, by an nvcc that prints it; and what DeepSpeed does with each -------


NVCC = """#!/bin/sh
echo 'nvcc: NVIDIA (R) Cuda compiler driver'
echo 'Cuda compilation tools, release {version}, V{version}.48'
"""


def toolkit(folder: Path, version: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format(version=version))
    nvcc.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", ["13.0", "13.1", "13.4"])
def test_deepspeed_takes_any_toolkit_when_its_check_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    from deepspeed.ops.op_builder import builder

    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(toolkit(tmp_path, version)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert builder.assert_no_cuda_mismatch("an operator")


def test_the_release_of_a_toolkit(tmp_path: Path) -> None:
    assert cuda_toolkit.release(toolkit(tmp_path / "a", "13.1")) == (13, 1)
    assert cuda_toolkit.release(tmp_path / "none") is None
    broken = toolkit(tmp_path / "b", "13.1")
    (broken / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert cuda_toolkit.release(broken) is None


@pytest.mark.parametrize(
    ("home", "found", "torch_cuda", "expected"),
    [
        ("/opt/cuda", (13, 0), "13.0", None),
        ("/opt/cuda", (13, 3), "13.0", None),
        ("/opt/cuda", None, None, None),
        ("/opt/cuda", (12, 8), "13.0", "/opt/cuda is 12.8, and torch is built for 13.0: install"),
        ("/opt/cuda", None, "13.0", "/opt/cuda has no nvcc that runs: install one of 13.x and set"),
        (None, None, "13.0", "there is none: install one of 13.x and set CUDA_HOME; or set"),
    ],
)
def test_deepcompile_needs_one_of_torchs_major_version(
    home: str | None, found: tuple[int, int] | None, torch_cuda: str | None, expected: str | None
) -> None:
    line = cuda_toolkit.problem(home, found, torch_cuda)
    assert line == expected if expected is None else line is not None and expected in line


@pytest.mark.parametrize("named", [None, "", "/opt/mine"])
def test_the_usual_folder_is_named_for_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.setenv("CUDA_HOME", "")
    if named is None:
        monkeypatch.delenv("CUDA_HOME")
    else:
        monkeypatch.setenv("CUDA_HOME", named)
    cuda_home.install(tmp_path)
    assert os.environ.get("CUDA_HOME") == named
    cuda_home.install(toolkit(tmp_path, "13.0"))
    assert os.environ["CUDA_HOME"] == (named or str(tmp_path))
