"""Weight syncs of the tiny model into a real engine, and what a faulty one says.

    python weight_sync_faults.py OUT PYTHON

Writes to OUT: {"log_probs": [after a sync, after one of changed weights,
after upstream's of the same, the trainer's own],
"messages": fault -> the error's, "seconds": fault -> how long it took, "check": {"right": the
log-prob check's metrics after an honest sync, "sent": outcome of a sync into a layer whose
processed weight gets its rows in another order, "wrong": the check's error after it}}. The
fault "dead core" is one in a call that the engine's core has been sent. "experts": per size of the
experts of a Qwen3-MoE the mean difference of its log-probs, engine to trainer: as both load it,
after a sync of the same weights, and after one of others. Ray starts its workers with PYTHON, which
has made the long imports already.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "lab" / "bench"))

from lab.bench import weight_sync as bench  # noqa: E402
from sg_rlhf.config import load_config  # noqa: E402
from sg_rlhf.overlay.cpu import platform  # noqa: E402
from sg_rlhf.overlay.patches import table  # noqa: E402
from sg_rlhf.overlay.reporting.errors import SyncError  # noqa: E402
from sg_rlhf.overlay.rollout.engine import SGRolloutActor  # noqa: E402
from sg_rlhf.overlay.rollout.engine_pool import is_engine_failure  # noqa: E402
from sg_rlhf.overlay.settings import worker_settings  # noqa: E402
from sg_rlhf.overlay.weight_sync import log_prob_check, sender  # noqa: E402

MODEL = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
DEADLINE = 3.0


LAYER = "layers.0.mlp.down_proj"


def reorder_rows(worker: Any) -> None:
    """Have a layer's weight processed with its rows reversed: a layout its kernel does not expect.

    It stands for a layer whose weights a reload leaves in the checkpoint's layout, as it would for
    the reordered experts of an MoE, or for a packed, quantised weight of equal shape.
    """
    model = worker.model_runner.get_model()
    (layer,) = (module for name, module in model.named_modules() if name.endswith(LAYER))
    method = layer.quant_method
    honest = method.process_weights_after_loading

    def process(module: Any) -> None:
        if module is layer:
            module.weight.data = module.weight.data.flip(0).contiguous()
        honest(module)

    method.process_weights_after_loading = process


class Engine(SGRolloutActor):
    def process(self) -> int:
        return os.getpid()

    async def reorder_rows(self) -> None:
        await self.llm.collective_rpc(reorder_rows)


class Trainer(bench.Trainer):
    """Tells its own log-probs, and may send a bucket with one bit turned."""

    def own_log_probs(self, ids: list[int]) -> list[float]:
        import torch

        with torch.no_grad():
            logits = self.module.float()(torch.tensor([ids])).logits[0, :-1]
        self.module.bfloat16()
        log_probs = logits.log_softmax(-1)
        return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def prompt_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [self.own_log_probs(ids) for ids in sequences]

    def outcome(self, deadline: float, damage_bucket: int | None = None) -> tuple[str, float]:
        sender.BASE_SECONDS, sender.BYTES_PER_SECOND = deadline or 120.0, math.inf
        group = self._model_update_group
        honest, sent = group.start_broadcast, []

        def start_broadcast(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            if len(sent) == damage_bucket:
                buffer[100] ^= 1 << 40
            sent.append(buffer.numel())
            return honest(buffer, *args, **kwargs)

        group.start_broadcast = start_broadcast
        started = time.monotonic()
        try:
            self.send(1)
            said = f"sent {len(sent)} buckets"
        except SyncError as error:
            said = str(error)
        finally:
            group.start_broadcast = honest
        return said, time.monotonic() - started


class ExpertsTrainer(Trainer):
    """Of a model in a folder, as the run's ranks load it."""

    def __init__(self, folder: str, *args: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        super().__init__(folder, *args)
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.actor.model.module = self.module


#: Of an expert's hidden layer. In the first the stacked tensors are square; vLLM's CPU kernel pads
#: the second.
EXPERTS = (32, 48)


def differences_of_experts(size: int, folder: Path) -> list[float]:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=520, hidden_size=64, intermediate_size=64, moe_intermediate_size=size,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=256, norm_topk_prob=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    settings = bench.engine_settings(str(folder)) | {"load_format": "auto"}
    engine = ray.remote(Engine).options(num_cpus=1, num_gpus=0.5).remote(**settings)
    start = ray.remote(num_cpus=1, num_gpus=0.5)(ExpertsTrainer)
    trainer = start.remote(str(folder), engine, "cpu")
    ray.get(trainer.connect.remote())
    ids = list(range(5, 60))

    def difference() -> float:
        engines = ray.get(engine.prompt_log_probs.remote(ids))
        trainers = ray.get(trainer.own_log_probs.remote(ids))
        return sum(abs(a - b) for a, b in zip(engines, trainers, strict=True)) / len(trainers)

    found = [difference()]
    for _ in range(2):
        ray.get(trainer.send.remote(1))
        found.append(difference())
        ray.get(trainer.change.remote())
    ray.kill(engine)
    ray.kill(trainer)
    return found


def checked(trainer: Any, engine: Any) -> Any:
    """The log-prob check's metrics, or its error."""
    policy = SimpleNamespace(
        async_run_method=lambda method_name, sequences: [trainer.prompt_log_probs.remote(sequences)]
    )
    engines: Any = SimpleNamespace(
        handles=[engine], instances=[SimpleNamespace(name="engine")], replace=None
    )
    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_sleep=False),
        sg=SimpleNamespace(sync_check_tolerance=load_config(None, []).sg.sync_check_tolerance),
    )
    sequences = [list(range(start, start + 50)) for start in (5, 7, 9)]
    batch = [(ids, [position >= 10 for position in range(1, len(ids))]) for ids in sequences]
    try:
        return log_prob_check.check(policy, engines, batch, args, sync=3)
    except SyncError as error:
        return str(error)


def main(out: Path, python: str) -> None:
    ray.init(
        num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False,
        object_store_memory=2**28,
        runtime_env={
            "py_executable": shlex.quote(python),
            "env_vars": {
                **platform.environment(),
                worker_settings.VARIABLE: worker_settings.WorkerSettings(
                    param_dtype="fp32"
                ).to_json(),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # reorder_rows is sent to the worker
            },
            "worker_process_setup_hook": table.WORKER_SETUP_HOOK,
        },
    )  # fmt: skip
    experts = [differences_of_experts(size, out.with_name(f"experts_{size}")) for size in EXPERTS]
    engine = (
        ray.remote(Engine)
        .options(num_cpus=1, num_gpus=0.5)
        .remote(**bench.engine_settings(str(MODEL)))
    )
    start = ray.remote(num_cpus=1, num_gpus=0.5)(Trainer)
    trainer = start.remote(str(MODEL), engine, "cpu")
    pid = ray.get(engine.process.remote())
    ray.get(trainer.connect.remote())
    ids = list(range(5, 60))
    log_probs, messages, seconds = [], {}, {}
    check: dict[str, Any] = {}

    def outcome(name: str, *args: Any) -> None:
        messages[name], seconds[name] = ray.get(trainer.outcome.remote(*args))

    outcome("none", 0.0)
    log_probs.append(ray.get(engine.prompt_log_probs.remote(ids)))
    ray.get(trainer.change.remote())
    outcome("none", 0.0)
    log_probs.append(ray.get(engine.prompt_log_probs.remote(ids)))
    ray.get(trainer.send.remote(None))
    log_probs.append(ray.get(engine.prompt_log_probs.remote(ids)))
    log_probs.append(ray.get(trainer.own_log_probs.remote(ids)))
    outcome("none", 0.0)
    check["right"] = checked(trainer, engine)
    ray.get(engine.reorder_rows.remote())
    outcome("wrong layout", 0.0)
    check |= {"sent": messages["wrong layout"], "wrong": checked(trainer, engine)}
    outcome("damaged", 1800.0, 1)
    core = psutil.Process(pid).children(recursive=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in core:
            process.send_signal(number)
        if number == signal.SIGSTOP:
            call = engine.ping.remote()
            assert ray.wait([call], timeout=1.0) == ([], [call])
    try:
        ray.get(call, timeout=1800.0)
        messages["dead core"] = "answered"
    except ray.exceptions.RayError as error:
        messages["dead core"] = "lost" if is_engine_failure(error) else repr(error)
    os.kill(pid, signal.SIGSTOP)
    outcome("stopped", DEADLINE)
    os.kill(pid, signal.SIGKILL)
    outcome("killed", 60.0)
    found = {
        "log_probs": log_probs, "messages": messages, "seconds": seconds, "check": check,
        "experts": experts,
    }  # fmt: skip
    out.write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    table.install()
    main(Path(sys.argv[1]), sys.argv[2])
