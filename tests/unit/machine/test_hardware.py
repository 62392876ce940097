"""Machines by name, as found, and the sizes that a recipe has."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.machine import hardware
from sg_rlhf.machine.names import BY_SIZE, GPUS, gpu_of
from sg_rlhf.plan.run_shape import lora_parameters, run_shape
from tests.unit.plan.runs import EIGHT, RECIPE, run_of


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "kind"),
    [
        ("8x80gb", 1, 8, "h100"),
        ("1x24gb", 1, 1, "4090"),
        ("2x8x80gb", 2, 8, "h100"),
        ("4x40gb", 1, 4, "a100-40gb"),
        ("1xgpu", 1, 1, "4090"),
        ("8xh100", 1, 8, "h100"),
        ("4xl40s", 1, 4, "l40s"),
        ("2x8xB200", 2, 8, "b200"),
        ("1xh100-pcie", 1, 1, "h100-pcie"),
    ],
)
def test_names(name: str, nodes: int, gpus: int, kind: str) -> None:
    found = hardware.named(name)
    assert (found.nodes, found.gpus_per_node, found.gpu) == (nodes, gpus, kind)
    assert found.gpus == nodes * gpus and found.gpu_memory_gib == GPUS[kind].usable_gib
    assert found.link == ("nvlink" if GPUS[kind].nvlink else "pcie")
    assert found.type.name in found.describe()


@pytest.mark.parametrize("name", ["8x33gb", "80gb", "8x", "0x80gb", "8xv100", "x80gb", ""])
def test_a_name_that_is_none_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="no such hardware; expected cpu or ") as error:
        hardware.named(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("device", "mib", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA GeForce RTX 4090", 24564, "4090"),
        ("NVIDIA GeForce RTX 3090", 24576, "3090"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A10G", 23028, "a10"),
        ("NVIDIA RTX A6000", 49140, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "6000ada"),
        ("Some Future GPU", 49140, "a100-40gb"),
        ("Some Future GPU", 98304, "h100"),
        ("Some Old GPU", 16384, "4090"),
    ],
)
def test_devices_as_nvidia_smi_names_them(device: str, mib: int, kind: str) -> None:
    assert gpu_of(device, mib / 1024)[0] == kind
    found = hardware.of_machine([device], [mib], nvlink=False, host_memory_gib=64.0)
    assert found.gpu == kind
    # Of a device that is not in the table its own memory counts, not the type's.
    assert 0.95 * mib / 1024 <= found.gpu_memory_gib <= mib / 1024


def test_of_unequal_gpus_the_smallest_counts_and_none_is_the_cpu() -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]
    found = hardware.of_machine(names, [81559, 24564], nvlink=True, host_memory_gib=64.0)
    assert (found.gpu, found.gpus_per_node, found.link) == ("4090", 2, "pcie")
    cpu = hardware.of_machine([], [], nvlink=False, host_memory_gib=8.0, disk_free_gb=5.0)
    assert (cpu.gpus, cpu.host_memory_gib, cpu.disk_free_gb) == (0, 8.0, 5.0)


def _smi(folder: Path, text: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)


def test_the_machine_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _smi(tmp_path, "echo 'No devices were found'; exit 6")
    found = hardware.detected(tmp_path / "not" / "yet" / "there")
    assert found.gpus == 0 and 0 < found.host_memory_gib < 1e5
    assert found.disk_free_gb is not None and found.disk_free_gb > 0
    _smi(
        tmp_path,
        'case "$1" in topo) printf "GPU0\\tX\\tNV18\\n";; '
        '*) printf "NVIDIA H100 80GB HBM3, 81559\\nNVIDIA H100 80GB HBM3, 81559\\n";; esac',
    )
    found = hardware.detected(tmp_path)
    assert (found.gpu, found.gpus, found.link) == ("h100", 2, "nvlink")


def test_gpus_that_are_hidden_from_cuda_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    _smi(tmp_path, '[ "$1 $2" != "-i 3" ] || echo "NVIDIA H100 80GB HBM3, 81559"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert hardware.detected(tmp_path).gpus == 1
    _smi(tmp_path, 'echo "NVIDIA H100 80GB HBM3, 81559"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 3, -1,5")
    _smi(tmp_path, '[ "$1 $2" != "-i 3" ] || echo "NVIDIA H100 80GB HBM3, 81559"')
    assert hardware.detected(tmp_path).gpus == 1
    _smi(tmp_path, 'echo "NVIDIA H100 80GB HBM3, 81559"')
    for hidden in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert hardware.detected(tmp_path).gpus == 0


def test_every_type_has_sane_figures() -> None:
    for gpu in GPUS.values():
        assert 0.85 * gpu.memory_gb < gpu.usable_gib < gpu.memory_gb
        assert gpu.tflops > 50 and gpu.bandwidth >= 300 and gpu.source
    assert set(BY_SIZE.values()) <= set(GPUS)


# -- a recipe's sizes ---------------------------------------------------------------------------


def test_sizes_of_the_papers_recipe() -> None:
    run = run_of()
    assert (run.cpu, run.ranks, run.engines) == (False, 8, 8)
    assert hardware.named(run.hardware) == EIGHT
    assert (run.samples, run.optimizer_steps, run.turns) == (512, 2, 1)
    assert (run.train_pass_tokens, run.rollout_pass_tokens) == (4 * 5120, 8 * 5120)
    assert run.reference and run.entropy and run.checkpointing and run.temperature == 0.7


def test_sizes_of_others() -> None:
    def of(recipe: str, *overrides: str) -> object:
        return run_shape(load_config(recipe, list(overrides)))

    search = of("configs/search/grpo_sg_qwen2.5-3b.yaml")
    assert search is not None and search.turns == 5 and search.prefix_caching  # type: ignore[attr-defined]
    tiny = of("configs/kk/grpo_sg_tiny_cpu.yaml")
    assert tiny is not None and tiny.cpu and tiny.local_model  # type: ignore[attr-defined]
    assert of(RECIPE, "actor.model_name_or_path=somebody/unknown") is None
    assert search.logits == "fused"  # type: ignore[attr-defined]
    for off in ("actor.fused_logprobs=false", "ds.tensor_parallel_size=2"):
        assert of(RECIPE, off).logits == "full"  # type: ignore[attr-defined]
    twice = of(RECIPE, "sg.update=lopti", "train.max_epochs=2", "algo.kl.init_coef=0")
    assert twice.optimizer_steps == 8 and not twice.reference  # type: ignore[attr-defined]
    dynamic = of(RECIPE, "train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=10000")
    assert dynamic.train_pass_tokens == dynamic.rollout_pass_tokens == 10000  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"^command line: train\.micro_batch_size=0: expected 1 or more"
    ):
        of(RECIPE, "train.micro_batch_size=0")


def test_adapters_are_counted_as_peft_makes_them() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sg_rlhf.plan import shapes

    sizes = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = shapes.from_config("here", {"model_type": "qwen2", **sizes})
    assert lora_parameters(shape, 8) == trained
