"""Checks of a weighting that is defined outside this package, before anything trains with it."""

from __future__ import annotations

import difflib
import math

from sg_rlhf.algo.parameters import ParameterError, place_of
from sg_rlhf.algo.weightings.base import TokenContext, Weighting

#: The fields of ``TokenContext`` that a weighting may name in ``uses``.
USABLE = ("old_log_probs", "advantages", "entropy", "keys", "engine_log_probs")
_TOLERANCE = 1e-5


def check_class(name: str, cls: type[Weighting]) -> None:
    """ParameterError for a class whose weights cannot be computed, with what to write."""
    place = place_of(cls)

    def refuse(expected: str) -> ParameterError:
        return ParameterError("type", name, expected)

    if cls.weights is Weighting.weights:
        raise refuse(f"a method weights(self, p_BT, context) in {place}")
    if not isinstance(cls.uses, tuple):
        raise refuse(
            f'a tuple of names such as uses = ("advantages",) in {place}, not {cls.uses!r}'
        )
    for used in cls.uses:
        if used not in USABLE:
            near = difflib.get_close_matches(str(used), USABLE, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise refuse(f"uses of {place} to name {', '.join(USABLE)}; {used!r} is none{hint}")
    if cls.uses and cls.bounds is Weighting.bounds:
        raise refuse(
            f"a method bounds(self) in {place} that returns (min, max) of the weight: it depends "
            f"on {', '.join(cls.uses)}, so p alone does not give them"
        )


def check_weights(weighting: Weighting) -> None:
    """Compute the weights of 33 tokens, with a context that has only the fields of ``uses``.

    Raises ValueError if it fails, or a weight is negative, not finite, or outside ``bounds()``.
    """
    import torch

    place = place_of(type(weighting))
    # Points of the grid that the bounds of a curve are taken from.
    p_BT = torch.linspace(0.0, 1.0, 33, device="cpu").reshape(3, 11)
    keys_BT = torch.arange(33, device="cpu").reshape(3, 11)
    known = {
        "old_log_probs": p_BT.flip(1).clamp(min=1e-6).log(),
        "advantages": torch.where(keys_BT % 2 == 0, 1.0, -1.0),
        "entropy": 2 * (1 - p_BT),
        "keys": keys_BT,
        "engine_log_probs": p_BT.clamp(min=1e-6).log(),
    }
    inputs = {name: known[name] for name in weighting.reads}
    context = TokenContext(eps=(0.2, 0.24), **inputs)
    try:
        low, high = map(float, weighting.bounds())
        weights_BT = weighting.weights(p_BT, weighting.prepare(context, torch.ones_like(p_BT)))
    except Exception as error:  # whatever the class does
        missing = ", ".join(name for name in USABLE if name not in inputs)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{place}: its weights cannot be computed: {reason} (context has what uses names; it "
            f"does not name {missing}, which are None)"
        ) from error
    if not isinstance(weights_BT, torch.Tensor) or weights_BT.shape != p_BT.shape:
        shape = getattr(weights_BT, "shape", None)
        shown = type(weights_BT).__name__ if shape is None else f"a tensor of {list(shape)}"
        raise ValueError(
            f"{place}: weights() gave {shown} for p_BT of {list(p_BT.shape)}; expected a tensor of "
            "that shape, one weight per token"
        )
    least, most = float(weights_BT.min()), float(weights_BT.max())
    slack = _TOLERANCE * max(1.0, high)
    # Also false for NaN.
    if not (0 <= low <= least + slack and least >= 0 and most - slack <= high < math.inf):
        raise ValueError(
            f"{place}: weights() gave {least:g} to {most:g}, bounds() ({low:g}, {high:g}); "
            "expected weights of 0 or more (a negative one would reverse the update), within the "
            "bounds"
        )
