"""`sg-rlhf plan`, and the settings that the plan chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.machine.facts import Facts, Gpu
from sg_rlhf.machine.hardware import named
from sg_rlhf.plan import load, of_recipe
from sg_rlhf.plan.command import main
from sg_rlhf.tasks.registry import DOMAINS
from tests.unit.plan.runs import RECIPE

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    facts = Facts(gpus=[], host_memory_gib=24.0)
    monkeypatch.setattr(of_recipe, "gather", lambda folder: facts)


def test_a_recipe_on_its_own_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", RECIPE, "actor.fused_logprobs=false"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("memory plan for 8 x H100 80 GB (nvlink), ")
    assert "(the recipe's hardware, 8x80gb; no GPU is here)" in out
    assert "\nfits: update takes most, " in out and "\ntime, an estimate: " in out


def test_the_machine_at_hand_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu("NVIDIA A100-SXM4-40GB", 40960)] * 8
    facts = Facts(gpus=gpus, nvlink="all", host_memory_gib=640.0)
    monkeypatch.setattr(of_recipe, "gather", lambda folder: facts)
    assert main(["--config", RECIPE, "actor.fused_logprobs=false"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("memory plan for 8 x A100 40 GB (nvlink), ")
    assert "(this machine)" in out and "does not fit:" in out


def test_other_hardware_and_other_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.max_len=2048", "rollout.max_new_tokens=1024", "rollout.micro_batch_size=4"]
    assert main(["--config", RECIPE, "--hardware", "16xa100-40gb", "--json", *small]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["hardware"]["gpus_per_node"] == 16
    assert plan["gpu_memory"]["update"]["gib"] <= plan["gpu_memory_gib"] < 39
    assert plan["policy_allocated_gib"] < plan["gpu_memory_gib"]
    assert plan["time"]["seconds"] == pytest.approx(sum(plan["time"]["parts"].values()), abs=0.01)
    assert main(["--config", RECIPE, "--json", "--response-tokens", "3000"]) == 0
    longer = json.loads(capsys.readouterr().out)
    assert longer["time"]["assumptions"]["response_tokens"] == 3000


def test_the_settings_of_the_hardware_are_put_on_top() -> None:
    config, machine = load.load_for([str(CONFIGS / RECIPE[8:])], (), "1x24gb")
    assert machine == named("1x24gb")
    assert config.sources[-1] == "hardware:1x24gb" and config.hardware == "1x24gb"
    assert config.value("ds.adam_offload") and config.value("actor.num_gpus_per_node") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--config: not set"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "configs/hardware/8x80gb.yaml"], "actor.model_name_or_path: not set"),
        (["--config", RECIPE, "--hardware", "8x33gb"], "--hardware 8x33gb: no such hardware"),
        (
            ["--config", RECIPE, "train.micro_batch_size=0"],
            "train.micro_batch_size=0: expected an integer, 1",
        ),
        (["--config", RECIPE, "vllm.num_engine=1"], "did you mean"),
        (["--config", RECIPE, "--response-tokens", "0.5"], "--response-tokens 0.5: expected 1"),
        (
            ["--config", RECIPE, "vllm.num_engines=-3"],
            "num_engines=-3: expected an integer, 1",
        ),
        (["--config", RECIPE, "ds.zero_stage=7"], "expected an integer, 0 or more, at most 3"),
        (
            ["--config", RECIPE, "vllm.gpu_memory_utilization=-1"],
            "vllm.gpu_memory_utilization=-1: expected a number, 0 or more, at most 1",
        ),
        (
            ["--config", RECIPE, "actor.model_name_or_path=some/model"],
            "actor.model_name_or_path=some/model: its shape is not known here",
        ),
    ],
)
def test_wrong_input_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_the_whole_run_is_counted_where_its_prompts_are_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"input": "a", "answer": "b"}\n' * 900)
    words = ["--config", RECIPE, "--hardware", "8xh100", "--json", "rollout.batch_size=100"]
    main([*words, f"data.prompt_dataset={data}", "train.num_episodes=2"])
    assert json.loads(capsys.readouterr().out)["rollouts"] == 18
    main([*words, "data.prompt_dataset=org/set"])
    assert json.loads(capsys.readouterr().out)["rollouts"] is None


def test_every_shipped_recipe_has_a_plan_and_fits_where_it_belongs() -> None:
    planned: list[str] = []
    for domain, file in [(d, f) for d in DOMAINS for f in (CONFIGS / d).glob("*.yaml")]:
        config, _ = load.load_for([str(file)], (), None)
        if not config.value("actor.model_name_or_path"):  # what others extend
            continue
        plan = of_recipe.plan_of(config)
        assert plan is not None, file
        if plan.run.cpu:
            continue
        planned.append(domain)
        assert plan.time is not None
        if plan.hardware.gpus == 8:
            assert plan.memory.fits, (file, plan.memory.problems)
    assert len(planned) >= 10 and {*planned} == {*DOMAINS}


def test_the_cpus_recipes_are_planned_as_measured() -> None:
    """3.8 GB at most were measured, all processes together."""
    config, _ = load.load_for([str(CONFIGS / "kk/grpo_sg_tiny_cpu.yaml")], (), None)
    plan = of_recipe.plan_of(config)
    assert plan is not None and plan.time is None and plan.memory.fits
    assert plan.memory.host_gib * 2**30 / 1e9 == pytest.approx(3.8, rel=0.15)


# -- the settings that the plan chooses


def chosen(recipe: str, hardware: str, *overrides: str) -> dict[str, Any]:
    config, _ = load.load_for([str(CONFIGS / recipe)], overrides, hardware)
    return {key: config.value(key) for key, part in config.origin.items() if part == "the plan"}


def test_one_gpu_gets_no_transfers_per_micro_batch_and_24_gb_larger_micro_batches() -> None:
    one = chosen("kk/grpo_qwen2.5-3b-instruct.yaml", "1x80gb")
    # ZeRO-2, whose float32 sums stay on the GPU.
    assert one["ds.grad_accum_dtype"] == "fp32" and "ds.zero_stage" not in one
    small = chosen("kk/grpo_1xgpu.yaml", "1x24gb")
    assert small["train.micro_batch_size"] == 2
    assert small["actor.gradient_checkpointing_enable"] is False
    four = chosen("search/grpo_qwen3-4b.yaml", "8x80gb")
    assert four["ds.zero_stage"] == 2


def test_the_plan_changes_only_what_comes_with_the_hardware() -> None:
    overrides = ["train.micro_batch_size=1", "ds.grad_accum_dtype=bf16", "ds.zero_stage=3"]
    found = chosen("search/grpo_qwen3-4b.yaml", "8x80gb", *overrides)
    assert not {"train.micro_batch_size", "ds.grad_accum_dtype", "ds.zero_stage"} & found.keys()
    assert chosen("kk/grpo_sg_tiny_cpu.yaml", "cpu") == {}


def test_what_it_chooses_fits_with_a_reserve_and_is_not_slower() -> None:
    for recipe in ("kk/grpo_1xgpu.yaml", "kk/grpo_qwen2.5-7b-instruct-1m.yaml"):
        for hardware in ("1x24gb", "4x80gb", "8x80gb"):
            plain = load_config([str(CONFIGS / recipe), f"hardware:{hardware}"])
            before = of_recipe.plan_of(plain, hardware=named(hardware))
            after = of_recipe.plan_of(load.fitted(plain), hardware=named(hardware))
            assert before is not None and after is not None
            if before.memory.fits:
                assert after.memory.fits and not after.memory.tight
                assert after.seconds <= before.seconds * load.SLOWER
