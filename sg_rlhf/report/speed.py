"""Measured speed of a run, and its share of the hardware's peak.

Work is counted by the plan's formulas (`sg_rlhf.plan.time`) from the lengths that the run logged.
Each figure is the median over the rollout steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sg_rlhf.config import ConfigError
from sg_rlhf.machine.hardware import Hardware, of_gpus
from sg_rlhf.machine.names import known_gpu
from sg_rlhf.plan.run_shape import RunShape, run_shape
from sg_rlhf.plan.time import decoding, update_flops
from sg_rlhf.report.runs import Row, Run, number
from sg_rlhf.report.text import one_line

PARTS = ("sampling", "update")


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures of :func:`speed_of` for the terminal; "-" for what the rows do not say."""
    sampling, update = (_tokens(figures[f"{part}_tokens_per_second"]) for part in PARTS)
    found = [f"  speed               sampling {sampling}, update {update}"]
    if "no_peak" in figures:
        return [*found, f"                      {figures['no_peak']}"]
    mfu, bandwidth = _share(figures["update_mfu"]), _share(figures["decoding_bandwidth_share"])
    shares = f"update {mfu} of the FLOPs (MFU), decoding {bandwidth} of the memory bandwidth"
    return [*found, f"  of the peak         {shares} ({figures['peak_of']})"]


def _tokens(per_second: float) -> str:
    return f"{per_second:,.0f} tokens/s" if math.isfinite(per_second) else "-"


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "-"


def speed_of(run: Run) -> dict[str, Any]:
    """Measured figures of a run, NaN for what its rows do not say.

    - ``sampling_tokens_per_second``: response tokens of all engines.
    - ``update_tokens_per_second``: of all ranks, prompts and responses, each epoch counted.
    - ``update_mfu``: FLOPs of forward and backward passes over those at the peak of the GPUs.
    - ``decoding_bandwidth_share``: bytes that an engine's GPU reads in decoding over those that it
      could read while sampling.
    - ``peak_of``: the GPUs; or ``no_peak``: why there are no shares.
    """
    shape, why = _shape(run)
    # The engines of an asynchronous run also sample while no row counts it.
    sampled = [] if shape is None or shape.samples_ahead else _with_generated(run.metrics)
    epochs = shape.epochs if shape else math.nan
    found: dict[str, Any] = {
        "sampling_tokens_per_second": _median(n / _sampling_seconds(row) for row, n in sampled),
        "update_tokens_per_second": _median(
            epochs * _processed(row) / _update_seconds(row) for row in run.metrics
        ),
    }
    if shape is None:
        return found | {"no_peak": why}
    engine = run.environment.get("engine")
    device = one_line(str(engine.get("device") or "")) if isinstance(engine, dict) else ""
    kind = known_gpu(device)
    if kind is None:
        named = {"": "the device", "cpu": "a CPU"}.get(device, device)
        return found | {"no_peak": f"no peak known for {named}"}
    hardware = of_gpus(kind, nodes=shape.nodes, gpus_per_node=shape.gpus_per_node)
    return found | {
        "update_mfu": _median(_mfu(row, shape, hardware) for row in run.metrics),
        "decoding_bandwidth_share": _median(
            _bandwidth(row, n, shape, hardware) for row, n in sampled
        ),
        "peak_of": f"{shape.ranks} x {hardware.type.name}",
    }


def _shape(run: Run) -> tuple[RunShape | None, str]:
    """The sizes of the run, or why they are not known."""
    if run.config is None:
        return None, "no share of the peak: this version does not read the run's config.yaml"
    try:
        shape = run_shape(run.config)
    except (ConfigError, ValueError) as error:
        return None, f"no share of the peak: {error}"
    if shape is None:
        model = run.config.value("actor.model_name_or_path")
        return None, f"no share of the peak: the shape of {model} is not known here"
    return shape, ""


def _median(values: Iterable[float]) -> float:
    """NaN of no numbers."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _with_generated(rows: list[Row]) -> list[tuple[Row, float]]:
    """Rows, and the response tokens that their rollouts sampled, dropped ones included."""
    found, last = [], (0.0, 0.0)
    for row in rows:
        step, sampled = number(row, "global_step"), number(row, "progress/generated_tokens")
        if step == last[0] + 1 and sampled > last[1]:
            found.append((row, sampled - last[1]))
        last = (step, sampled)
    return found


def _processed(row: Row) -> float:
    """Tokens of a rollout, prompts and responses."""
    return number(row, "rollout/num_samples") * number(row, "total_length")


def _sampling_seconds(row: Row) -> float:
    return _seconds(row, "generation", "engines_wake")


def _update_seconds(row: Row) -> float:
    return _seconds(row, "ppo_train", "update_old_log_probs", "update_reference_log_probs")


def _seconds(row: Row, section: str, *without: str) -> float:
    """Seconds of a section without some of its subsections; NaN where they are none."""
    inner = (number(row, f"timing/{name}") for name in without)
    found = number(row, f"timing/{section}") - sum(s for s in inner if math.isfinite(s))
    return found if found > 0 else math.nan


def _mfu(row: Row, shape: RunShape, hardware: Hardware) -> float:
    flops = update_flops(shape, number(row, "rollout/num_samples"), number(row, "total_length"))
    return flops / (_update_seconds(row) * shape.ranks * hardware.type.tflops * 1e12)


def _bandwidth(row: Row, tokens: float, shape: RunShape, hardware: Hardware) -> float:
    mean = number(row, "rollout/response_length_mean")
    prompt, longest = number(row, "total_length") - mean, number(row, "rollout/response_length_max")
    if not shape.engines or not mean > 0 or not math.isfinite(prompt + longest):
        return math.nan
    sampled = replace(shape, prompts=round(tokens / mean), group=1)
    _, read = decoding(sampled, hardware, prompt=prompt, mean=mean, longest=longest)
    return read / (_sampling_seconds(row) * hardware.type.bandwidth * 1e9)
