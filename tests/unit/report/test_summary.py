"""The summary and the figures of a run directory that the test writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sg_rlhf.common.statistics import spikes
from sg_rlhf.config import load_config
from sg_rlhf.report import summary
from sg_rlhf.report.runs import read_run
from sg_rlhf.run_dir import jsonl_log


def write_run(run_dir: Path, rollouts: int = 12) -> None:
    metrics, steps = [], []
    for i in range(1, rollouts + 1):
        metrics.append(
            {
                "global_step": i,
                "rollout/reward_mean": i / 10,
                "rollout/accuracy": i / 20,
                "timing/step_total": 5.0,
            }
        )
        for half in (0, 1):
            norm = 2.0 if (i, half) == (9, 1) else 0.1
            steps.append(
                {
                    "global_step": i,
                    "optimizer_step": 2 * i - 1 + half,
                    "actor_grad_norm": norm,
                    "sg/weight_mean": 1.2,
                    "sg/zeroed_pos": 0.25,
                }
            )
    jsonl_log.append(run_dir / jsonl_log.METRICS, metrics)
    jsonl_log.append(run_dir / jsonl_log.OPTIMIZER_STEPS, steps)
    evaluations = [
        {"global_step": s, "eval_accuracy": a, "eval_accuracy_ci95": 0.05, "eval_num_prompts": 300}
        for s, a in ((0, 0.25), (6, 0.4), (12, 0.55))
    ]
    jsonl_log.append(run_dir / jsonl_log.EVALUATIONS, evaluations)


@pytest.mark.parametrize(
    "missing",
    [
        "actor_grad_norm", "rollout/reward_mean", "timing/step_total", "sg/weight_mean",
        "sg/zeroed_pos",
        "optimizer_step", "rollout/accuracy", "eval_accuracy_ci95", "eval_num_prompts",
    ],
)  # fmt: skip
def test_rows_of_an_older_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    write_run(tmp_path)
    for name in (jsonl_log.METRICS, jsonl_log.OPTIMIZER_STEPS, jsonl_log.EVALUATIONS):
        rows = jsonl_log.read(tmp_path / name)
        (tmp_path / name).unlink()
        kept = [{k: v for k, v in row.items() if k != missing} for row in rows]
        jsonl_log.append(tmp_path / name, kept)
    assert summary.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "nan" not in text and text.count("plots   ") == 1
    shown = {
        "actor_grad_norm": "mean -, std -, max -",
        "rollout/reward_mean": "training reward     -  ->  -",
        "timing/step_total": "- s per rollout", "sg/weight_mean": "token weight        mean -; 25",
        "sg/zeroed_pos": "mean 1.200; - of", "eval_accuracy_ci95": "0.250 +- -  ->  0.550 +- -",
        "eval_num_prompts": "(- prompts",
    }  # fmt: skip
    assert shown.get(missing, "") in text
    assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_summary_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert summary.main([str(tmp_path)]) == 0
    figures = summary.figures_of(read_run(tmp_path))
    assert figures["accuracy_before"] == 0.25 and figures["accuracy_after"] == 0.55
    assert figures["reward_first"] == pytest.approx(0.3)
    assert figures["reward_last"] == pytest.approx(1.0)
    assert figures["grad_norm_max"] == 2.0 and figures["optimizer_steps"] == 24
    text = capsys.readouterr().out
    for word in ("0.250 +- 0.050  ->  0.550 +- 0.050", "25.0% of positive", "reward.png"):
        assert word in text
    for name in ("reward.png", "grad_norm.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "summary.json").is_file()


def test_what_was_skipped_is_a_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    figures = summary.figures_of(read_run(tmp_path))
    assert "not finite" not in summary.render(figures, tmp_path)
    rows = jsonl_log.read(tmp_path / jsonl_log.METRICS)
    counts = {"nonfinite/skipped_steps": 1.0, "nonfinite/samples": 8.0}
    jsonl_log.append(tmp_path / jsonl_log.METRICS, [{**rows[-2], **counts}, {**rows[-1], **counts}])
    text = summary.render(summary.figures_of(read_run(tmp_path)), tmp_path)
    assert "2 optimizer steps skipped, 16 responses left out (nonfinite.jsonl)" in text


def test_a_directory_without_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path}: not a run: no {jsonl_log.METRICS}"
    )
    (tmp_path / jsonl_log.METRICS).touch()
    assert summary.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path}: no rollout in {jsonl_log.METRICS}"
    )
    write_run(tmp_path)
    (tmp_path / jsonl_log.OPTIMIZER_STEPS).unlink()
    assert summary.main([str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path}: no optimizer step") and printed.count("\n") == 1


def test_a_spike_is_three_times_the_running_median() -> None:
    norms = [0.1] * 10 + [0.31] + [0.1] * 5 + [0.29]
    assert spikes(norms) == [10]
    assert spikes([5.0, 0.1, 0.1]) == []


def test_the_largest_memory_of_a_gpu_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    assert "of a GPU" not in summary.render(summary.figures_of(read_run(tmp_path)), tmp_path)
    used = {"memory/device_used_gib": 51.5, "memory/peak_allocated_gib": 39.0}
    rows = [{"global_step": 13, **used}, {"global_step": 14, **dict.fromkeys(used, 1.0)}]
    jsonl_log.append(tmp_path / jsonl_log.METRICS, rows)
    assert summary.main([str(tmp_path)]) == 0
    assert "51.5 GiB of a GPU at most" in capsys.readouterr().out
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert (figures["device_used_gib"], figures["peak_allocated_gib"]) == (51.5, 39.0)


RECIPE_3B = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"


def write_timed_run(run_dir: Path, device: str, *overrides: str) -> None:
    """Three rollouts of 128 responses on one GPU; the first is slow."""
    write_run(run_dir, rollouts=3)
    rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
    for i, row in enumerate(rows):
        slow = 5.0 if i == 0 else 0.0
        row |= {
            "rollout/num_samples": 128.0, "rollout/response_length_mean": 1000.0,
            "rollout/response_length_max": 1024.0, "total_length": 1300.0,
            "progress/generated_tokens": 128_000.0 * (i + 1),
            "timing/generation": 12.5 + slow, "timing/engines_wake": 0.5,
            "timing/ppo_train": 16.0 + slow, "timing/update_old_log_probs": 1.0,
        }  # fmt: skip
    (run_dir / jsonl_log.METRICS).unlink()
    jsonl_log.append(run_dir / jsonl_log.METRICS, rows)
    config = load_config([RECIPE_3B, "hardware:1x80gb"], [f"sg.run_dir={run_dir}", *overrides])
    (run_dir / "config.yaml").write_text(config.to_yaml())
    (run_dir / "environment.json").write_text(json.dumps({"engine": {"device": device}}))


def test_the_speed_of_a_run_and_its_share_of_an_h200(tmp_path: Path) -> None:
    write_timed_run(tmp_path, "NVIDIA H200")
    figures = summary.figures_of(read_run(tmp_path))
    parameters, layers, queries = 3_085_938_688, 36, 16 * 128
    sequence = 2 * parameters * 1300 + 2 * layers * queries * 1300**2
    assert figures["update_mfu"] == pytest.approx(3 * 128 * sequence / (15.0 * 989e12))
    # 1,024 steps read 2 bytes of each weight; a token the keys and values (2 heads) of 800 others.
    cached = 128_000 * (300 + 1000 / 2) * (2 * 2 * layers * 2 * 128)
    read = 1024 * 2 * parameters + cached
    assert figures["decoding_bandwidth_share"] == pytest.approx(read / (12.0 * 4.8e12))
    text = summary.render(figures, tmp_path)
    assert "sampling 10,667 tokens/s, update 11,093 tokens/s" in text
    assert "update 21.4% of the FLOPs (MFU), decoding 17.5% of the memory bandwidth" in text
    assert "(1 x H200 141 GB)" in text


@pytest.mark.parametrize(
    ("device", "named"),
    [("cpu", "a CPU"), ("", "the device")]
    + [(name, name) for name in ("NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200")],
)
def test_a_device_without_known_peaks_has_no_share(tmp_path: Path, device: str, named: str) -> None:
    write_timed_run(tmp_path, device)
    figures = summary.figures_of(read_run(tmp_path))
    assert "update_mfu" not in figures
    text = summary.render(figures, tmp_path)
    assert "10,667 tokens/s" in text and "of the peak" not in text
    assert f"no peak known for {named}\n" in text


def test_an_asynchronous_run_has_no_speed_of_sampling(tmp_path: Path) -> None:
    """Its engines also sample during the update."""
    apart = ("vllm.enable_sleep=false", "train.async_enable=true", "sg.correction=tis")
    write_timed_run(tmp_path, "NVIDIA H200", *apart)
    text = summary.render(summary.figures_of(read_run(tmp_path)), tmp_path)
    assert "sampling -, update 11,093 tokens/s" in text
    assert "update 21.4% of the FLOPs (MFU), decoding - of" in text


@pytest.mark.parametrize("adapters", [False, True])
def test_what_the_final_folder_holds_is_said(tmp_path: Path, adapters: bool, capsys) -> None:
    """vLLM loads no adapters without their model."""
    write_run(tmp_path)
    final = tmp_path / "checkpoints" / "final"
    final.mkdir(parents=True)
    weights = "adapter_model.bin" if adapters else "model.safetensors"
    for name in ("config.json", weights, "tokenizer_config.json", "tokenizer.json"):
        (final / name).write_text("{}")
    if adapters:
        (final / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-3B"}')
    assert summary.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert ("vLLM loads it" in said) == (not adapters)
    assert ("LoRA adapters alone" in said) == adapters
    assert (f"sg-rlhf merge {final}" in said) == adapters


def test_a_run_without_a_signal_ends_its_summary_with_that(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    rows = jsonl_log.read(tmp_path / jsonl_log.METRICS)
    (tmp_path / jsonl_log.METRICS).unlink()
    flat = {"rollout/frac_reward_zero_std": 1.0, "rollout/truncated_rate": 1.0}
    jsonl_log.append(tmp_path / jsonl_log.METRICS, [row | flat for row in rows])
    text = summary.render(summary.figures_of(read_run(tmp_path)), tmp_path)
    assert text.splitlines()[-1] == (
        "nothing was learned: no group had different rewards; 100 % of the responses reached the "
        "token limit"
    )
