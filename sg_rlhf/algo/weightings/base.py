"""Base class of token weightings: parameters, inputs besides p, weights and bounds.

torch is imported inside functions, so that checking a recipe takes milliseconds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sg_rlhf.algo.parameters import ParameterError, Parameters, choice, switch

if TYPE_CHECKING:
    from torch import Tensor

#: Weights closer together than this are one weight: float32 could hardly tell them apart.
CONSTANT_TOLERANCE = 1e-6
_GRID_POINTS = 1025
_MEAN_POINTS = 65537


class ConstantWeightError(ValueError):
    """The weight is the same for every token: plain GRPO under another name."""


@dataclass(frozen=True)
class TokenContext:
    """Inputs of a weighting other than p, for each sampled token. None has a gradient.

    Attributes:
        old_log_probs: [B, T], log-probs of the policy that sampled, as the trainer computes them.
        advantages: [B, T].
        entropy: [B, T], of the current policy at the position, in nats.
        keys: int64 [B, T], one per token of a rollout, of :func:`token_keys`.
        engine_log_probs: [B, T], log-probs as the rollout engine computed them.
        eps: (eps_low, eps_high), the PPO clip range.
        entropy_threshold: a scalar for the whole rollout, see ``top_entropy``.
        surprisal_cuts: [2], for the whole rollout, see ``stare``.
        mean_weight: what ``normalize=batch_mean`` divides by; None for the mean of the batch. With
            gradient accumulation or data parallelism it must be the mean over the whole optimizer
            step: add :func:`~sg_rlhf.algo.token_weights.weight_sum_and_count` over micro-batches
            and ranks, and divide.
    """

    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    entropy: Tensor | None = None
    keys: Tensor | None = None
    engine_log_probs: Tensor | None = None
    eps: tuple[float, float] | None = None
    entropy_threshold: Tensor | float | None = None
    surprisal_cuts: Tensor | None = None
    mean_weight: Tensor | float | None = None

    def require(self, name: str, weighting: str) -> Tensor:
        """One of the tensors, detached; ValueError if it is None."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"weighting {weighting}: expected {name} of each token, got None")
        return value.detach()

    def old_p(self, like: Tensor, weighting: str) -> Tensor:
        """p_old, probabilities under the policy that sampled, in the dtype of ``like``."""
        return self.require("old_log_probs", weighting).to(like.dtype).clamp(max=0.0).exp()


@dataclass(frozen=True, kw_only=True)
class Weighting(Parameters):
    """One token weighting: w = ``weights(p)``, held constant in the gradient by default.

    A subclass is a frozen dataclass with its parameters as fields (``sg_rlhf.algo.parameters``),
    its formula in the first line of its docstring, ``source``, ``uses`` (the fields of
    ``TokenContext`` that it reads) and ``weights``; ``bounds`` and ``uniform_mean`` as well where
    the weight is no function of p alone. docs/tutorials/2_first_weighting.md writes one.

    Raises ``ParameterError`` for a value out of range, and ``ConstantWeightError`` for a weight
    that is the same for every token, unless allow_constant is set.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    uses: ClassVar[tuple[str, ...]] = ()
    #: Whether a weight that is 1 everywhere is what the name says.
    constant_by_name: ClassVar[bool] = False

    placement: str = choice(
        "inside", ("inside", "outside"), "weight inside the PPO clip (Eq. 13) or outside it"
    )
    normalize: str | None = choice(
        None,
        (None, "batch_mean"),
        "batch_mean divides by the rollout's mean weight, under its own policy",
    )
    probability: str = choice(
        "trainer",
        ("trainer", "engine"),
        "whose p the weight reads: the trainer's, now, or the engine's, when it sampled",
    )
    stop_gradient: bool = switch(
        True, "hold w constant in the gradient (Eq. 19); false: w's own gradient counts (Eq. 10)"
    )
    allow_constant: bool = switch(False, "allow a weight that takes a single value (plain GRPO)")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def weights(self, p_BT: Tensor, context: TokenContext) -> Tensor:
        """The weights of sampled tokens: [B, T], 0 or more, in the dtype of ``p_BT``.

        ``p_BT``: in [0, 1], float32 or float64. ``context``: what else the weighting reads.
        """
        raise NotImplementedError

    def prepare(self, context: TokenContext, mask_BT: Tensor) -> TokenContext:
        """The context, completed by what this weighting computes from all tokens of the batch."""
        return context

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stop_gradient and (self.normalize or self.probability == "engine"):
            raise ParameterError(
                "stop_gradient", False, "true with normalize=batch_mean or probability=engine"
            )
        if self.normalize and "entropy" in self.uses:
            raise ParameterError(
                "normalize",
                self.normalize,
                f"null with {self.name}, whose mean is known only after "
                "the update has seen every token",
            )
        self._check_not_constant()

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of :class:`TokenContext` that must not be None."""
        return (*self.uses, "engine_log_probs") if self.probability == "engine" else self.uses

    @property
    def is_curve(self) -> bool:
        """Whether the weight is a function of p alone, so that a curve shows it."""
        return not self.uses

    def curve(self, p: Tensor) -> Tensor:
        """w at each p, where ``is_curve``."""
        return self.weights(p, TokenContext())

    def bounds(self) -> tuple[float, float]:
        """(min, max) of w over p in [0, 1] and whatever else it reads; from a grid of 1/1024."""
        return _bounds_on_grid(self)

    def uniform_mean(self) -> float | None:
        """Mean of w over p uniform on (0, 1) at r = 1; None where p alone does not give it.

        Trapezoidal rule over 65,536 intervals. A property of the curve and not of any policy, whose
        tokens crowd near p = 1: a run's own mean is its metric ``weight_mean``.
        """
        return _mean_on_grid(self) if self.is_curve else None

    def own_parameters(self) -> dict[str, Any]:
        """name: value of the parameters that only this weighting has."""
        shared = Weighting.ranges()
        return {k: v for k, v in self.parameters().items() if k not in shared}

    def formula(self) -> str:
        """The formula with its values, for printed texts; by default the docstring's first line."""
        values = [f"{name} = {_shown(value)}" for name, value in self.own_parameters().items()]
        return ", ".join([self.summary(), *values])

    def describe(self) -> str:
        """One line: which weighting this is."""
        if self.constant_by_name:
            return f"{self.name}: w = 1"
        of_engine = ", p of the rollout engine" if self.probability == "engine" else ""
        return f"{self.label}: {self.formula()}{of_engine}, {self.placement} the PPO clip"

    @property
    def label(self) -> str:
        """The name, and the settings that belong to it."""
        return self.name

    before_clip_label: ClassVar[str] = "before the clip to [L, U]"

    def before_clip(self, p: Tensor) -> Tensor | None:
        """w before a clip that the weighting itself has, for a plot; None without one."""
        return None

    def levels(self) -> dict[str, float]:
        """Label: weight of the lines that a plot should show."""
        return {}

    def _check_not_constant(self) -> None:
        if self.allow_constant or self.constant_by_name:
            return
        low, high = self.bounds()
        if high - low <= CONSTANT_TOLERANCE:
            values = " ".join(f"{k}={_shown(v)}" for k, v in self.own_parameters().items())
            raise ConstantWeightError(
                f"{self.name} {values}: every token would get the weight {low:g}, which is plain "
                f"GRPO{'' if low == 1 else ' at another scale'}; expected a weight that varies "
                "with p, or allow_constant=true to run it anyway"
            )


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.lru_cache(maxsize=256)
def _bounds_on_grid(weighting: Weighting) -> tuple[float, float]:
    weights = weighting.curve(grid(0.0, 1.0))
    return float(weights.min()), float(weights.max())


@functools.lru_cache(maxsize=256)
def _mean_on_grid(weighting: Weighting) -> float:
    import torch

    p = grid(0.0, 1.0, _MEAN_POINTS)
    return float(torch.trapezoid(weighting.curve(p), p))


def grid(start: float, end: float, points: int = _GRID_POINTS) -> Tensor:
    """Equal steps from start to end, float64 on the CPU."""
    import torch

    return torch.linspace(start, end, points, dtype=torch.float64, device="cpu")
