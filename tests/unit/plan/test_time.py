"""Seconds of a rollout: published figures, limits, and what must not move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.machine.hardware import named
from sg_rlhf.plan import time as planned
from sg_rlhf.plan.run_shape import RunShape
from sg_rlhf.plan.time import DEFAULT, PARTS, Assumptions, time_plan
from tests.unit.plan.runs import EIGHT, on_gpus, run_of

RESULTS = Path(__file__).parents[3] / "lab" / "bench" / "results"
MEASURED, COUNTED = RESULTS / "zero_stages.json", RESULTS / "update_costs.json"


def seconds(run: RunShape, gpus: int = 8, assumptions: Assumptions = DEFAULT) -> float:
    plan = time_plan(*on_gpus(run, gpus), assumptions)
    assert plan is not None
    return plan.seconds


def test_the_papers_recipe_is_near_the_audits_estimate() -> None:
    """An audit by reading had 45 s a rollout. It had 4 ms per decoding step and nothing for
    ZeRO-3's Python, which were measured since."""
    without_python = replace(DEFAULT, gathered_layer_seconds=0.0, step_seconds=0.004)
    plan = time_plan(run_of(), EIGHT, without_python)
    assert plan is not None and list(plan.parts) == list(PARTS)
    assert plan.seconds == pytest.approx(45, rel=0.25)
    assert "sampling takes most" in plan.line()


def test_an_asynchronous_run_takes_what_sampling_or_training_takes() -> None:
    run = run_of(colocated=False, samples_ahead=True)
    plan = time_plan(run, EIGHT)
    assert plan is not None
    training = plan.parts["scoring"] + plan.parts["update"] + plan.parts["optimizer"]
    rest = sum(plan.parts[part] for part in ("weight sync", "offload"))
    assert plan.seconds == pytest.approx(max(plan.parts["sampling"], training) + rest)
    assert "sampling during training" in plan.line()
    assert plan.seconds < seconds(replace(run, samples_ahead=False))


def test_flops_are_those_that_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sg_rlhf.plan import shapes

    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    }  # fmt: skip
    for tied in (True, False):
        config = {"tie_word_embeddings": tied, **sizes}
        shape = shapes.from_config("here", {"model_type": "qwen2", **config})
        model = Qwen2ForCausalLM(Qwen2Config(**config, attn_implementation="eager"))
        ids = torch.zeros((1, 128), dtype=torch.long)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids, use_cache=False)
        # torch counts attention without its mask, twice the causal part.
        causal = 2 * 3 * 64 * 128**2
        ours = planned.sequence_flops(shape, 128)
        assert ours + causal == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_decoding_one_sequence_is_bound_by_reading_the_weights() -> None:
    """A 7B model on an H100 reads 15.2 GB a token at 3.35 TB/s: 4.5 ms, where nothing is lost."""
    ideal = Assumptions(
        bandwidth=1.0, prefill_mfu=1.0, step_seconds=0.0, reduce_seconds=0.0,
        response_tokens=4096,
    )  # fmt: skip
    run = run_of("Qwen/Qwen2.5-7B-Instruct", prompts=1, group=1, engines=1)
    found = planned.sampling(run, EIGHT, ideal)
    assert found == pytest.approx(4096 * 15.2e9 / 3.35e12, rel=0.03)
    twice = replace(run, engine_tp=2)
    assert planned.sampling(twice, EIGHT, ideal) < 0.52 * found


def test_a_weight_sync_in_buckets_pays_by_bucket_and_by_byte() -> None:
    run, hardware = on_gpus(run_of(), 8)
    free = replace(DEFAULT, packed_seconds=0.0, message_seconds=0.0)
    size = 2 * run.model.parameters
    buckets = -(-size // run.sync_bucket)
    assert run.sync_bucket == 512 * 2**20 and 10 <= buckets <= 13
    whole = replace(run, sync_bucket=2 * size)
    calls = free.call_seconds * run.engines
    more = planned.weight_sync(run, hardware, free) - planned.weight_sync(whole, hardware, free)
    assert more == pytest.approx((buckets - 1) * calls)
    in_memory = 6 * size / (hardware.type.bandwidth * 1e9 * free.bandwidth)
    gathered = planned.collective(run, hardware, size, free)
    assert planned.weight_sync(whole, hardware, free) == pytest.approx(calls + in_memory + gathered)
    below_3 = planned.weight_sync(replace(whole, zero_stage=2), hardware, free)
    assert below_3 == pytest.approx(calls + in_memory)  # nothing to gather


def test_memory_of_the_host_has_no_time_and_a_cpu_no_estimate() -> None:
    assert time_plan(run_of(cpu=True), named("cpu")) is None
    assert time_plan(run_of(), named("cpu")) is None


def test_ranks_wait_by_how_samples_are_batched() -> None:
    """lab/bench/waiting_ranks.py has more of it."""
    balanced, dynamic = run_of(), run_of(train_tokens=16384)
    padded = run_of(packing=False)
    shares = [DEFAULT.working(run) for run in (balanced, dynamic, padded)]
    assert shares == [DEFAULT.balanced, DEFAULT.dynamic, DEFAULT.unbalanced]
    alone, _ = on_gpus(balanced, 1)
    assert DEFAULT.working(alone) == 1.0
    assert seconds(padded) > seconds(balanced)


def test_sampling_waits_for_the_longest_response_and_for_a_place_in_the_cache() -> None:
    steps_alone = Assumptions(
        bandwidth=1e9, prefill_mfu=1e9, step_seconds=1.0, eager_layer_seconds=0.0
    )
    run = run_of(max_new_tokens=4096, prompts=16, group=8, engines=1)
    assert planned.sampling(run, EIGHT, steps_alone) == pytest.approx(4096, rel=1e-3)
    four = replace(run, prompts=128)
    smaller = replace(EIGHT, gpu_memory_gib=69.0)  # 256 at a time
    expected = 4 * 1024 + 4096 - 1024
    assert planned.sampling(four, smaller, steps_alone) == pytest.approx(expected, rel=1e-3)


def test_python_between_layers_limits_small_micro_batches() -> None:
    """The step that an H100 measured (stage e): 63 s, of which 30 s were the update's passes."""
    run = run_of(
        "Qwen/Qwen2.5-0.5B", prompts=16, group=8, train_batch=128, train_micro=4, epochs=1,
        max_new_tokens=512, eager_engines=True, packing=False,
    )  # fmt: skip
    run, hardware = on_gpus(run, 1)
    # Without leaf modules, and 4 samples in each micro-batch.
    measured = planned.update(run, hardware, replace(DEFAULT, leaf_share=1.0))
    assert measured == pytest.approx(30, rel=0.2)
    large = planned.update(replace(run, train_micro=32), hardware, replace(DEFAULT, leaf_share=1.0))
    assert large == pytest.approx(measured / 8)
    graphs = planned.sampling(replace(run, eager_engines=False), hardware)
    assert planned.sampling(run, hardware) - graphs == pytest.approx(512 * 24 * 0.001)


@pytest.mark.parametrize("row", json.loads(MEASURED.read_text())["rows"])
def test_a_measured_micro_batch_of_3b(row: dict[str, Any]) -> None:
    """Of samples of 1,280 tokens; the head, which the measurement lacks, is a tenth."""
    samples = row["samples"]
    run = run_of(
        prompts=1, group=samples, max_new_tokens=1280, max_len=1280, epochs=1, old_share=0.0,
        zero_stage=int(row["zero_stage"]), train_micro=samples, rollout_micro=samples,
    )  # fmt: skip
    run, hardware = on_gpus(run, 1)
    part = planned.scoring if row["pass"] == "score" else planned.update
    # Measured without leaf modules.
    found = part(run, hardware, replace(DEFAULT, response_tokens=1248, leaf_share=1.0))
    assert found == pytest.approx(row["ms"] / 1000, rel=0.3)


def test_the_step_of_3b_that_an_h200_measured() -> None:
    """Stage f: 29 s, of which sampling took 13.5."""
    run = run_of(
        prompts=16, group=8, train_batch=64, train_micro=8, rollout_micro=16, max_new_tokens=1024,
        max_len=2048, zero_stage=2, adam_offload=False, trainer_sleeps=True, epochs=1,
    )  # fmt: skip
    run, _ = on_gpus(run, 1)
    plan = time_plan(run, named("1xh200"), replace(DEFAULT, response_tokens=1024))
    assert plan is not None
    assert plan.seconds == pytest.approx(29.4, rel=0.15)
    assert plan.parts["sampling"] == pytest.approx(13.5, rel=0.15)


def test_packed_micro_batches_are_filled_to_the_tokens_of_the_plan() -> None:
    """256 samples of 1,365 tokens on 8 ranks, 20,480 in a micro-batch: 3 for an optimizer step."""
    run, _ = on_gpus(run_of(train_micro=4), 8)
    assert planned.training_micro_batches(run) == 6
    assert planned.training_micro_batches(replace(run, packing=False)) == 16
    assert planned.training_micro_batches(replace(run, train_micro=8)) == 4
    alone, _ = on_gpus(run, 1)
    assert planned.training_micro_batches(alone) == 2 * -(-256 * 1365 // 20_480)


def test_host_sums_cross_pcie_in_each_micro_batch_only_where_deepspeed_keeps_them_there() -> None:
    """As lab/bench/update_costs.py counts them."""
    rows = json.loads(COUNTED.read_text())["transfers"]
    assert len(rows) == 4
    for row in rows:
        run = run_of(
            zero_stage=row["zero_stage"], adam_offload=True,
            grad_bytes=4 if row["sums"] == "fp32" else 2,
        )  # fmt: skip
        # The first micro-batch under ZeRO-2 has nothing to bring back.
        most = planned.gradient_transfers(run) * row["micro_batches"]
        assert 0 <= most - row["while_summing"] <= 1
        assert planned.gradient_transfers(replace(run, adam_offload=False)) == 0
        run, hardware = on_gpus(run, 1)
        more = replace(run, train_micro=1, packing=False)
        fewer = replace(more, train_micro=4)
        crossing = planned.update(more, hardware) - planned.update(
            replace(more, adam_offload=False), hardware
        )
        crossing_of_fewer = planned.update(fewer, hardware) - planned.update(
            replace(fewer, adam_offload=False), hardware
        )
        assert crossing == pytest.approx(4 * crossing_of_fewer)
        assert bool(crossing) == bool(row["while_summing"])


def test_the_limit_is_the_data_sheets_and_no_part_is_below_it() -> None:
    """Recomputed by hand: 128 responses of 1,024 tokens of 3B on one H200."""
    run = run_of(
        prompts=16, group=8, train_batch=64, train_micro=8, rollout_micro=16, max_new_tokens=1024,
        max_len=2048, zero_stage=2, adam_offload=True, epochs=1,
    )  # fmt: skip
    run, _ = on_gpus(run, 1)
    plan = time_plan(run, named("1xh200"), replace(DEFAULT, response_tokens=1024))
    assert plan is not None
    # 1,024 steps read the weights, and each token 36,864 bytes for each one before it.
    moved = 1024 * 6.17e9 + 128 * 1024 * (341.3 + 512) * 36_864
    prefill = 128 * planned.sequence_flops(run.model, 341.3)
    expected = moved / 4.8e12 + prefill / 989e12
    assert plan.limits["sampling"] == pytest.approx(expected, rel=0.02)
    flops = 3 * 128 * planned.sequence_flops(run.model, 1024 + 341.3)
    assert plan.limits["update"] == pytest.approx(flops / 989e12, rel=0.01)
    assert all(plan.parts[part] >= limit for part, limit in plan.limits.items())
    assert "update" in plan.ratios() and "by FLOPs" in plan.ratios()


RUNS = st.builds(
    run_of,
    st.sampled_from(
        [
            "Qwen/Qwen2.5-3B-Instruct",
            "Qwen/Qwen2.5-7B-Instruct",
            "Qwen/Qwen2.5-32B-Instruct",
            "meta-llama/Llama-3.1-70B-Instruct",
        ]
    ),
    engine_tp=st.sampled_from([1, 4, 8]),
    adam_offload=st.booleans(),
    checkpointing=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(RUNS, st.sampled_from([8, 16, 32]))
def test_properties(run: RunShape, gpus: int) -> None:
    before = seconds(run, gpus)
    assert seconds(replace(run, reference=False), gpus) < before
    assert seconds(replace(run, epochs=2), gpus) > before
    longer = replace(DEFAULT, response_tokens=2000)
    assert seconds(run, gpus, longer) > before
    for field in ("mfu", "bandwidth", "link"):
        better = replace(DEFAULT, **{field: 0.9})
        assert seconds(run, gpus, better) <= before
    assert seconds(run, gpus, replace(DEFAULT, gathered_layer_seconds=1.0)) > before
    many, few = (time_plan(*on_gpus(run, count)) for count in (2 * gpus, gpus))
    assert many is not None and few is not None
    assert many.parts["update"] < few.parts["update"]
    assert many.parts["weight sync"] > few.parts["weight sync"]


def test_what_is_assumed_and_what_is_not_included_is_said() -> None:
    found = time_plan(run_of(), EIGHT)
    assert found is not None
    lines = "\n".join(found.lines())
    assert "assumed: responses of 1024 tokens on average, the longest 4096" in lines
    assert "not included: start, compilation" in lines
    assert str(found.as_json()["not_included"]).startswith("start, compilation")
