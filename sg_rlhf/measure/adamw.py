"""The step that AdamW makes of a gradient, in units of the learning rate.

    g~    = g * min(1, max_norm / ||g||)                    the clipped gradient
    m_t   = beta1 m_{t-1} + (1 - beta1) g~_t                m_hat = m_t / (1 - beta1^t)
    v_t   = beta2 v_{t-1} + (1 - beta2) g~_t^2              v_hat = v_t / (1 - beta2^t)
    u_t   = m_hat / (sqrt(v_hat) + eps)                     theta moves by -lr u_t

(arXiv 1711.05101, Algorithm 2; clipping as ``torch.nn.utils.clip_grad_norm_`` and DeepSpeed do it.)
A factor c of every gradient is a factor of m_hat and of sqrt(v_hat) alike: up to eps, and while
max_norm leaves the gradients alone, u does not change. Weight decay is left out: it moves the
parameters by -lr wd theta whatever the gradient is.

Shape suffix: ``D`` all parameters as one vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdamW:
    """The optimizer's constants; max_norm None or 0 clips nothing. Defaults: configs/base.yaml.

    Raises:
        ValueError: betas outside [0, 1), or eps or max_norm below 0.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas!r}: expected two numbers from 0 to below 1")
        for name in ("eps", "max_norm"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value!r}: expected a finite number, 0 or more")

    def clips(self, norm: float) -> bool:
        """Whether a gradient of this norm is shortened."""
        return bool(self.max_norm) and norm > (self.max_norm or 0.0)

    def clipped(self, gradient_D: Tensor) -> Tensor:
        """The gradient at a norm of max_norm at most."""
        norm = float(torch.linalg.vector_norm(gradient_D, dtype=torch.float64))
        if not self.clips(norm):
            return gradient_D
        return gradient_D * ((self.max_norm or 0.0) / (norm + 1e-6))


class Moments:
    """AdamW's two moments after ``steps`` gradients at fixed parameters."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self.steps = 0
        self._first_D: Tensor | None = None
        self._second_D: Tensor | None = None

    def add(self, gradient_D: Tensor) -> None:
        """Add a gradient to the moments, after clipping it."""
        self._first_D, self._second_D = self._with(gradient_D)
        self.steps += 1

    def update(self, gradient_D: Tensor) -> Tensor:
        """u [D] of AdamW's next step with this gradient; the moments do not change."""
        first_D, second_D = self._with(gradient_D)
        one, two = (1.0 - beta ** (self.steps + 1) for beta in self.optimizer.betas)
        return (first_D / one) / ((second_D / two).sqrt_().add_(self.optimizer.eps))

    def _with(self, gradient_D: Tensor) -> tuple[Tensor, Tensor]:
        clipped_D = self.optimizer.clipped(gradient_D)
        one, two = self.optimizer.betas
        first_D, second_D = (1.0 - one) * clipped_D, (1.0 - two) * clipped_D.square()
        if self._first_D is None or self._second_D is None:
            return first_D, second_D
        return first_D.add_(self._first_D, alpha=one), second_D.add_(self._second_D, alpha=two)
