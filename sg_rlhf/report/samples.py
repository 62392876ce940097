"""Samples for the page: which ones, as compact columns, and how probable their tokens are."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from sg_rlhf.report.runs import Group, Row, Run, number
from sg_rlhf.report.text import one_line, visible
from sg_rlhf.report.weighting import RunWeighting, weighting_of
from sg_rlhf.weights.token_gradients import REASONS, gradient_reasons

#: Below a log-probability of -20 (p = 2e-9) nothing is told apart.
LOWEST_LOG_PROB = -20.0


def choose(samples: list[Row], limit: int) -> list[Row]:
    """At most ``limit`` samples: all of a rollout together, rollouts spread evenly over the run.

    The first and the last rollout are kept if two fit; a rollout larger than the limit is cut.
    """
    if len(samples) <= limit:
        return samples
    by_step: dict[int, list[Row]] = defaultdict(list)
    for row in samples:
        by_step[row["global_step"]].append(row)
    steps = sorted(by_step)
    largest = max(len(rows) for rows in by_step.values())
    wanted = max(1, min(len(steps), limit // largest))
    last = len(steps) - 1
    picked = [last] if wanted == 1 else [round(i * last / (wanted - 1)) for i in range(wanted)]
    return [row for index in picked for row in by_step[steps[index]]][:limit]


class _Table:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(visible(text))
        return self._index[text]


def payload(runs: list[Run], limit: int) -> dict[str, Any]:
    """What the sample browser reads, as columns; texts and token pieces are numbers into tables.

    Numbers of tokens are integers, null where they are not known: ``logp`` is -1000 log p, ``w``
    1000 w, ``entropy`` 1000 times the entropy in nats, ``update`` 1000 times the log-prob in the
    update minus log p, ``engine`` the engine's minus log p in 1e-5. ``why`` has a letter per token
    (:mod:`sg_rlhf.weights.token_gradients`). ``rewards`` are those of all responses to the prompt.
    ``between`` has (number of tokens before it, text) of each text that an environment wrote.
    ``text`` is the dialogue of a search run, or the response where its tokens do not spell it (a
    character split over tokens), else null.
    """
    texts, pieces = _Table(), _Table()
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "run", "step", "reward", "correct", "advantage", "prompt", "label", "text", "tokens",
            "logp", "w", "why", "entropy", "engine", "update", "rewards", "between",
        )
    }  # fmt: skip
    described, share = [], max(1, limit // len(runs))
    for index, run in enumerate(runs):
        weighting = weighting_of(run)
        chosen = choose(run.samples, share)
        described.append(_described(run, weighting, len(chosen)))
        for row in chosen:
            columns["run"].append(index)
            for name, value in _columns_of(row, weighting, texts, pieces).items():
                columns[name].append(value)
    return {
        "runs": described, "texts": texts.texts, "pieces": pieces.texts, "reasons": dict(REASONS),
        "samples": columns,
    }  # fmt: skip


def _described(run: Run, weighting: RunWeighting, shown: int) -> dict[str, Any]:
    rule = weighting.rule
    return {
        "name": run.name,
        "group": run.setting("rollout.n_samples_per_prompt"),
        "weighting": one_line(weighting.label),
        "bounds": [round(w, 4) for w in rule.limits()] if rule else None,
        "shown": shown,
        "total": len(run.samples),
    }


def _columns_of(row: Row, weighting: RunWeighting, texts: _Table, pieces: _Table) -> dict[str, Any]:
    tokens = row["tokens"]
    log_probs = [min(0.0, max(LOWEST_LOG_PROB, float(v))) for v in row["log_probs"]]
    advantage = number(row, "advantage")
    engine, update = (row.get(name) for name in ("engine_log_probs", "update_log_probs"))
    weights, why = None, None
    if advantage == 0:
        why = "a" * len(tokens)
    if rule := weighting.rule:
        weights = [round(1000 * w) for w in rule.weights(log_probs)]
        why = gradient_reasons(rule, log_probs, advantage, update, engine)
    text = row["dialogue"] or row["response"]
    return {
        "step": row["global_step"],
        "reward": _rounded(number(row, "reward")),
        "correct": _rounded(number(row, "correct")),
        "advantage": _rounded(advantage),
        "prompt": texts.add(row["prompt"]),
        "label": texts.add(row["label"]),
        "text": None if text == "".join(tokens) else texts.add(text),
        "tokens": [pieces.add(token) for token in tokens],
        "logp": [round(-1000 * v) for v in log_probs],
        "w": weights,
        "why": why,
        "entropy": _scaled(row.get("entropies")),
        "engine": _scaled(_minus(engine, row["log_probs"]), 1e5),
        "update": _scaled(_minus(update, row["log_probs"])),
        "rewards": row.get("group_rewards"),
        "between": [(before, texts.add(text)) for before, text in row.get("environment", ())],
    }


def _minus(values: list[float] | None, others: list[float]) -> list[float] | None:
    return None if values is None else [a - b for a, b in zip(values, others, strict=True)]


def _scaled(values: list[float] | None, by: float = 1000.0) -> list[int] | None:
    return None if values is None else [round(by * value) for value in values]


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def probability_histogram(group: Group, bins: int = 20) -> tuple[list[float], str]:
    """(share of tokens in equal bins of p, where they come from); all 0 if nothing is known."""
    counts = [0.0] * bins
    for run in group.runs:
        for row in run.steps:
            logged = row.get("sg/prob_hist")
            if isinstance(logged, list) and len(logged) == bins:
                counts = [a + float(b or 0) for a, b in zip(counts, logged, strict=True)]
    source = "every token trained on"
    if not sum(counts):
        source = "tokens of samples.jsonl"
        for run in group.runs:
            for row in run.samples:
                for log_prob in row["log_probs"]:
                    p = math.exp(min(0.0, log_prob))
                    counts[min(bins - 1, int(p * bins))] += 1
    total = sum(counts)
    return ([count / total for count in counts] if total else counts), source
