"""The real pipeline on the CPU: Ray, vLLM, DeepSpeed ZeRO-3, a real reward, real files."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sg_rlhf.config import load_config
from sg_rlhf.plan import host_memory
from sg_rlhf.plan.of_recipe import plan_of
from sg_rlhf.plan.run_shape import run_shape
from sg_rlhf.run_dir import jsonl_log
from sg_rlhf.run_dir.final_model import final_checkpoint
from sg_rlhf.run_dir.timing_keys import EXTRA, TOTAL, exclusive_seconds
from sg_rlhf.train import main
from tests.integration.conftest import (
    ROOT,
    Data,
    Pipeline,
    command,
    environment,
    is_alive,
    run_ranks,
    train,
)
from tests.unit.docs.metrics_page import is_on_the_page, names

pytestmark = pytest.mark.integration


def test_an_interrupted_run_resumes_and_leaves_no_process(
    pipeline: Pipeline, trained: Path
) -> None:
    assert pipeline.status == 130, pipeline.output
    assert (
        "interrupted; the same command resumes from the last checkpoint, global_step"
        in pipeline.output
    )
    assert pipeline.children and not pipeline.survivors
    assert f"resuming from {pipeline.checkpoint}" in pipeline.resumed.stdout
    assert "2 of 18 prompts are left out of each epoch" in pipeline.resumed.stdout
    # What was there before the kill is there after it, and the lost evaluation was made.
    done = int(pipeline.checkpoint.removeprefix("global_step"))
    assert jsonl_log.read(trained / jsonl_log.METRICS)[:done] == pipeline.metrics[:done]
    # The first sync after a rollout is checked, and no other.
    checked = ["sync/log_prob_diff_mean" in r for r in jsonl_log.read(trained / jsonl_log.METRICS)]
    assert checked == [True, False, False, False]


def test_the_terminal_named_what_it_waited_for(pipeline: Pipeline) -> None:
    for text in (
        "] starting Ray ...", "] importing PyTorch, vLLM and OpenRLHF ...",
        "] rollout engine: starting vLLM and loading the model ...",
        "] trainer: loading the model into DeepSpeed ...", "] controller: evaluating ...",
    ):  # fmt: skip
        assert text in pipeline.output


def test_a_run_without_a_gpu_compiles_nothing(pipeline: Pipeline, trained: Path) -> None:
    logs = "".join(path.read_text() for path in (trained / "logs").iterdir() if path.is_file())
    assert "deepspeed_shm_comm" not in logs and "Building extension module" not in logs
    assert "Loading extension module" not in logs


def test_the_run_directory_holds_every_step(trained: Path) -> None:
    metrics = jsonl_log.read(trained / jsonl_log.METRICS)
    steps = jsonl_log.read(trained / jsonl_log.OPTIMIZER_STEPS)
    assert [row["global_step"] for row in metrics] == [1, 2, 3, 4]
    # 4 prompts x 4 responses in steps of 8 samples: two optimizer steps per rollout
    assert [row["optimizer_step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["global_step"] for row in steps] == [1, 1, 2, 2, 3, 3, 4, 4]
    for row in steps:
        assert row["micro_batches"] == 2
        assert math.isfinite(row["actor_grad_norm"]) and math.isfinite(row["policy_loss"])
        assert 1.0 <= row["sg/weight_mean"] <= 1.2 + 1e-6  # float32
        assert row["sg/zeroed_pos_at_ratio1"] == 0.0
        assert row["sg/n_tokens"] > 0
    for row in metrics:
        norms = [s["actor_grad_norm"] for s in steps if s["global_step"] == row["global_step"]]
        assert row["actor_grad_norm_max"] == max(norms)
        assert 0.0 <= row["rollout/accuracy"] <= 1.0
        assert -3.0 <= row["rollout/reward_mean"] <= 3.0
    samples = jsonl_log.read(trained / jsonl_log.SAMPLES)
    assert len(samples) == 16
    for sample in samples:
        assert len(sample["tokens"]) == len(sample["log_probs"]) > 0
        assert all(value <= 0 for value in sample["log_probs"]) and "sequence" not in sample
        assert sample["reward"] in (3.0, -0.5, -1.0, -3.0)
    assert "sg/weight_mean" in json.dumps(metrics) and (trained / "config.yaml").is_file()
    assert list((trained / "tensorboard").rglob("events.out.tfevents.*"))
    engine = json.loads((trained / "environment.json").read_text())["engine"]
    assert engine["vllm"] and engine["attention"] and engine["enforce_eager"] is True
    assert engine["binaries"] and engine["prefix_caching"] is False


def test_every_name_in_the_run_directory_is_on_the_metrics_page(trained: Path) -> None:
    for name, kind in (
        (jsonl_log.METRICS, "metric"), (jsonl_log.OPTIMIZER_STEPS, "metric"),
        (jsonl_log.EVALUATIONS, "metric"), (jsonl_log.SAMPLES, "key"),
    ):  # fmt: skip
        lines = (trained / name).read_text().splitlines()
        keys = {key for line in lines for key in json.loads(line)} - {"global_step"}
        assert not [key for key in keys if not is_on_the_page(key, kind)], name
    known = {name.split("/")[0] for name in names("file")}
    assert not {path.name for path in trained.iterdir()} - known


def test_tokens_so_far_go_on_after_the_interruption(trained: Path) -> None:
    rows = jsonl_log.read(trained / jsonl_log.METRICS)
    in_rollouts = [row["rollout/response_length_mean"] * row["rollout/num_samples"] for row in rows]
    assert [row["progress/generated_tokens"] for row in rows] == pytest.approx(
        list(itertools.accumulate(in_rollouts))
    )
    assert [row["progress/trained_tokens"] for row in rows] == list(
        itertools.accumulate(row["sg/n_tokens"] for row in rows)
    )
    for row, tokens in zip(rows, in_rollouts, strict=True):
        seconds = row["timing/step_total"]
        assert row["perf/tokens_per_second"] == pytest.approx(tokens / seconds)
        assert 0.0 <= row["rollout/frac_reward_zero_std"] <= 1.0


def test_the_parts_of_a_rollout_are_its_wall_clock(trained: Path) -> None:
    rows = jsonl_log.read(trained / jsonl_log.METRICS)
    for row in rows:
        parts = exclusive_seconds(row)
        assert sum(parts.values()) == pytest.approx(row["timing/step_total"])
        assert parts["other"] < 0.2 * row["timing/step_total"], parts  # .1 % on a quiet machine
        for part in ("generation", "make_experience", "update_forward", "update_backward"):
            assert parts[part] > 0, part
        assert row["timing/reference_log_probs"] == 0 <= row["timing/update_reference_log_probs"]
        assert row["timing/broadcast"] > 0
        # Two optimizer steps a rollout: half of the samples need a pass, which their rank makes.
        assert row["timing/old_log_probs"] == 0 < row["timing/update_old_log_probs"]
        # The rest is small, but on a busy machine nothing says how small.
        named = sum(value for key, value in row.items() if key.startswith("timing/update_"))
        assert 0 < named < row["timing/ppo_train"]
    # Nothing is left out: from row to row there are a rollout, an evaluation and a checkpoint.
    for before, row in itertools.pairwise(rows[:2]):  # of one process, not yet interrupted
        whole = sum(row[f"timing/{part}"] for part in (TOTAL, *EXTRA))
        assert whole == pytest.approx(row["time"] - before["time"], rel=0.02, abs=1.0)
        assert row["timing/checkpoint"] > 0
    assert rows[0]["timing/evaluation"] > 0 and rows[3]["timing/evaluation"] == 0
    for row in rows:
        assert (row["timing/sync_check"] > 0) == ("sync/log_prob_diff_mean" in row)


def test_evaluation_is_accuracy_before_and_after(trained: Path) -> None:
    rows = jsonl_log.read(trained / jsonl_log.EVALUATIONS)
    assert [row["global_step"] for row in rows] == [0, 2, 4]
    for row in rows:
        assert 0.0 <= row["eval_accuracy"] <= 1.0 and row["eval_num_prompts"] == 8
        assert {"eval_kk_2ppl_accuracy", "eval_kk_3ppl_accuracy"} <= row.keys()


def test_engine_and_trainer_are_one_policy_after_every_sync(trained: Path) -> None:
    rows = jsonl_log.read(trained / jsonl_log.METRICS)
    assert rows[0]["sync/log_prob_diff_mean"] < 0.003 and rows[0]["sync/log_prob_diff_max"] < 2.0
    # Rounding alone is .002. An output head left behind by the syncs: .007 after the second. One
    # unlikely token of a short rollout may differ by .96 (seen twice in 257 checks) and give .005.
    assert sum(row["sg/mismatch_abs_mean"] for row in rows) / len(rows) < 0.003


def test_engine_and_trainer_agree_on_every_token_in_float32(trained: Path) -> None:
    """To 1e-6 on average, over more than a thousand of them; a log-prob of an unlikely token has
    fewer digits behind the point, and differed by 4.7e-5 at most in 24,000 (docs/method.md)."""
    rows = jsonl_log.read(trained / jsonl_log.METRICS)
    assert all(row["sg/n_mismatch_tokens"] == row["sg/n_tokens"] for row in rows)
    assert sum(row["sg/n_mismatch_tokens"] for row in rows) > 1000
    assert all(row["sg/mismatch_abs_mean"] < 1e-6 for row in rows)
    assert max(row["sg/mismatch_max"] for row in rows) < 1e-4
    assert all(row["sg/mismatch_kl_k3"] < 1e-10 for row in rows)
    assert all(row["sg/mismatch_ess"] > 1 - 1e-9 for row in rows)
    weight = [row["sg/mismatch_weight_max"] for row in rows]
    assert max(weight) < 3.4e-5  # the bound of docs/method.md


def test_the_engine_runs_the_model_in_its_own_process(trained: Path) -> None:
    logs = "".join(path.read_text() for path in (trained / "logs").iterdir() if path.is_file())
    assert "(EngineCore pid=" in logs and "(Worker pid=" not in logs


def test_the_checkpoint_is_a_plain_hugging_face_folder(trained: Path) -> None:
    folder = trained / "checkpoints" / "final"
    before = AutoModelForCausalLM.from_pretrained(ROOT / "sg_rlhf" / "tiny" / "kk_tiny")
    after = AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    changed = [
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert len(changed) > 10
    assert all(torch.isfinite(p).all() for p in after.parameters())


def test_only_the_last_checkpoints_are_kept_in_both_forms(trained: Path) -> None:
    checkpoints = trained / "checkpoints" / "deepspeed"
    kept = {path.name for path in (checkpoints / "_actor").iterdir() if path.is_dir()}
    assert kept == {"global_step3", "global_step4"}
    plain = {path.name for path in checkpoints.iterdir() if path.name.endswith("_hf")}
    assert plain == {f"{tag}_hf" for tag in kept}
    assert all((checkpoints / name / "model.safetensors").is_file() for name in plain)


@pytest.mark.full
def test_a_failing_reward_stops_the_run_with_the_sample(data: Data, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n    raise KeyError('no gold for this one')\n"
    )
    result = train(tmp_path / "run", data, f"reward.remote_url={reward}")
    assert result.returncode == 1, result.stdout + result.stderr
    (line,) = [x for x in result.stderr.splitlines() if x.startswith("stopped:")]
    assert "the reward function failed on a rollout (KeyError: 'no gold for this one')" in line
    assert "is a kn" in line and "the sample ends:" in line


@pytest.mark.full
def test_two_zero3_ranks_two_engines_grpo_and_several_eval_sets(data: Data, tmp_path: Path) -> None:
    run_dir, test_set = tmp_path / "two", str(data.folder / "test.jsonl")
    recipe = [
        "actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "vllm.num_engines=2",
        "actor.policy_loss_type=ppo", "algo.kl.estimator=k3", "data.max_samples=4",
        "train.micro_batch_size=2", "eval.dataset=null",
    ]  # fmt: skip
    result = train(
        run_dir, data, *recipe, "sg.eval_at_start=false",
        "sg.eval_sets=" + json.dumps([
            {"name": "greedy", "dataset": test_set, "temperature": 0.0},
            {"name": "avg3", "dataset": test_set, "temperature": 1.0, "n_samples_per_prompt": 3,
             "max_new_tokens": 16, "limit": 4},
        ]),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = jsonl_log.read(run_dir / jsonl_log.METRICS)
    assert row["sync/log_prob_diff_mean"] < 0.05
    assert 0 <= row["batches/waiting_share"] < 0.2  # contiguous pieces of 16 samples: up to 0.5
    for step in jsonl_log.read(run_dir / jsonl_log.OPTIMIZER_STEPS):
        assert step["sg/weight_mean"] == 1.0 and math.isfinite(step["actor_grad_norm"])
        # A rank has four samples, and together they have fewer tokens than two of the longest.
        assert step["micro_batches"] == 1
    (evaluated,) = jsonl_log.read(run_dir / jsonl_log.EVALUATIONS)
    assert evaluated["eval_greedy_num_prompts"] == 8 and evaluated["eval_avg3_num_prompts"] == 4
    assert evaluated["eval_avg3_response_length_mean"] <= 16
    assert "eval_avg3_pass3" in evaluated and "eval_greedy_pass1" in evaluated
    mean = (evaluated["eval_greedy_accuracy"] + evaluated["eval_avg3_accuracy"]) / 2
    assert evaluated["eval_accuracy"] == pytest.approx(mean)


def test_usage_errors_exit_2_before_anything_starts(
    data: Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    for overrides, words in (
        (
            ["sg.weighting.form=quotient", "sg.weighting.upper=1.4"],
            ["plain GRPO", "allow_constant"],
        ),
        (["data.prompt_dataset=gone.jsonl"], ["data.prompt_dataset=gone.jsonl", "no such file"]),
        (["ds.load_in_4bit=true"], ["ds.load_in_4bit", "without CUDA"]),
        (
            ["rollout.n_samples_per_prompt=1", "train.batch_size=4", "train.micro_batch_size=4"],
            ["n_samples_per_prompt=1", "2 or more"],
        ),
        (["rollout.batch_size=5"], ["5 * 4 = 20", "not divisible by train.batch_size=8"]),
        (["actor.adam.lrr=1"], ["did you mean actor.adam.lr?"]),
    ):
        run_dir = tmp_path / "never"
        assert main(command(run_dir, data, *overrides)[3:]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error:")
        for word in words:
            assert word in line, line
        assert not run_dir.exists()


def test_zero3_ranks_load_the_checkpoint_undamaged() -> None:
    """On two real gloo ranks, where DeepSpeed 0.19.6 gathered parameters in a race."""
    for output in run_ranks("load_on_two_ranks.py", 2):
        assert output.splitlines()[-1] == "5 loads, 0 damaged parameters, rotary float32"


def test_a_process_stays_below_the_plans_host_memory(trained: Path) -> None:
    planned = plan_of(load_config(trained / "config.yaml"))
    assert planned is not None and planned.memory.fits
    for row in jsonl_log.read(trained / jsonl_log.METRICS):
        assert 0.2 < row["memory/peak_rss_gib"] < planned.memory.host_gib


def test_folders_take_what_the_plan_says(trained: Path) -> None:
    """ZeRO-3 on one rank: 12 bytes a parameter to resume, 2 to evaluate; metadata beside them."""
    run = run_shape(load_config(trained / "config.yaml"))
    assert run is not None
    actor = trained / "checkpoints" / "deepspeed" / "_actor"
    states = actor / (actor / "latest").read_text().strip()
    for folder, planned in (
        (states, host_memory.deepspeed_folder(run)),
        (final_checkpoint(trained), host_memory.hugging_face_folder(run)),
    ):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert planned <= size <= planned + 100_000
        assert size == pytest.approx(planned, rel=0.05)


@pytest.mark.full
def test_a_terminated_run_saves_what_it_has(tmp_path: Path, data: Data) -> None:
    """SIGTERM in the middle of a rollout, with no checkpoint planned: one after it, status 143."""
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        # Many more rollouts than are made before the signal is heeded.
        command(
            run_dir, data, "ckpt.save_steps=100", "sg.eval_at_start=false", "data.max_samples=32"
        ),
        cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 1800
    while not jsonl_log.read(run_dir / jsonl_log.METRICS) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    children = {c.pid for c in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=1800)[0]
    assert process.returncode == 143, output
    done = jsonl_log.read(run_dir / jsonl_log.METRICS)[-1]["global_step"]
    latest = run_dir / "checkpoints" / "deepspeed" / "_actor" / "latest"
    assert latest.read_text().strip() == f"global_step{done}"
    assert output.splitlines()[-1] == (
        f"terminated by SIGTERM, after rollout {done}; the same command resumes from the last "
        f"checkpoint, global_step{done}"
    )
    assert children and not [pid for pid in children if is_alive(pid)]
