"""Both sides of a weight sync without Ray and without an engine between them."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from sg_rlhf.config import checks, load_config
from sg_rlhf.overlay.weight_sync import buckets, receiver, sender
from sg_rlhf.overlay.weight_sync.receiver import BucketWorkerWrap

SENT = [
    ("a", torch.arange(12, dtype=torch.bfloat16).view(3, 4)),
    ("b", torch.arange(5, dtype=torch.float32)),
]


class Worker(BucketWorkerWrap):
    """Takes its buckets from a list, and keeps what it loads."""

    device = torch.device("cpu")

    def __init__(self, arriving: list[torch.Tensor]) -> None:
        self._arriving, self.loaded = arriving, []

    def _receive_broadcast(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self._arriving.pop(0))

    def _load_tensors(self, tensors: Any, first: bool, last: bool) -> None:
        self.loaded += [(name, tensor.clone(), first, last) for name, tensor in tensors]


def bucket() -> tuple[buckets.Bucket, torch.Tensor]:
    tensors = [buckets.TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in SENT]
    (made,) = buckets.split(tensors, 2**20)
    buffer = torch.empty(made.words, dtype=torch.int64)
    buckets.pack(made, [t for _, t in SENT], buffer)
    return made, buffer


def test_a_worker_loads_what_was_sent() -> None:
    made, buffer = bucket()
    worker = Worker([buffer])
    assert worker.receive_bucket(buckets.metadata(made), first=True, last=True) is None
    assert [(name, *rest) for name, _, *rest in worker.loaded] == [
        ("a", True, True), ("b", True, True),
    ]  # fmt: skip
    assert all(
        torch.equal(t, sent) for (_, t, *_), (_, sent) in zip(worker.loaded, SENT, strict=True)
    )


def test_a_worker_loads_nothing_of_a_damaged_bucket() -> None:
    made, buffer = bucket()
    buffer[1] += 1
    worker = Worker([buffer])
    said = worker.receive_bucket(buckets.metadata(made), first=True, last=False)
    assert said is not None and said.startswith("other bytes than were sent")
    assert worker.loaded == []


class Transposed(QuantizeMethodBase):
    """Stands in for a kernel's layout: the weight is transposed once it is loaded."""

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return x @ layer.weight + layer.bias

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)


class Model(torch.nn.Module):
    """One square layer, so that a tensor of the checkpoint also fits into the kernel's layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.layer.quant_method = Transposed()
        record_metadata_for_reloading(self)
        self.layer.quant_method.process_weights_after_loading(self.layer)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


class LoadingWorker(BucketWorkerWrap):
    device = torch.device("cpu")
    vllm_config = None
    model_config = SimpleNamespace(dtype=torch.float32)

    def __init__(self, model: Model) -> None:
        self.model_runner = SimpleNamespace(
            get_model=lambda: model, reset_encoder_cache=int, reset_mm_cache=int
        )


@pytest.mark.parametrize("shared", [False, True], ids=["broadcast", "one buffer for all"])
def test_a_layer_in_two_buckets_gets_its_kernels_layout(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written plainly, the weight of the checkpoint would be taken for its transpose."""
    monkeypatch.setattr(receiver, "set_current_vllm_config", contextlib.nullcontext)
    model = Model()
    before = model.layer.weight.data_ptr()
    sent = {"layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}
    made = [
        buckets.split([buckets.TensorSpec(n, t.dtype, tuple(t.shape))], 2**20)[0]
        for n, t in sent.items()
    ]
    one = torch.empty(max(bucket.words for bucket in made), dtype=torch.int64)
    worker = LoadingWorker(model)
    for index, (bucket, tensor) in enumerate(zip(made, sent.values(), strict=True)):
        buffer = one if shared else torch.empty(bucket.words, dtype=torch.int64)
        buckets.pack(bucket, [tensor], buffer)
        worker._opened_buffer = one if shared else None
        worker._load_tensors(buckets.unpack(bucket, buffer), index == 0, index == 1)
    x = torch.randn(2, 4)
    expected = torch.nn.functional.linear(x, *sent.values())
    torch.testing.assert_close(model.layer.quant_method.apply(model.layer, x), expected)
    assert model.layer.weight.data_ptr() == before, "CUDA graphs read the old storage"


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (ValueError("first\nsecond "), "ValueError: second"),
        (AssertionError(), "AssertionError"),  # an assertion without a message
    ],
)
def test_what_an_engine_raised_is_a_line(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, line: str
) -> None:
    def get(_reference: Any) -> None:
        raise ray.exceptions.RayTaskError("receive_bucket", "", cause)

    monkeypatch.setattr(ray, "get", get)
    assert sender._error_of(None) == line


def test_the_deadline_grows_with_the_weights() -> None:
    assert [sender.deadline_seconds(int(gb * 1e9)) for gb in (0, 140)] == [120, 1520]


@pytest.mark.parametrize("ipc", [True, False])
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_buffer_for_another_process_is_in_no_expandable_segment(
    monkeypatch: pytest.MonkeyPatch, name: str, ipc: bool
) -> None:
    """Containers forbid to share one. The other options and the trainer's own memory keep it."""
    asked = "expandable_segments:True,max_split_size_mb:512"
    monkeypatch.setenv(name, asked)
    events: list[str] = []
    monkeypatch.setattr(sender.alloc_conf, "live_alloc_conf", lambda: None)
    monkeypatch.setattr(sender.alloc_conf, "set_alloc_conf", events.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    allocate = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *given, **kw: events.append("allocated") or allocate(*given, **kw)
    )
    sync: Any = sender.WeightSync.__new__(sender.WeightSync)
    sync._ipc, sync.buckets = ipc, [SimpleNamespace(words=3), SimpleNamespace(words=5)]
    assert sync._buffer().shape == (5,)
    off = "expandable_segments:False,max_split_size_mb:512"
    assert events == ([off, "allocated", asked] if ipc else ["allocated"])


def test_an_engines_error_is_the_line_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic ends its errors with the address of a page."""

    def get(_reference: Any) -> None:
        raise ray.exceptions.RaySystemError(
            "Traceback:\nValueError: no such tensor\nFor further information visit https://errors"
        )

    monkeypatch.setattr(sender.ray, "get", get)
    line = sender._error_of(None)
    assert line is not None and line.startswith("RaySystemError: ")
    assert line.endswith("ValueError: no such tensor")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["ds.load_in_4bit=true"], r"^ds.lora.rank=8: not with ds.load_in_4bit=true: "),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(overrides: list[str], line: str) -> None:
    recipe = "configs/kk/grpo_sg_tiny_cpu.yaml"
    config = load_config([recipe], ["ds.lora.rank=8", *overrides])
    assert any(re.search(line, problem) for problem in checks.problems(config))


def test_rays_collectives_are_refused() -> None:
    config = load_config(["configs/kk/grpo_sg_tiny_cpu.yaml"], ["vllm.sync_with_ray=true"])
    (problem,) = checks.problems(config)
    assert problem.startswith("vllm.sync_with_ray=true: the weights are sent in buckets")
