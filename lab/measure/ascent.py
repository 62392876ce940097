"""Sharpness: how far a loss can rise within a ball around the parameters.

    S(rho) = max over ||e||_2 <= rho of L(theta + e) - L(theta)    sharpness in Eq. 14
    S(rho) ~ rho * ||grad L(theta)||_2                             its first-order surrogate, Eq. 15

(arXiv 2511.00066, after SAM, arXiv 2010.01412.) L is a loss, to be minimised; the paper's L_S is
the surrogate, which training maximises. The norm is taken over all given parameters
together, so rho is in the parameters' own unit and has no natural scale: a network whose layers
are rescaled without changing its function has another S at the same rho. ``parameter_norm`` gives
||theta|| for a radius relative to it, which undoes a common factor and no more.

Everything is deterministic if the loss is: no random start, no random direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: The loss at the parameters' present values, in scalar pieces whose sum is L: one per micro-batch,
#: so that the graph of only one is alive at a time. Made anew at each call; called about
#: ``steps + 1`` times, the last time without a gradient.
LossPieces = Callable[[], Iterable[Tensor]]

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class AscentStep:
    """One point of the ascent.

    rise: L(theta + e) - L(theta). radius: ||e||_2 as applied, after the parameters' rounding; at
    most rho up to that rounding. step: length of the step that led here, before the projection.
    """

    rise: float
    radius: float
    step: float


@dataclass(frozen=True)
class Sharpness:
    """Result of the ascent for one radius; ``loss`` and ``grad_norm`` are those at the centre."""

    rho: float
    loss: float
    grad_norm: float
    steps: tuple[AscentStep, ...]

    @property
    def best_step(self) -> int:
        """The step with the largest rise, counted from 1; 0 is the centre, if all of them fell."""
        rises = [0.0, *(step.rise if math.isfinite(step.rise) else 0.0 for step in self.steps)]
        return max(range(len(rises)), key=rises.__getitem__)

    @property
    def value(self) -> float:
        """The largest rise found, at least 0: a lower bound of S(rho)."""
        return self.steps[self.best_step - 1].rise if self.best_step else 0.0

    @property
    def first_order(self) -> float:
        """rho * ||grad L(theta)||_2, Eq. 15."""
        return self.rho * self.grad_norm


def parameter_norm(params: Sequence[Tensor]) -> float:
    """||theta||_2 over all parameters together, summed in float64."""
    return _norm([param.detach() for param in params])


def sharpness(
    params: Sequence[Tensor],
    loss_pieces: LossPieces,
    rho: float,
    *,
    steps: int = 10,
    on_step: Callable[[], object] | None = None,
) -> Sharpness:
    """A lower bound of S(rho) by projected ascent along the normalised gradient.

    The first point is rho * g / ||g||, SAM's, whose rise is rho * ||g|| where L is linear. Then
    e <- P(e + s * g(theta + e) / ||g(theta + e)||), where P scales a point outside the ball back to
    its surface. s starts at rho and is halved whenever the loss fell, which also finds maxima
    inside the ball. The best of all points counts.

    **It is a lower bound**, of the maximum and of nothing else: ascent can end in a local maximum.
    On a convex quadratic it reaches the maximum unless the gradient at theta has no component along
    the sharpest direction. It cannot leave a theta whose gradient is exactly zero: no step, value
    0.

    Args:
        params: leaves with a gradient, each given once, float32 or float64. bfloat16 is refused: an
            entry moves by about rho / sqrt(d), which is far below its rounding. float32 resolves
            rises down to about 1e-6 * |L|; below that use float64.
        loss_pieces: see ``LossPieces``.
        rho: radius, above 0, in the unit of the parameters.
        steps: points that are evaluated, at least 1.

    Memory: beside the parameters one copy of them (theta) and their gradient. The parameters are
    moved in place and are bit for bit theta again afterwards, also after an error; their ``.grad``
    is used and is None afterwards.

    Raises:
        ValueError: an argument out of range, or a loss or gradient at theta that is not finite.
    """
    _check(params, rho, steps)
    centre = [param.detach().clone() for param in params]
    tick = on_step or (lambda: None)
    try:
        loss = _evaluate(params, loss_pieces, backward=True)
        grad_norm = here = _gradient_norm(params)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise ValueError(f"loss {loss} with gradient norm {grad_norm} at the centre")
        tick()
        taken: list[AscentStep] = []
        step, last = rho, 0.0
        while len(taken) < steps and math.isfinite(here) and here > 0.0:
            radius = _move(params, centre, rho, step / here)
            more = len(taken) + 1 < steps
            rise = _evaluate(params, loss_pieces, backward=more) - loss
            taken.append(AscentStep(rise, radius, step))
            tick()
            if not math.isfinite(rise):
                break
            if more:
                here = _gradient_norm(params)
            if rise < last:
                step /= 2
            last = rise
        return Sharpness(rho, loss, grad_norm, tuple(taken))
    finally:
        with torch.no_grad():
            for param, origin in zip(params, centre, strict=True):
                param.copy_(origin)
                param.grad = None


def _check(params: Sequence[Tensor], rho: float, steps: int) -> None:
    if not (math.isfinite(rho) and rho > 0):
        raise ValueError(f"rho={rho!r}: expected a finite number above 0")
    if steps < 1:
        raise ValueError(f"steps={steps!r}: expected 1 or more")
    if not params or len({id(param) for param in params}) < len(params):
        raise ValueError("params: expected at least one parameter, and each only once")
    for param in params:
        if not (param.is_leaf and param.requires_grad and param.dtype in _DTYPES):
            raise ValueError(
                f"params: {param.dtype} of shape {tuple(param.shape)}: expected leaves that require"
                " a gradient, float32 or float64"
            )


def _evaluate(params: Sequence[Tensor], loss_pieces: LossPieces, *, backward: bool) -> float:
    """L at the present values; with backward its gradient is in ``.grad``, in place of any old."""
    for param in params:
        param.grad = None
    values = []
    with torch.set_grad_enabled(backward):
        for piece in loss_pieces():
            if backward and piece.requires_grad:
                piece.backward()  # type: ignore[no-untyped-call]
            values.append(piece.item())
    return math.fsum(values)


def _move(params: Sequence[Tensor], centre: Sequence[Tensor], rho: float, factor: float) -> float:
    """params <- centre + P(params - centre + factor * grad); returns ||params - centre||."""
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.add_(param.grad, alpha=factor)
        pairs = list(zip(params, centre, strict=True))
        radius = _norm(param - origin for param, origin in pairs)
        if radius > rho:
            for param, origin in pairs:
                param.sub_(origin).mul_(rho / radius).add_(origin)
            radius = _norm(param - origin for param, origin in pairs)
    return radius


def _gradient_norm(params: Sequence[Tensor]) -> float:
    return _norm(param.grad for param in params if param.grad is not None)


def _norm(tensors: Iterable[Tensor]) -> float:
    """The 2-norm over all entries, summed in float64 one tensor at a time."""
    return math.sqrt(
        math.fsum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)
    )
