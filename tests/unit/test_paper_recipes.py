"""Every run of the papers is a recipe, which fits every hardware with the paper's batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.plan.shapes import table
from sg_rlhf.train import main

CONFIGS = Path(__file__).parents[2] / "configs"
#: Every size and number of GPUs that settings differ for, and their older names.
HARDWARE = [
    *(f"{count}x{size}gb" for size in (24, 40, 80) for count in (1, 2, 4, 8)),
    "2x8x80gb", "1x24gb", "8xh100",
]  # fmt: skip
RECIPES = sorted(
    path
    for domain in ("kk", "math", "search", "arithmetic")
    for path in (CONFIGS / domain).glob("grpo*.yaml")
)

#: Recipe -> its model, and the tables of arXiv 2511.00066 with its rows.
RUNS = {
    "kk/qwen2.5-3b-instruct": ("Qwen/Qwen2.5-3B-Instruct", "Tables 3"),
    "kk/qwen2.5-7b-instruct-1m": ("Qwen/Qwen2.5-7B-Instruct-1M", "Tables 3 and 8"),
    "kk/qwen2.5-3b": ("Qwen/Qwen2.5-3B", "Table 8"),
    "kk/mistral-7b-instruct-v0.3": ("mistralai/Mistral-7B-Instruct-v0.3", "Table 8"),
    "kk/llama-3.1-8b-instruct": ("meta-llama/Llama-3.1-8B-Instruct", "Tables 4 and 8"),
    "math/dsr_qwen2.5-7b": ("Qwen/Qwen2.5-7B", "Table 1"),
    "math/orz_qwen2.5-7b": ("Qwen/Qwen2.5-7B", "Table 1"),
    "search/qwen2.5-3b": ("Qwen/Qwen2.5-3B", "Table 2"),
    "search/qwen3-4b": ("Qwen/Qwen3-4B-Instruct-2507", "Table 2"),
}

#: Table 6, and what it leaves out (docs/method.md), for all three domains.
SHARED = {
    "rollout.n_samples_per_prompt": 8,
    "rollout.top_p": 1.0,
    "rollout.max_new_tokens": 4096,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.999],
    "actor.adam.weight_decay": 0.01,
    "actor.eps_clip_low_high": [0.20, 0.24],
    "actor.dual_clip": 10.0,
    "actor.max_norm": 1.0,
    "actor.loss_agg_mode": "token-mean",
    "actor.lr_scheduler": "constant",
    "algo.kl.init_coef": 0.001,
    "ckpt.save_steps": 20,
}
TABLE_6 = {
    "kk": {"rollout.batch_size": 64, "train.batch_size": 256, "rollout.temperature": 0.7},
    "math": {"rollout.batch_size": 128, "train.batch_size": 512, "rollout.temperature": 1.0},
    "search": {"rollout.batch_size": 32, "train.batch_size": 256, "rollout.temperature": 0.8},
}
#: What hardware may set: where and in what portions, but not what is computed.
OF_HARDWARE = {
    "actor.num_nodes", "actor.num_gpus_per_node", "actor.gradient_checkpointing_enable",
    "ref.num_nodes", "ref.num_gpus_per_node", "vllm.num_engines", "vllm.tensor_parallel_size",
    "vllm.sync_backend", "vllm.enforce_eager", "vllm.enable_sleep", "vllm.gpu_memory_utilization",
    "vllm.enable_prefix_caching",
    "ds.attn_implementation", "ds.packing_samples", "ds.adam_offload", "ds.enable_sleep",
    "ds.param_dtype", "ds.zero_stage", "rollout.micro_batch_size", "train.micro_batch_size",
    "train.colocate_all",
}  # fmt: skip


def recipe(run: str) -> Path:
    domain, model = run.split("/")
    return CONFIGS / domain / f"grpo_{model}.yaml"


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_the_papers_is_a_model_with_each_algorithm(run: str) -> None:
    model, tables = RUNS[run]
    path = recipe(run)
    header = path.read_text().splitlines()[0]
    assert tables in header and model in header, header
    grpo, sg = load_config(path), load_config([path, "algorithm:grpo_sg"])
    paper = load_config("hardware:8x80gb")
    for config in (grpo, sg):
        assert config.value("actor.model_name_or_path") == model and model in table()
        expected = SHARED | TABLE_6[run.partition("/")[0]]
        assert {key: config.values.get(key) for key in expected} == expected
        assert config.hardware == "8x80gb"
        assert {k: config.values[k] for k in OF_HARDWARE} == {
            k: paper.values[k] for k in OF_HARDWARE
        }
    # The two differ in the weights alone. (One default of upstream's is written out.)
    differing = {key for key in sg.values if sg.value(key) != grpo.value(key)}
    assert differing == {"actor.policy_loss_type", "algo.kl.estimator"}
    assert sg.sg.weighting["type"] == "grpo_sg" and sg.sg.weighting["upper"] == 1.4
    assert sg.sg.advantage_std == "sample" and sg.sg.weighting["normalize"] is None


@pytest.mark.parametrize("run", RUNS)
def test_the_former_file_of_grpo_sg_is_the_model_with_the_algorithm(run: str) -> None:
    path = recipe(run)
    older = path.with_name(path.name.replace("grpo_", "grpo_sg_", 1))
    assert not older.exists()
    assert load_config(older).flat() == load_config([path, "algorithm:grpo_sg"]).flat()


def test_no_other_recipe_claims_to_be_of_the_papers() -> None:
    own = ("_1xgpu", "_tiny_cpu", "_smollm2-135m", "_smollm2-135m_cpu")
    others = {path for path in RECIPES if not path.stem.endswith(own)}
    assert others == {recipe(run) for run in RUNS}


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_dry_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    assert main(["--config", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "\nsg-rlhf train --config " in out


@pytest.mark.parametrize("path", [p for p in RECIPES if "_cpu" not in p.stem], ids=name_of)
def test_hardware_changes_portions_and_nothing_else(path: Path) -> None:
    own = load_config(path)
    for hardware in HARDWARE:
        if path.stem.endswith("_1xgpu") and hardware == "2x8x80gb":
            continue  # fewer samples in a rollout than sixteen GPUs take at once
        config = load_config([path, f"hardware:{hardware}"])
        changed = {k for k in config.values if config.values[k] != own.values.get(k)}
        assert changed <= OF_HARDWARE, hardware
        args = upstream_arguments(config)  # upstream's own checks, and ours
        ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
        samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
        assert args.train.batch_size % (args.train.micro_batch_size * ranks) == 0
        assert samples % (args.rollout.micro_batch_size * ranks) == 0
        assert args.vllm.num_engines * args.vllm.tensor_parallel_size == ranks
        # What the earlier file sets and the later one not would survive.
        assert config.values.keys() == own.values.keys()


def test_hardware_sets_what_is_its_own() -> None:
    for hardware in HARDWARE:
        assert load_config(f"hardware:{hardware}").values.keys() == OF_HARDWARE, hardware
