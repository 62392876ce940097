"""The parts of the stages that need no GPU to be wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from sg_rlhf.config import load_config
from sg_rlhf.plan.shapes import from_config, table
from tests.gpu import (
    algo,
    ipc,
    log_prob_head,
    packed_attention,
    random_qwen2,
    recipe_3b,
    training_run,
    zero3,
)
from tests.gpu.measure import Cost, costs, largest, relative
from tests.gpu.result import Job, Record, StageSkippedError
from tests.gpu.reward_by_hash import reward_func


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "record.json")


def statuses(record: Record) -> list[str]:
    return [check["status"] for check in record.checks]


def test_a_wrong_gradient_is_found(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of stage a, with a device that is wrong in one token of a hundred."""
    original, calls = algo.gradient, [0]

    def wrong_every_other_time(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        found = original(loss, leaf)
        if calls[0] % 2 == 0:
            found = found.clone()
            found.flatten()[::100] *= 1.001
        return found

    job = Job("cpu", True, None, Path())
    algo.compare_losses(record, job, torch.float32, 8, 50)
    assert statuses(record) == ["passed"] * 3
    monkeypatch.setattr(algo, "gradient", wrong_every_other_time)
    algo.compare_losses(record, job, torch.float32, 8, 50)
    assert statuses(record)[3] == "failed"


def test_every_weighting_meets_every_objective() -> None:
    found = list(algo.pairs())
    assert {weighting.name for _, weighting, _ in found} == set(algo.WEIGHTINGS)
    assert {objective for *_, objective in found} == set(algo.OBJECTIVES)


def test_exact_attention_is_causal_attention() -> None:
    q, k, v = (
        x.float() for x in packed_attention.inputs(13, (4, 2, 8), Job("cpu", True, None, Path()))
    )
    lengths = [5, 1, 7]
    expected = packed_attention.alone(q, k, v, lengths)
    assert relative(packed_attention.exact(q, k, v, lengths), expected) < 1e-6
    # As one sample it is another function.
    assert relative(packed_attention.exact(q, k, v, [13]), expected) > 0.1


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct"])
def test_tensors_of_a_model_are_those_of_transformers(model: str) -> None:
    shape = from_config(model, table()[model])
    found = ipc.tensors_of(shape)
    config = Qwen2Config(
        hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size, vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device("meta"):
        parameters = dict(Qwen2ForCausalLM(config).named_parameters())
    assert found == {name: tuple(p.shape) for name, p in parameters.items()}
    assert len(found) == shape.tensors


def test_a_checksum_sees_a_bit_and_a_place() -> None:
    x = torch.arange(1000).to(torch.bfloat16)  # drawn, two of them may be equal
    swapped, flipped = x.clone(), x.clone()
    swapped[[3, 4]] = x[[4, 3]]
    flipped.view(torch.int16)[7] ^= 1
    found = {ipc.checksum(each) for each in (x, swapped, flipped)}
    assert len(found) == 3 and ipc.checksum(x.clone()) == ipc.checksum(x)


def test_a_checksum_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, dtype=torch.bfloat16)
    whole = ipc.checksum(x)
    monkeypatch.setattr(ipc, "CHUNK", 7)
    assert ipc.checksum(x) == whole


def test_an_engine_that_fails_is_no_hang() -> None:
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(
        target=ipc.engine, args=({"w": (2, 2)}, "cpu", inbox, outbox), daemon=True
    )
    child.start()
    try:
        assert ipc.answer(outbox, child)[0] == "ready"
        inbox.put(("another name", torch.zeros(2, 2)))
        with pytest.raises(RuntimeError, match="in the engine's process: KeyError"):
            ipc.answer(outbox, child)
        child.join(30.0)
        with pytest.raises(RuntimeError, match="is silent"):
            ipc.answer(outbox, child)
    finally:
        child.kill()


def test_the_random_model_has_a_text_for_every_token(tmp_path: Path) -> None:
    random_qwen2.write(tmp_path, small=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert len(tokenizer) == model.config.vocab_size == random_qwen2.SMALL["vocab_size"]
    assert all(tokenizer.decode([index]) for index in range(len(tokenizer)))
    chat = [{"role": "user", "content": "Zoey says that Bob is a knave."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (
        model.config.eos_token_id == tokenizer.eos_token_id == tokenizer("<|im_end|>").input_ids[0]
    )


def test_rewards_of_a_group_differ() -> None:
    rewards = {reward_func([f"<unused{i}>"], ["p"], [""])["rewards"] for i in range(16)}
    assert rewards == {-1.0, 1.0}


def test_unchanged_tensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, second in (("before", 0.0), ("after", 1.0)):
        (tmp_path / name).mkdir()
        tensors = {"a": torch.zeros(3), "b": torch.full((3,), second)}
        if name == "before":
            tensors["lost"] = torch.zeros(3)
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = training_run.unchanged_tensors(tmp_path / "before", tmp_path / "after")
    assert found == (["a", "lost"], 3)


def test_a_run_without_a_gradient_fails(record: Record, tmp_path: Path) -> None:
    from sg_rlhf.run_dir import jsonl_log

    row = {
        "sync/log_prob_diff_mean": 0.001, training_run.MISMATCH: 0.0135, "timing/step_total": 2.0,
    }  # fmt: skip
    later = {key: value for key, value in row.items() if not key.startswith("sync/")}
    jsonl_log.append(tmp_path / jsonl_log.METRICS, [row, later])
    steps = [{"actor_grad_norm": norm, "policy_loss": 0.1} for norm in (1.0, 0.0)]
    jsonl_log.append(tmp_path / jsonl_log.OPTIMIZER_STEPS, steps)
    training_run.check_run(record, tmp_path, 2)
    failed = [check["name"] for check in record.checks if check["status"] == "failed"]
    assert failed == ["every step had a gradient"]
    assert record.figures["seconds_step_total"] == 2.0


@pytest.mark.parametrize("mismatch", [0.25, None], ids=["zeroed weights", "no figure"])
def test_a_rollout_from_other_weights_fails(
    record: Record, tmp_path: Path, mismatch: float | None
) -> None:
    """An engine that sampled from zeroed weights differed by 0.25; its syncs were right."""
    from sg_rlhf.run_dir import jsonl_log

    right = {training_run.MISMATCH: 0.001}
    wrong = {"sync/log_prob_diff_mean": 0.001}
    if mismatch is not None:
        wrong[training_run.MISMATCH] = mismatch
    jsonl_log.append(tmp_path / jsonl_log.METRICS, [wrong, right])
    jsonl_log.append(
        tmp_path / jsonl_log.OPTIMIZER_STEPS, [{"actor_grad_norm": 1.0, "policy_loss": 0.1}]
    )
    training_run.check_run(record, tmp_path, 2)
    failed = [check["name"] for check in record.checks if check["status"] == "failed"]
    assert failed == ["the engine sampled by the trainer's policy"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of some/model in the hub's cache: its index, and one of two shards."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--model"
    snapshot = model / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1")
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    (snapshot / "tokenizer.json").write_text("{}")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = json.dumps({"weight_map": shards})
    (snapshot / "model.safetensors.index.json").write_text(index)
    save_file({"a": torch.zeros(1)}, snapshot / "model-1.safetensors")
    return snapshot


def test_a_model_out_of_reach_is_skipped(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(recipe_3b.huggingface_hub, "snapshot_download", nobody)
    recipe_3b.download("some/model")
    assert capsys.readouterr().out.splitlines() == [
        "f  downloading some/model first", "     ConnectionError: no route",
    ]  # fmt: skip
    with pytest.raises(StageSkippedError, match="--model DIR names one"):
        recipe_3b.reachable("some/model")
    assert recipe_3b.reachable(str(cache)) == str(cache)


def test_a_model_is_downloaded_before_the_stage_unless_it_is_complete(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(model: str, **_: object) -> None:
        asked.append(model)
        save_file({"b": torch.zeros(1)}, cache / "model-2.safetensors")

    monkeypatch.setattr(recipe_3b.huggingface_hub, "snapshot_download", fetch)
    for model in ("some/model", "some/model", str(cache), recipe_3b.RANDOM):
        recipe_3b.download(model)
    assert asked == ["some/model"]
    assert recipe_3b.reachable("some/model") == "some/model"


def test_the_3b_recipe_takes_the_hardware_of_the_gpu_or_is_skipped() -> None:
    found = [recipe_3b.hardware(gib) for gib in (139.8, 79.1, 39.4)]
    assert [file.stem for file in found] == ["1x80gb", "1x80gb", "1x40gb"]
    assert all(load_config(file).values for file in found)
    with pytest.raises(StageSkippedError, match="needs 40 GB"):
        recipe_3b.hardware(23.6)


def test_a_triton_that_cannot_compile_is_skipped_with_the_reason(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_device: str) -> None:
        raise RuntimeError("Failed to find C compiler.")

    triton = ModuleType("triton_softmax")
    triton.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, log_prob_head.TRITON, triton)
    found = log_prob_head.heads(record, Job("cuda", True, None, Path()))
    assert "without logits" in found  # now of PyTorch's operations
    (skipped,) = [c for c in record.checks if c["name"] == "Triton's kernels"]
    assert skipped["status"] == "skipped"
    assert skipped["why"] == "RuntimeError: Failed to find C compiler."


@pytest.mark.parametrize(
    ("mine", "base", "expected"),
    [
        (1, 2, ["met", "passed", "met"]),
        (3, 2, ["met", "failed", "met"]),
        (1, None, ["met", "skipped"]),
        (None, None, ["failed"]),
    ],
)
def test_a_head_that_runs_out_of_memory_is_compared_as_far_as_it_goes(
    record: Record, mine: int | None, base: int | None, expected: list[str]
) -> None:
    measured = {
        name: Cost(None if peak is None else 1.0, peak)
        for name, peak in (("without logits", mine), ("over logits", base))
    }
    log_prob_head._compare(record, "3b", measured, gradients=0, logits=100)
    assert statuses(record) == expected


def test_an_adam_step_off_is_seen() -> None:
    """The limit of stage c lies between rounding and a wrong gradient."""
    right = torch.randn(1000)
    sign = torch.randn(1000).sign()
    wrong = right + zero3.LEARNING_RATE * (sign + 1)  # half of the entries went the other way
    assert zero3.in_learning_rates(wrong, right) > 10 * zero3.SAME


def test_costs_are_taken_by_turns() -> None:
    order: list[str] = []
    found = costs(
        {name: (lambda name=name: order.append(name)) for name in "ab"}, "cpu", repeats=2, warm_up=1
    )
    assert order == ["a", "b"] * 3
    assert all(cost.milliseconds is not None for cost in found.values())


def test_distances() -> None:
    one = torch.ones(4)
    assert relative(one * 1.5, one) == pytest.approx(0.5)
    assert largest(one - 2, one) == 2.0 and largest(one[:0], one[:0]) == 0.0
