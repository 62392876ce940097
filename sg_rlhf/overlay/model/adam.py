"""DeepSpeed's Adam with the kernels of PyTorch's own wheel, so that nothing is compiled.

DeepSpeed compiles its Adam at first use: ``fused_adam`` with nvcc (without CUDA with g++), and with
``ds.adam_offload`` ``cpu_adam`` with g++ against the headers and libraries of a CUDA toolkit of
torch's version. The ones for host memory also count the powers b^t as they go, in float32: a
process that resumes computes them anew, and its next step is rounded otherwise. DeepSpeed's
optimizer classes stay, with their states, checkpoints and offloading; only what they call to update
the tensors comes from here: ``torch.optim``'s fused Adam. Both compute, with decoupled decay,

    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) - lr wd p

(AdamW, arXiv 1711.05101) and differ in rounding alone; on a CPU in the same time
(bench/adam_on_cpu.py).
"""

from __future__ import annotations

from typing import Any


def update(
    lists: list[list[Any]],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """One Adam step of some tensors, in place.

    Args:
        lists: gradients, parameters, first moments, second moments; of a tensor all four have one
            shape, dtype and device.
        step: the number of this step, from 1.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the denominator.
        weight_decay: of the parameters.
        decoupled: AdamW; otherwise the decay is added to the gradient.
        bias_correction: must be true.

    Raises:
        ValueError: without bias correction, which torch's kernel always has.
    """
    import torch
    from torch.optim import adam, adamw

    if not bias_correction:
        raise ValueError("bias_correction=false: torch's fused Adam has no such variant")
    gradients, parameters, first, second = lists
    if not parameters:
        return
    # The kernel counts each of them up by one.
    steps = torch.full(
        (len(parameters),), step - 1, dtype=torch.float32, device=parameters[0].device
    )
    rule = adamw.adamw if decoupled else adam.adam
    with torch.no_grad():
        rule(
            parameters, gradients, first, second, [], list(steps.unbind()),
            fused=True, amsgrad=False, maximize=False,
            lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
        )  # fmt: skip


class FusedAdamBuilder:
    """In place of DeepSpeed's class of this name: what ``FusedAdam`` loads."""

    def load(self, verbose: bool = False) -> FusedAdamBuilder:
        """The kernel: nothing to build."""
        return self

    def multi_tensor_adam(
        self,
        _chunk_size: int,
        _overflow: Any,
        lists: list[list[Any]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        """Apex's function of this name; ``mode`` 1 is AdamW."""
        update(
            lists, step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay,
            decoupled=mode == 1, bias_correction=bool(bias_correction),
        )  # fmt: skip


class CPUAdamBuilder:
    """In place of DeepSpeed's class of this name: what ``DeepSpeedCPUAdam`` loads."""

    def __init__(self) -> None:
        self.decoupled: dict[int, bool] = {}

    def load(self, verbose: bool = False) -> CPUAdamBuilder:
        """The kernel: nothing to build."""
        return self

    def create_adam(self, optimizer: int, *settings: Any) -> None:
        """An optimizer: its learning rate, betas, eps, decay, whether AdamW, whether to log."""
        self.decoupled[optimizer] = bool(settings[5])

    def destroy_adam(self, optimizer: int) -> None:
        """The end of it."""
        self.decoupled.pop(optimizer, None)

    def adam_update(
        self,
        optimizer: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        parameter: Any,
        gradient: Any,
        first: Any,
        second: Any,
    ) -> None:
        """One step of one tensor in host memory."""
        update(
            [[gradient], [parameter], [first], [second]], step,
            lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay,
            decoupled=self.decoupled[optimizer], bias_correction=bias_correction,
        )  # fmt: skip
