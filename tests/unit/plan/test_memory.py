"""Memory plans: DeepSpeed's own estimators, what autograd keeps, and what must not move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sg_rlhf.config import load_config
from sg_rlhf.machine.hardware import named
from sg_rlhf.plan import gpu_memory as gpu
from sg_rlhf.plan import host_memory as host
from sg_rlhf.plan import shapes
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.memory import MemoryPlan
from sg_rlhf.plan.phases import largest, moments
from sg_rlhf.plan.run_shape import RunShape, run_shape
from tests.unit.plan.runs import EIGHT, RECIPE, on_gpus, run_of

MODELS = sorted(shapes.table())


@pytest.fixture(scope="module")
def estimators() -> Any:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    return (
        stage3.estimate_zero3_model_states_mem_needs,
        stage_1_and_2.estimate_zero2_model_states_mem_needs,
    )


@pytest.mark.parametrize("gpus", [1, 2, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_states_are_those_of_deepspeeds_estimators(model: str, gpus: int, estimators: Any) -> None:
    run, hardware = on_gpus(run_of(model), gpus)
    count, layer = run.model.parameters, run.model.head_parameters
    nodes, of_node = hardware.nodes, hardware.gpus_per_node
    zero3, zero2 = estimators
    # Of ZeRO-2: weights 2, gradients 2 and in float32 4, master 4, moments 8. Of ZeRO-3 they leave
    # out the 16-bit gradients, which stage3.py holds as well (grad_partitions_flat_buffer).
    for stage in (3, 2):
        staged = replace(run, zero_stage=stage)
        ours = gpu.policy(staged) + gpu.optimizer(staged) + gpu.gradients(staged)
        own = 4 * count / gpus
        if stage == 3:
            _, theirs, largest_layer = zero3(
                count, layer, of_node, nodes, cpu_offload=False, cpu_offload_params=False
            )
            shard = gpu.gradients(staged)
            assert ours + own - shard == pytest.approx(theirs - largest_layer, rel=1e-6)
            if gpus > 1:  # the largest layer's weights and gradient, both whole
                assert gpu.gathered(run) + gpu.largest_gradient(run) >= largest_layer
        else:
            _, theirs = zero2(count, of_node, nodes, cpu_offload=False)
            assert ours + own == pytest.approx(theirs, rel=1e-6)
        if own <= 4 * gpu.SUB_GROUP:  # theirs has all float32 gradients at once
            assert gpu.optimizer_step(staged) == pytest.approx(1.5 * own)


@pytest.mark.parametrize("gpus", [1, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_offloaded_states_are_within_deepspeeds_own_bounds(
    model: str, gpus: int, estimators: Any
) -> None:
    run, hardware = on_gpus(run_of(model, adam_offload=True), gpus)
    count = run.model.parameters
    theirs, on_gpu, layer = estimators[0](
        count, run.model.head_parameters, hardware.gpus_per_node, hardware.nodes,
        cpu_offload=True, cpu_offload_params=False,
    )  # fmt: skip
    # 16 bytes a parameter, times 1.5 for buffers.
    assert theirs / 1.5 <= host.optimizer_states(run) <= theirs
    assert gpu.policy(run) == pytest.approx(on_gpu - layer, rel=1e-6)
    assert gpu.optimizer(run) == gpu.gradients(run) == 0


# -- what autograd keeps ------------------------------------------------------------------------

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def _kept(config: Any, model_class: Any, *, checkpointing: bool) -> float:
    """Bytes per token that a forward pass without the head keeps, parameters aside."""
    model = model_class(config).to(torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    ids = torch.randint(0, config.vocab_size, (2, 64))
    positions = torch.arange(64).expand(2, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(ids, position_ids=positions, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in seen.values()) / ids.numel()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_a_layer_are_what_autograd_keeps(family: str, kv_heads: int) -> None:
    config_class, model_class = FAMILIES[family]
    sizes = {
        "vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }  # fmt: skip
    kept = {}
    for checkpointing in (False, True):
        of = [
            _kept(
                config_class(num_hidden_layers=n, **sizes), model_class, checkpointing=checkpointing
            )
            for n in (2, 4)
        ]
        kept[checkpointing] = (of[1] - of[0]) / 2
    shape = shapes.from_config("here", {"model_type": family, "num_hidden_layers": 2, **sizes})
    assert kept[False] == shape.activation_bytes
    assert kept[True] == 2 * shape.hidden_size


def test_a_float32_run_has_float32_engines() -> None:
    bf16, fp32 = run_of(weight_bytes=2), run_of(weight_bytes=4)
    for of in (gpu.engine_weights, gpu.kv_bytes_per_token):
        assert of(fp32) == 2 * of(bf16)
    assert 1.9 < host.sleep_backup(fp32) / host.sleep_backup(bf16) < 2.1


# -- against the audit by reading ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "peak"),
    [("Qwen/Qwen2.5-3B-Instruct", 54), ("Qwen/Qwen2.5-7B-Instruct-1M", 68)],
)
def test_peak_on_eight_h100s_is_that_of_the_audit(model: str, peak: float) -> None:
    """Added up by hand from upstream's source, before there were formulas."""
    plan = MemoryPlan(run_of(model, logits="full"), EIGHT)
    assert plan.peak_phase == "update" and plan.fits
    assert plan.peak_gib == pytest.approx(peak, rel=0.1)


def test_lines_of_the_audit() -> None:
    """GiB of a GPU: shards 1.4 and 3.5, fp32 states 4.3 and 10.6, logits 34.8 of both."""
    audit = {"3B-Instruct": (1.4, 4.3), "7B-Instruct-1M": (3.5, 10.6)}
    for name, (shards, states) in audit.items():
        run = run_of(f"Qwen/Qwen2.5-{name}", logits="full")
        assert (gpu.policy(run) + gpu.reference(run)) / GIB == pytest.approx(shards, abs=0.06)
        assert gpu.optimizer(run) / GIB == pytest.approx(states, abs=0.06)
        assert gpu.logits_of_update(run) / GIB == pytest.approx(34.8, abs=0.1)


def test_zero_2_needs_what_an_h200_measured() -> None:
    """Stage f: 63.3 GiB of the policy's tensors."""
    run = run_of(
        zero_stage=2, adam_offload=False, nodes=1, gpus_per_node=1, engines=1, train_micro=8,
        max_len=2048,
    )  # fmt: skip
    assert MemoryPlan(run, named("1xh200")).policy_tensors_gib("update") == pytest.approx(
        63.3, abs=0.3
    )


# -- properties ---------------------------------------------------------------------------------

RUNS = st.builds(
    run_of,
    st.sampled_from(MODELS),
    train_micro=st.sampled_from([1, 2, 4, 8]),
    rollout_micro=st.sampled_from([1, 2, 4, 8, 16]),
    max_len=st.integers(256, 32_768),
    zero_stage=st.sampled_from([2, 3]),
    adam_offload=st.booleans(),
    trainer_sleeps=st.booleans(),
    engines_sleep=st.booleans(),
    checkpointing=st.booleans(),
    temperature=st.sampled_from([0.7, 1.0]),
    logits=st.sampled_from(["full", "fused"]),
    reference=st.booleans(),
)


def _totals(run: RunShape, gpus: int = 8) -> dict[str, float]:
    changed, hardware = on_gpus(run, gpus)
    return {phase: moment.total for phase, moment in largest(moments(changed, hardware)).items()}


@settings(max_examples=60, deadline=None)
@given(RUNS)
def test_more_tokens_never_take_less(run: RunShape) -> None:
    before = _totals(run)
    for more in (
        replace(run, train_micro=2 * run.train_micro, rollout_micro=2 * run.rollout_micro),
        replace(run, max_len=run.max_len + 512),
        replace(run, checkpointing=False) if run.checkpointing else run,
        replace(run, reference=True),
        replace(run, logits="full") if run.train_pass_tokens >= 2048 else run,
    ):
        after = _totals(more)
        assert all(after[phase] >= before[phase] for phase in before)
    assert sum(before.values()) < sum(_totals(replace(run, max_len=2 * run.max_len)).values())


@settings(max_examples=60, deadline=None)
@given(RUNS, st.sampled_from([4, 8, 16, 64]))
def test_half_the_ranks_never_take_less_of_a_gpu(run: RunShape, gpus: int) -> None:
    many, few = _totals(run, gpus), _totals(run, gpus // 2)
    assert all(few[phase] >= many[phase] for phase in many)
    assert many["sample"] > 0


@settings(max_examples=40, deadline=None)
@given(RUNS)
def test_the_named_micro_batches_are_the_largest_that_fit(run: RunShape) -> None:
    plan = MemoryPlan(run, EIGHT)
    room = EIGHT.gpu_memory_gib * GIB
    for field, size, phase, batch in (
        ("train_micro", plan.train_micro, "update", run.train_batch),
        ("rollout_micro", plan.rollout_micro, "score", run.samples),
    ):
        fits = [
            micro
            for micro in range(1, batch // 8 + 1)
            if batch // 8 % micro == 0 and _totals(replace(run, **{field: micro}))[phase] <= room
        ]
        assert size == max(fits, default=0)


# -- what a user reads --------------------------------------------------------------------------


def test_forty_gigabytes_are_too_few_and_the_plan_says_by_how_much() -> None:
    run = run_of(logits="full")
    plan = MemoryPlan(run, named("8x40gb"))
    assert not plan.fits
    update = next(line for line in plan.problems if line.startswith("update"))
    over = plan.moments["update"].total / GIB - named("8x40gb").gpu_memory_gib
    assert f"{over:.1f} GiB too much; train.micro_batch_size=2 is the largest" in update
    small = replace(run, train_micro=2, rollout_micro=4)
    assert MemoryPlan(small, named("8x40gb")).fits
    assert "does not fit:" in plan.lines()
    assert any(line.startswith("fits: update") for line in MemoryPlan(run, EIGHT).lines())


def test_what_is_missing_is_named() -> None:
    few = MemoryPlan(run_of(), named("1x80gb"))
    assert "GPUs: 8, and there are 1" in few.problems
    host_poor = replace(EIGHT, host_memory_gib=128.0, disk_free_gb=100.0)
    problems = "\n".join(MemoryPlan(run_of(), host_poor).problems)
    assert "host memory: " in problems and "disk: " in problems
    big = MemoryPlan(run_of("Qwen/Qwen2.5-72B-Instruct"), EIGHT)
    assert any("vllm.tensor_parallel_size" in line for line in big.problems)


def test_engines_of_an_asynchronous_run_have_gpus_of_their_own() -> None:
    asynchronous = ["train.async_enable=true", "vllm.enable_sleep=false"]
    run = run_shape(load_config(RECIPE, asynchronous))
    assert run is not None and run.samples_ahead and not run.colocated and run.reference_beside
    problems = MemoryPlan(run, EIGHT).problems
    assert problems == (f"GPUs: {run.ranks + run.engines * run.engine_tp}, and there are 8",)
    assert not any("vLLM" in name for name in MemoryPlan(run, EIGHT).moments["update"].lines)
    waits = run_shape(load_config(RECIPE, [*asynchronous, "sg.max_staleness=0"]))
    assert waits is not None and not waits.samples_ahead


def test_a_fused_head_makes_room() -> None:
    full, fused = (
        MemoryPlan(run_of("Qwen/Qwen2.5-7B-Instruct-1M", logits=logits), EIGHT)
        for logits in ("full", "fused")
    )
    assert full.moments["update"].total - fused.moments["update"].total > 25 * GIB
    assert fused.train_micro > full.train_micro


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    assert [host.pinned(size) for size in (1, 2**20, 2**20 + 1, 3e9)] == [1, 2**20, 2**21, 2**32]


def test_a_weight_sync_holds_a_bucket_and_under_zero_3_what_was_gathered_for_it() -> None:
    """Qwen2.5-3B's embedding of 622 MB is larger than a bucket of 512 MiB, and has its own."""
    run = replace(run_of(), zero_stage=2)
    largest = 2.0 * run.model.head_parameters
    assert largest > 512 * 2**20
    assert gpu.sync_buffers(run) == largest
    assert gpu.sync_buffers(replace(run, zero_stage=3)) == 2 * largest
    assert gpu.sync_buffers(replace(run, sync_bucket=2 * 2**30)) == 2 * 2**30
    assert gpu.sync_buffers(replace(run, sync_bucket=2**50)) == 2.0 * run.model.parameters
