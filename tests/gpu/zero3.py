"""Stage c: DeepSpeed ZeRO-3 on one GPU, as a run uses it.

A step beside a plain AdamW, the states' way to the host and back (``ds.enable_sleep``), a
checkpoint that another engine resumes from, the optimizer in host memory (``ds.adam_offload``), a
gradient that is not finite, rotary frequencies under ``zero.Init``. With the overlay's rows for
DeepSpeed, as in a run. A random Qwen2 in bfloat16; attention and loss are deterministic kernels.
"""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu.measure import allocated, synchronize
from tests.gpu.result import Job, Record

LEARNING_RATE = 1e-3
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01
VOCABULARY = 1000
#: Mean difference of a parameter after some steps, in learning rates. Adam's first steps are of
#: the size of the learning rate whatever the gradient, so a wrong one is off by about 1.
SAME = 0.05


def start(device: str) -> None:
    """One rank, with the overlay's rows for DeepSpeed and transformers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if device == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "SG_PLATFORM": "cpu"}
    from sg_rlhf.overlay.patches import table

    table.install()  # without its rows DeepSpeed would compile its Adam
    import deepspeed

    if device == "cuda":
        torch.cuda.set_device(0)
    deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo")


def model_folder(job: Job) -> Path:
    """A random Qwen2 on the disk, in bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    width, layers = (64, 2) if job.small else (512, 4)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    folder = job.scratch / "model"
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def config(host_adam: bool = False) -> dict[str, Any]:
    """What upstream gives DeepSpeed for ZeRO-3 in bfloat16, in numbers where it says "auto"."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**6,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "cpu" if host_adam else "none", "pin_memory": True},
            "reduce_scatter": True,
            # Nothing stays gathered, so that every parameter goes through the partitions.
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": DECAY,
                # As overlay.model.adam has it: torch's Adam, which nothing compiles.
                "torch_adam": True, "fused": True,
            },
        },
    }  # fmt: skip


class Engine:
    """A model under ZeRO-3, loaded as upstream's actor loads it."""

    def __init__(self, folder: Path, device: str, host_adam: bool = False) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        from sg_rlhf.overlay.model import rotary

        settings = config(host_adam)
        self._for_transformers = HfDeepSpeedConfig(settings)  # while it lives, zero.Init is used
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="eager"
        )
        model.config.use_cache = False
        self.rotary_loaded = model.model.rotary_emb.inv_freq.dtype
        self.rotary_restored = rotary.restore(model)
        self.device = device
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=settings,
        )

    def loss(self, seed: int) -> Tensor:
        return loss_of(self.engine, seed, self.device)

    def step(self, seed: int) -> float:
        loss = self.loss(seed)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def parameters(self) -> Tensor:
        """The optimizer's float32 copy, on the host."""
        from deepspeed.utils import safe_get_full_fp32_param

        found = [safe_get_full_fp32_param(p) for p in self.engine.module.parameters()]
        return torch.cat([x.detach().flatten().float().cpu() for x in found])

    def end(self) -> None:
        self.engine.destroy()
        self.engine = None
        del self._for_transformers
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def loss_of(model: Any, seed: int, device: str) -> Tensor:
    """Cross entropy of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 96), generator=generator).to(device)
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def plain_steps(folder: Path, device: str, seeds: range) -> tuple[Tensor, Tensor]:
    """(parameters before, after) of the same steps by torch's AdamW on float32 copies."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).to(device)
    model.config.use_cache = False
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    before = torch.cat([m.flatten().cpu() for m in masters])
    optimizer = torch.optim.AdamW(
        masters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY
    )
    for seed in seeds:
        model.zero_grad(set_to_none=True)
        loss_of(model, seed, device).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master)
    return before, torch.cat([m.detach().flatten().cpu() for m in masters])


def in_learning_rates(found: Tensor, expected: Tensor) -> float:
    """Mean |difference| of a parameter."""
    return float((found - expected).abs().mean()) / LEARNING_RATE


def offload(engine: Any, on_cuda: bool) -> None:
    """What upstream's ``offload_deepspeed_states`` moves, by the same calls."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    engine.optimizer.offload_states(
        include=[
            OffloadStateTypeEnum.optim_states,
            OffloadStateTypeEnum.contiguous_grad_buffer,
            OffloadStateTypeEnum.hp_params,
            OffloadStateTypeEnum.lp_grads,
        ],
        device=OffloadDeviceEnum.cpu,
        pin_memory=on_cuda,
        non_blocking=on_cuda,
    )
    engine.empty_partition_cache()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def reload(engine: Any, on_cuda: bool) -> None:
    """Upstream's ``reload_deepspeed_states``."""
    engine.reload_states(non_blocking=on_cuda)
    synchronize("cuda" if on_cuda else "cpu")


def load(engine: Any, folder: Path, record: Record) -> None:
    """As a resumed run does, with the overlay's care for the optimizer's state."""
    from sg_rlhf.overlay.checkpoints import store

    path, _ = engine.load_checkpoint(str(folder), "saved")
    record.check("a checkpoint is found", path is not None)
    forgotten = store.drop_offload_buffers(engine.optimizer)
    record.figure("offload_buffers_in_the_checkpoint", forgotten)
    keys = list(state_devices(engine))
    left = [key for key in keys if key.endswith("_offload_buffer")]
    record.check("the optimizer has its moments alone", "exp_avg" in keys and not left, left)


def state_devices(engine: Any) -> dict[str, list[str]]:
    """Where each kind of the optimizer's tensors is."""
    found: dict[str, set[str]] = {}
    for state in engine.optimizer.optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value) and value.numel() > 1:
                found.setdefault(str(key), set()).add(value.device.type)
    return {key: sorted(devices) for key, devices in sorted(found.items())}


def check_rotary(record: Record, engine: Engine, folder: Path) -> None:
    """float32 and equal to a model's that ZeRO never touched."""
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    record.figure("rotary_frequencies_as_loaded", str(engine.rotary_loaded))
    expected = Qwen2RotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    found = engine.engine.module.model.rotary_emb.inv_freq
    record.check("rotary frequencies are float32", found.dtype == torch.float32, str(found.dtype))
    same = torch.equal(found.cpu().float(), expected.float())
    record.check("rotary frequencies are a plain model's", same)


def check_offload(record: Record, job: Job, engine: Engine) -> int:
    """Bytes that are allocated on the GPU while the states are on the host."""
    before, there = engine.parameters(), allocated(job.device)
    offload(engine.engine, job.on_cuda)
    left = allocated(job.device)
    record.figure("optimizer_state_offloaded", state_devices(engine.engine))
    record.figure("allocated_bytes", {"awake": there, "states on the host": left})
    moments = [d for k, d in state_devices(engine.engine).items() if k.startswith("exp_avg")]
    record.check("moments are on the host", bool(moments) and all(d == ["cpu"] for d in moments))
    if job.on_cuda:
        # float32 copy and two moments: 12 bytes a parameter.
        freed = (there - left) / (12 * before.numel())
        record.check("the GPU has its memory back", freed >= 0.95, freed, 0.95)
    reload(engine.engine, job.on_cuda)
    same = torch.equal(engine.parameters(), before)
    record.check("parameters are the same after offload and reload", same)
    return left


def check_resume(record: Record, job: Job, folder: Path, engine: Engine, left: int) -> None:
    """Another engine goes on from a checkpoint as the first one does without it.

    Args:
        left: bytes of the first engine on the GPU with its states on the host.
    """
    saved, checkpoints = engine.parameters(), job.scratch / "checkpoints"
    engine.engine.save_checkpoint(str(checkpoints), tag="saved")
    engine.step(seed=2)
    expected = engine.parameters()
    # DeepSpeed keeps an engine that has ended (parameter_offload.FWD_MODULE_STACK and caches of its
    # methods), so it ends small, and the other one is measured from there.
    offload(engine.engine, job.on_cuda)
    engine.end()
    before = allocated(job.device)
    resumed = Engine(folder, job.device)
    load(resumed.engine, checkpoints, record)
    record.check("a checkpoint holds the parameters", torch.equal(resumed.parameters(), saved))
    record.figure("optimizer_state_loaded", state_devices(resumed.engine))
    offload(resumed.engine, job.on_cuda)
    if job.on_cuda:
        more = allocated("cuda") - before - left
        # Were the moments left there, it would be 8 bytes a parameter: 100 MiB.
        record.within("more bytes on the GPU after resuming, states on the host", more, 2**23)
    else:
        record.skip("memory after resuming", "the CPU's accelerator has one kind of memory")
    reload(resumed.engine, job.on_cuda)
    resumed.step(seed=2)
    found = resumed.parameters()
    record.within("the step after resuming", in_learning_rates(found, expected), SAME)
    record.figure("the_step_after_resuming_is_bit_equal", torch.equal(found, expected))
    check_watch(record, resumed)
    resumed.end()


def check_watch(record: Record, engine: Engine) -> None:
    """A NaN in the backward pass trains nothing, and DeepSpeed tells that it skipped the step."""
    before = engine.parameters()

    def give_back_nan(_module: Any, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))

    handle = engine.engine.module.model.norm.register_forward_hook(give_back_nan)
    engine.step(seed=3)
    handle.remove()
    record.check("a step on a NaN gradient is skipped", not engine.engine.was_step_applied())
    record.check("nothing was trained on it", torch.equal(engine.parameters(), before))


def run(record: Record, job: Job) -> None:
    """One engine after the other."""
    start(job.device)
    folder = model_folder(job)
    steps = range(2)
    before, expected = plain_steps(folder, job.device, steps)
    empty = allocated(job.device)
    engine = Engine(folder, job.device)
    check_rotary(record, engine, folder)
    losses = [engine.step(seed) for seed in steps]
    found = engine.parameters()
    record.figure("losses", losses)
    record.figure("optimizer", type(engine.engine.optimizer.optimizer).__name__)
    record.check("parameters are finite", bool(torch.isfinite(found).all()))
    record.check("steps change the parameters", in_learning_rates(found, before) > 0.5)
    record.within("two steps beside a plain AdamW", in_learning_rates(found, expected), SAME)
    left = check_offload(record, job, engine) - empty
    check_resume(record, job, folder, engine, left)
    host = Engine(folder, job.device, host_adam=True)
    for seed in steps:
        host.step(seed)
    record.figure("optimizer_in_host_memory", type(host.engine.optimizer.optimizer).__name__)
    off = in_learning_rates(host.parameters(), expected)
    record.within("two steps with the optimizer in host memory", off, SAME)
    host.end()
    torch.distributed.destroy_process_group()
