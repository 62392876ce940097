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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class AdamW:
    """The optimizer's constants; max_norm None or 0 clips nothing. Defaults: configs/base.yaml."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_norm: float | None = 1.0

    def clips(self, norm: float) -> bool:
        """Whether a gradient of this norm is shortened."""
        return bool(self.max_norm) and norm > (self.max_norm or 0.0)


class Moments:
    """AdamW's two moments after ``steps`` gradients at fixed parameters."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer = optimizer
        self.steps = 0
        self._moments: list[Tensor] = []

    def add(self, gradient_D: Tensor) -> None:
        """Add a gradient to the moments, after clipping it."""
        self._moments = self._moments or [torch.zeros_like(gradient_D) for _ in range(2)]
        self._step(gradient_D, *self._moments)
        self.steps += 1

    def update(self, gradient_D: Tensor) -> Tensor:
        """u [D] of AdamW's next step with this gradient; the moments do not change."""
        moments = self._moments or [torch.zeros_like(gradient_D)] * 2
        return self._step(gradient_D, *(moment.clone() for moment in moments))

    def _step(self, gradient_D: Tensor, first_D: Tensor, second_D: Tensor) -> Tensor:
        """torch's step from theta = 0 with lr 1 is -u; changes the moments in place."""
        theta_D = torch.zeros_like(gradient_D)
        norm = float(torch.linalg.vector_norm(gradient_D, dtype=torch.float64))
        if self.optimizer.clips(norm):
            gradient_D = gradient_D * ((self.optimizer.max_norm or 0.0) / (norm + 1e-6))
        one, two = self.optimizer.betas
        adamw(
            [theta_D], [gradient_D], [first_D], [second_D], [],
            [torch.tensor(float(self.steps))], amsgrad=False, beta1=one, beta2=two, lr=1.0,
            weight_decay=0.0, eps=self.optimizer.eps, maximize=False,
        )  # fmt: skip
        return theta_D.neg_()
