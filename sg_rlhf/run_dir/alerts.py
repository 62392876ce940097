"""Alerts: signs in a run's metrics that it goes wrong while it still runs.

A rule that compares with the start needs 10 rows, one that takes a mean 5, a spike 11; and
``nothing_learned`` and ``tokens_without_text`` begin with the first. Each rule reads rows of
``metrics.jsonl`` alone, so a resumed run finds the same alerts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

#: Rows that a mean is taken over: the first ones are the start, the last ones are now.
WINDOW = 5
#: Rows before a gradient norm that it is compared with, and how many there must be.
NORMS, LEAST_NORMS = 20, 10
#: Limits of the rules; docs/metrics.md explains each.
ENTROPY_LEFT = 0.05
TRUNCATED = 0.3
FLAT = 0.9
SPIKE = 5.0
MISMATCH, MISMATCH_GROWTH = 1e-3, 5.0
GARBLED = 0.2


#: The metrics that the rules read.
KEYS = (
    "entropy_loss", "rollout/truncated_rate", "rollout/frac_reward_zero_std",
    "actor_grad_norm_max", "sg/mismatch_kl_k3", "garbled/mixed_script_frac",
    "rollout/frac_tokens_without_text",
)  # fmt: skip


class Alert(NamedTuple):
    """One alert.

    Attributes:
        name: of the metric ``alerts/NAME``.
        message: what is seen, and what to do.
    """

    name: str
    message: str


def _values(rows: Sequence[Row], key: str) -> list[float]:
    found = (row.get(key) for row in rows)
    return [float(v) for v in found if isinstance(v, (int, float)) and math.isfinite(v)]


def _start_and_now(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """The means of the first and of the last rows; None before they are apart."""
    values = _values(rows, key)
    if len(values) < 2 * WINDOW:
        return None
    return statistics.fmean(values[:WINDOW]), statistics.fmean(values[-WINDOW:])


def entropy_collapse(rows: Sequence[Row]) -> str | None:
    """Entropy below 5 % of that of the start."""
    found = _start_and_now(rows, "entropy_loss")
    if found is None or not found[1] < ENTROPY_LEFT * found[0]:
        return None
    return (
        f"entropy fell from {found[0]:.3g} to {found[1]:.3g} nats: the policy hardly explores; "
        "lower the learning rate, or raise rollout.temperature"
    )


def length_limit(rows: Sequence[Row]) -> str | None:
    """More than 30 % of the responses end at the token limit."""
    values = _values(rows, "rollout/truncated_rate")[-WINDOW:]
    if len(values) < WINDOW or not statistics.fmean(values) > TRUNCATED:
        return None
    return (
        f"{statistics.fmean(values):.0%} of the responses end at the token limit: raise "
        "rollout.max_new_tokens, or look at samples.jsonl for repetition"
    )


def flat_reward(rows: Sequence[Row]) -> str | None:
    """More than 90 % of the groups have equal rewards, so they have no advantage."""
    values = _values(rows, "rollout/frac_reward_zero_std")[-WINDOW:]
    if len(values) < WINDOW or not statistics.fmean(values) > FLAT:
        return None
    return (
        f"{statistics.fmean(values):.0%} of the groups have equal rewards and train nothing: use "
        "prompts of another difficulty, or algo.dynamic_filtering_enable=true"
    )


def nothing_learned(rows: Sequence[Row]) -> str | None:
    """No group of the run has had different rewards, or every response has reached the limit."""
    flat = _values(rows, "rollout/frac_reward_zero_std")
    truncated = _values(rows, "rollout/truncated_rate")
    is_flat = bool(flat) and min(flat) == 1.0
    share = statistics.fmean(truncated) if truncated else 0.0
    found = ["nothing was learned: no group had different rewards"] * is_flat
    if share == 1.0 or (is_flat and share > TRUNCATED):
        found.append(f"{100 * share:.0f} % of the responses reached the token limit")
    return "; ".join(found) or None


def gradient_spike(rows: Sequence[Row]) -> str | None:
    """A gradient norm above five times the median of the rows before."""
    values = _values(rows, "actor_grad_norm_max")
    before, now = values[-NORMS - 1 : -1], values[-1:]
    if len(before) < LEAST_NORMS or not now[0] > SPIKE * statistics.median(before):
        return None
    return (
        f"gradient norm {now[0]:.3g}, median before {statistics.median(before):.3g}: look at this "
        "step's samples; actor.max_norm limits the update"
    )


def engine_mismatch(rows: Sequence[Row]) -> str | None:
    """KL(engine, trainer) above 1e-3 and five times that of the start."""
    found = _start_and_now(rows, "sg/mismatch_kl_k3")
    if found is None or not found[1] > max(MISMATCH, MISMATCH_GROWTH * found[0]):
        return None
    return (
        f"engine and trainer grow apart: KL {found[0]:.2g} at the start, {found[1]:.2g} now; "
        "set sg.correction, or ds.param_dtype=fp16"
    )


def garbled_text(rows: Sequence[Row]) -> str | None:
    """More than 20 % of the responses mix scripts, and those of the start did not."""
    found = _start_and_now(rows, "garbled/mixed_script_frac")
    if found is None or not found[1] > GARBLED >= 2 * found[0]:
        return None
    return (
        f"{found[1]:.0%} of the responses mix scripts: read samples.jsonl; the engine may have "
        "broken weights"
    )


def tokens_without_text(rows: Sequence[Row]) -> str | None:
    """The model samples ids that the tokenizer does not have."""
    values = _values(rows[-1:], "rollout/frac_tokens_without_text")
    if not values or not values[0] > 0:
        return None
    return (
        f"{100 * values[0]:.2g} % of the sampled tokens have no text: the embedding has rows "
        "behind the tokenizer's last token; call resize_token_embeddings(len(tokenizer)) and "
        "save the model"
    )


RULES: Mapping[str, Callable[[Sequence[Row]], str | None]] = {
    rule.__name__: rule
    for rule in (
        entropy_collapse, length_limit, flat_reward, nothing_learned, gradient_spike,
        engine_mismatch, garbled_text, tokens_without_text,
    )
}  # fmt: skip


def check(rows: Sequence[Row]) -> list[Alert]:
    """The alerts of the last row.

    Args:
        rows: of ``metrics.jsonl`` in their order, the newest last.
    """
    found = ((name, rule(rows)) for name, rule in RULES.items())
    return [Alert(name, message) for name, message in found if message is not None]


def needed(rows: Sequence[Row]) -> list[Row]:
    """The rows that :func:`check` and :func:`begun` need with those to come, with nothing else.

    Of each metric these are the first, the last and the lowest values. So a run of any length keeps
    a fixed number of rows.

    Args:
        rows: of ``metrics.jsonl`` in their order, or the rows that this function returned and those
            after them.
    """
    kept = {len(rows) - 1} if rows else set()
    for key in KEYS:
        values = {i: found[0] for i, row in enumerate(rows) if (found := _values([row], key))}
        indices = list(values)
        kept |= {
            *indices[:WINDOW],
            *indices[-NORMS - 1 :],
            *sorted(indices, key=values.__getitem__)[:1],
        }
    names = {*KEYS, *metrics(())}
    return [{k: v for k, v in rows[i].items() if k in names} for i in sorted(kept)]


def begun(before: Row, alerts: Sequence[Alert]) -> list[Alert]:
    """The alerts of a row that the row before it did not have.

    Args:
        before: with its ``alerts/*``.
    """
    return [alert for alert in alerts if not before.get(f"alerts/{alert.name}")]


def metrics(alerts: Sequence[Alert]) -> dict[str, float]:
    """``alerts/NAME`` of every rule: 1 with an alert, else 0."""
    names = {alert.name for alert in alerts}
    return {f"alerts/{name}": float(name in names) for name in RULES}
