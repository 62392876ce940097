"""Operations on the software GPU give the CPU's values, or raise.

The environment's own Python runs this file (see README.md); elsewhere it skips.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

if os.environ.get("SOFTWARE_GPU_VALUES") != "1":
    pytest.skip("needs the software GPU with values", allow_module_level=True)

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

software_values = importlib.import_module("software_values")  # site/ is in PYTHONPATH


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def same_on_both(compute: Callable[..., Any], *inputs: Tensor) -> None:
    """The computation gives equal results on the CPU and on the device."""
    expected = compute(*(each.clone() for each in inputs))
    found = compute(*(each.cuda() for each in inputs))
    many = isinstance(expected, tuple | list)
    for one, other in zip(found, expected, strict=True) if many else [(found, expected)]:
        if isinstance(other, Tensor):
            assert one.is_cuda and one.dtype == other.dtype
            assert torch.equal(one.cpu(), other)
        else:
            assert one == other


def test_device_is_the_software_gpu() -> None:
    assert "Software GPU" in torch.cuda.get_device_name()


# ---- rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compute", [
    lambda x, y: x + y * 2 - x / (y.abs() + 1),
    lambda x, y: (x.exp(), y.tanh(), x.sigmoid(), torch.where(x > 0, x, y)),
    lambda x, y: (x.sum(), x.mean(-1), x.amax(0), x.cumsum(-1), x.std()),
    lambda x, y: (x @ y.T, torch.addmm(y[:, :5], x, y.T[:, :5])),
    lambda x, y: (functional.softmax(x, -1), functional.log_softmax(y, -1)),
    lambda x, y: (torch.sort(x, -1), torch.topk(y, 3))[0],
    lambda x, y: torch.cat([x, y], 1).to(torch.float16).to(torch.int32),
])  # fmt: skip
def test_functions(compute: Callable[..., Any], dtype: torch.dtype) -> None:
    same_on_both(compute, normal(5, 6, dtype=dtype), normal(5, 6, dtype=dtype, seed=1))


def test_matmul_in_bfloat16_with_float32_result() -> None:
    x, y = normal(4, 8, dtype=torch.bfloat16), normal(8, 3, dtype=torch.bfloat16, seed=1)
    found = torch.mm(x.cuda(), y.cuda(), out_dtype=torch.float32)
    assert torch.equal(found.cpu(), x.float() @ y.float())


def in_place(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x.clone()
    z.add_(y).mul_(2).clamp_(min=-1).masked_fill_(y > 1, 3.0)
    z[1] = 7
    z[:, 2] -= y[:, 2]
    z.t().add_(1).cumsum_(0)
    torch._foreach_mul_([z, x], 0.5)
    return z, x


def test_operations_in_place() -> None:
    same_on_both(in_place, normal(5, 6), normal(5, 6, seed=1))


def test_sums_in_place() -> None:
    x = normal(4, 4)
    rows = torch.tensor([0, 0, 2])
    same_on_both(lambda x, r: x.cumsum_(0).index_add_(0, r, x[:3] + 1), x, rows)
    same_on_both(lambda x: x.t().addmm_(x.clone(), x.clone()), x)


def test_an_operation_in_place_reads_the_values_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CUDA's host code has copied a kernel's result, without values, over them."""
    x = normal(4).cuda()
    host_code = software_values.host_code

    def spoil(operation: Any, args: Any, options: Any) -> Any:
        result = host_code(operation, args, options)
        software_values.on_cpu(args[0]).fill_(9)
        return result

    monkeypatch.setattr(software_values, "host_code", spoil)
    x.mul_(2)
    monkeypatch.undo()
    assert torch.equal(x.cpu(), normal(4) * 2)


def test_results_into_given_tensors() -> None:
    def compute(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total, product = torch.empty_like(x), torch.empty(0, device=x.device)
        torch.add(x, y, out=total)
        torch.mm(x, y.t(), out=product)
        return total, product, torch.cumsum(x, 0, out=x)

    same_on_both(compute, normal(5, 6), normal(5, 6, seed=1))


def test_views_share_memory() -> None:
    x = normal(4, 6).cuda()
    view = x.t()[1:3].reshape(2, 2, 2)[0]
    part = x[1:3, ::2]
    part.zero_()
    assert x[1:3, ::2].abs().sum().item() == 0 and x[0].abs().sum().item() > 0
    assert view.shape == (2, 2) and part.data_ptr() == x.data_ptr() + 6 * 4
    same_on_both(lambda x: x.view(6, 4).transpose(0, 1).contiguous().flatten(), normal(4, 6))


def masks(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x.clone()
    z[y > 0] = y[y > 0]
    z[y < -1] = 5.0
    labels = (x * 2).to(torch.int64)
    repeats = torch.tensor([2, 0, 1]).to(x.device)
    return (
        x[x > 0], z, (x > y).nonzero(), torch.masked_select(x, y > 0), torch.unique(labels),
        torch.repeat_interleave(repeats + 7, repeats),
        torch.bincount(labels.abs().flatten()), *torch.where(x > 1),
    )  # fmt: skip


def test_shapes_that_depend_on_data() -> None:
    same_on_both(masks, normal(5, 6), normal(5, 6, seed=1))


@pytest.mark.parametrize("wait", [
    lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.sum().item(),
    lambda x: x.index_put_((x > 0,), x[0]), lambda x: x.cpu(), lambda x: torch.equal(x, x + 1),
])  # fmt: skip
def test_waits_of_the_host_are_reported(wait: Callable[[Tensor], Any]) -> None:
    x = torch.ones(1, 4).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            wait(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_else_waits() -> None:
    x = normal(3, 4).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = (x @ x.t()).softmax(-1) + torch.rand(3, device="cuda")
        x[x > 0] = 0.0
        torch.repeat_interleave(x[0], torch.ones(4, device="cuda").long(), output_size=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.isfinite().all() and x.amax().item() <= 0


def test_devices_are_checked() -> None:
    x = normal(3).cuda()
    for wrong in (lambda: x + normal(3), lambda: torch.masked_select(x, normal(3) > 0)):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()


def test_inference_mode_computes_the_same() -> None:
    with torch.inference_mode():
        same_on_both(
            lambda x, y: (functional.linear(x, y), x.reshape(6, 5), x.to(torch.bfloat16), x[x > 0]),
            normal(5, 6), normal(4, 6, seed=1),
        )  # fmt: skip


def test_an_operation_without_values_raises() -> None:
    """Also in a thread of autograd."""
    norm = torch.nn.RMSNorm(4).cuda()
    loss = norm(normal(2, 4).cuda()).sum()
    with pytest.raises(software_values.NoValuesError, match="_fused_rms_norm_backward has no CPU"):
        loss.backward()


def test_a_result_of_another_dtype_raises() -> None:
    one, two = torch.zeros(2, device="cuda"), torch.zeros(2, dtype=torch.float64)
    add = torch.ops.aten.add.Tensor
    with pytest.raises(software_values.NoValuesError, match="aten::add.Tensor gives torch.f"):
        software_values.with_values(add, one, two)


def test_a_kernel_whose_values_nothing_computes_is_refused() -> None:
    """Here the mode is off, as in a thread that C++ starts."""
    from torch.utils._python_dispatch import _disable_current_modes

    x = normal(3).cuda()
    with _disable_current_modes(), pytest.raises(RuntimeError, match="CUDA error"):
        x + 1
    assert torch.equal((x + 1).cpu(), normal(3) + 1)


def test_copies_between_host_and_device() -> None:
    x = normal(3, 4)
    there = x.pin_memory().to("cuda", torch.float64, non_blocking=True)
    back = torch.empty(3, 4)
    back.copy_(there)
    assert torch.equal(there.float().to("cpu", torch.float32), x) and torch.equal(back, x)
    assert torch.equal(there.to("cpu", torch.bfloat16), x.bfloat16())


# ---- random numbers ---------------------------------------------------------------------------


def draws() -> Tensor:
    x = torch.empty(100, device="cuda")
    return torch.stack([
        torch.randn(100, device="cuda"), torch.rand_like(x), x.normal_(),
        x.clone().exponential_(), functional.dropout(torch.ones_like(x), 0.5),
        torch.randperm(100, device="cuda").float(),
    ])  # fmt: skip


def test_seeds_repeat_random_numbers_and_draws_differ() -> None:
    torch.cuda.manual_seed(3)
    first = draws()
    second = draws()
    torch.cuda.manual_seed(3)
    assert torch.equal(draws(), first)
    for one, other in itertools.combinations([*first, *second], 2):
        assert not torch.equal(one, other)
    assert abs(first[0].mean().item()) < 0.4 and 0.2 < (first[4] > 0).float().mean().item() < 0.8


def test_states_of_generators_are_restored() -> None:
    state = torch.cuda.get_rng_state()
    first = draws()
    torch.cuda.set_rng_state(state)
    assert torch.equal(draws(), first)
    generator = torch.Generator("cuda").manual_seed(5)
    one = torch.randn(4, generator=generator, device="cuda")
    two = torch.randn(4, generator=generator, device="cuda")
    assert not torch.equal(one, two)
    generator.manual_seed(5)
    assert torch.equal(torch.randn(4, generator=generator, device="cuda"), one)


def test_the_cpu_generator_is_not_used() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    draws()
    assert torch.equal(torch.randn(3), expected)


# ---- autograd -------------------------------------------------------------------------------


class Norm(torch.nn.Module):
    """As in transformers' Qwen2."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def trained(device: str) -> list[Tensor]:
    """Loss, gradients and weights of a small model after a step of AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, 8), torch.nn.Linear(8, 16), torch.nn.SiLU(),
        Norm(16), torch.nn.Linear(16, 11),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    tokens = torch.arange(10).to(device).view(2, 5)
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
    grads = [each.grad.clone() for each in model.parameters()]
    optimizer.step()
    return [each.detach().cpu() for each in (loss, norm, *grads, *model.parameters())]


def test_a_training_step() -> None:
    for found, expected in zip(trained("cuda"), trained("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_fused_and_foreach_adamw() -> None:
    def step(device: str, **options: bool) -> Tensor:
        weight = torch.nn.Parameter(normal(4, 5).to(device))
        optimizer = torch.optim.AdamW([weight], lr=0.1, **options)
        (weight**2).sum().backward()
        optimizer.step()
        return weight.detach().cpu()

    expected = step("cpu", foreach=False)
    torch.testing.assert_close(step("cuda", fused=True), expected)
    torch.testing.assert_close(step("cuda", foreach=True), expected)


def test_threads_have_values() -> None:
    found = []
    thread = threading.Thread(
        target=lambda: found.append((torch.ones(3, device="cuda") * 2).tolist())
    )
    thread.start()
    thread.join()
    assert found == [[2.0, 2.0, 2.0]]


# ---- a Triton kernel of the project ------------------------------------------------------------


def test_triton_kernels_of_the_log_probs() -> None:
    from sg_rlhf.algo.log_probs import fused_log_probs, online_softmax, triton_softmax

    hidden, weight = normal(6, 8), normal(4099, 8, seed=1)
    index = torch.tensor([0, 5, 4098, 7, 2047, 2048])

    def compute(device: str, kernel: online_softmax.BlockKernel) -> list[Tensor]:
        h, w = (each.clone().to(device).requires_grad_() for each in (hidden, weight))
        log_probs, entropy = fused_log_probs.selected_log_probs(
            h, w, index.to(device), with_entropy=True, kernel=kernel
        )
        assert entropy is not None and h.grad is None
        (log_probs.sum() + entropy.sum()).backward()
        return [each.detach().cpu() for each in (log_probs, entropy, h.grad, w.grad)]

    found = compute("cuda", triton_softmax.KERNEL)
    expected = compute("cpu", online_softmax.TORCH_KERNEL)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
