"""Compare the updates of several weightings on the same minibatches and parameters.

Training runs of two algorithms differ after their first update, so later differences include
sampling noise. Here every algorithm's gradient is computed at the same parameters on the same
minibatches, sampled and graded as in training, at ratio 1:

    size       ||g|| over the baseline's, minibatch by minibatch: a constant is a scale
    cosine     between both gradients: 1 is the same direction
    spread     std / mean of ||g|| over minibatches, which no scale changes
    peak       largest ||g|| over the median one, likewise

AdamW divides the mean of the gradients by the root of the mean of their squares. A common factor
cancels, unless the norm clip acts. The same figures are therefore given for AdamW's step, in units
of the learning rate:

    g~ = g min(1, max_norm / ||g||),  u = m_hat / (sqrt(v_hat) + eps)

m_hat and v_hat are the bias-corrected moments of --warm-up other minibatches and of this one, by
the same algorithm at the same parameters. Every measured minibatch follows the same warm-up, so
minibatches can be resampled for an interval. A checkpoint's own optimizer state would not do: it
belongs to the algorithm that trained it. Weight decay, which is the same for all, and the KL term
are left out.

docs/results.md explains how to read the numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lab.measure import fixed_batch, options
from lab.measure.adamw import AdamW, Moments
from lab.measure.batch_loss import BatchLoss, Surrogate
from lab.measure.checkpoint import (
    DTYPES,
    MeasureError,
    choose_device,
    load_model,
    load_tokenizer,
)
from lab.measure.fixed_batch import FixedBatch
from lab.measure.minibatch_figures import Measured, Vector, summarise, tables
from lab.measure.rollouts import Sampling, sample_batch
from lab.measure.sharpness import surrogate_of
from sg_rlhf.common.argument_types import non_negative_int, positive_int, progress_bar
from sg_rlhf.config import Config, load_config
from sg_rlhf.tasks.reward import RewardFunc

EXAMPLES = """\
examples:
  the forms of GRPO-SG compared with GRPO, on the shipped tiny model
    sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=160 distinct=names
    python -m lab.measure.minibatch_gradients --model module:sg_rlhf.tiny.kk_tiny \\
        --data data/kk_tiny/train.jsonl --reward domain:kk --batches 30 \\
        --algorithm configs/algorithms/grpo.yaml configs/algorithms/grpo_sg*.yaml
  every checkpoint that a run kept, with the sampling of its recipe
    python -m lab.measure.minibatch_gradients --model runs/a/checkpoints/deepspeed/*_hf \\
        --data data/kk/train.jsonl --config configs/kk/grpo_qwen2.5-3b-instruct.yaml \\
        --algorithm configs/algorithms/grpo.yaml configs/algorithms/grpo_sg.yaml --json out/g.json
"""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, with its long help."""
    parser = options.new_parser("lab.measure.minibatch_gradients", __doc__, EXAMPLES)
    parser.add_argument(
        "--algorithm", nargs="+", required=True, metavar="FILE",
        help="recipes of algorithms (configs/algorithms); the first one is the baseline",
    )  # fmt: skip
    parser.add_argument(
        "--batches", type=positive_int, default=20, metavar="N",
        help="minibatches of --prompts x --group responses, of the next prompts each [20]",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=non_negative_int, default=20, metavar="N",
        help="minibatches of newly sampled responses for AdamW's moments; 0: no updates. With "
        "updates each algorithm takes three times the memory of the model, else one time [20]",
    )  # fmt: skip
    options.add_dtype(parser, "float32", "dtype of parameters and arithmetic")
    return options.parse(parser, argv)


def optimizer_of(config: Config) -> AdamW:
    """AdamW and the norm clip of the recipe; those of configs/base.yaml without one."""
    keys = {"betas": "actor.adam.betas", "eps": "actor.adam.eps", "max_norm": "actor.max_norm"}
    kind = config.value("actor.optim")
    if kind != "adam":
        raise MeasureError(f"actor.optim={kind}: expected adam for the update, or --warm-up 0")
    given: dict[str, Any] = {
        name: config.value(key)
        for name, key in keys.items()
        if config.sources or config.values.get(key) is not None
    }
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return AdamW(**given)


def surrogates(paths: Sequence[str]) -> dict[str, Surrogate]:
    """The loss of each recipe, by its file's name.

    Raises:
        MeasureError: a loss that is not the clipped surrogate with a weight of p, or a name twice.
    """
    found: dict[str, Surrogate] = {}
    for path in paths:
        name = Path(path).stem
        if name in found:
            raise MeasureError(f"--algorithm {path}: a second {name}; expected other file names")
        config = load_config([path], [])
        if config.sg.update != "together":
            raise MeasureError(
                f"--algorithm {path}: sg.update={config.sg.update}: expected together, where a "
                "minibatch has one gradient"
            )
        try:
            found[name] = surrogate_of(config, [])
        except MeasureError as error:
            raise MeasureError(f"--algorithm {path}: {error}") from None
    return found


def gradients(
    model: PreTrainedModel, batch: FixedBatch, losses: Mapping[str, Surrogate], pass_tokens: int
) -> dict[str, Tensor]:
    """Each loss's gradient of a minibatch over all parameters as one vector, [D].

    One forward pass serves them all; its graph is kept until the last one's backward pass.
    """
    params = list(model.parameters())
    plain = BatchLoss(model, batch, None, pass_tokens=pass_tokens)
    centre = plain.centre([*losses.values()])
    functions = {
        name: BatchLoss(model, batch, surrogate, pass_tokens=pass_tokens, centre=centre)
        for name, surrogate in losses.items()
    }
    found: dict[str, Tensor] = {}
    for number, passed in enumerate(plain.forward()):
        for name, function in functions.items():
            parts = torch.autograd.grad(
                function.piece(number, passed), params, retain_graph=True, materialize_grads=True
            )
            vector = torch.cat([part.flatten() for part in parts])
            found[name] = found[name].add_(vector) if name in found else vector
    return found


def compare(
    model: PreTrainedModel,
    batch: FixedBatch,
    losses: dict[str, Surrogate],
    pass_tokens: int,
    moments: Mapping[str, Moments] | None = None,
) -> dict[str, list[Vector]]:
    """For each algorithm, its gradient on this minibatch compared with the first algorithm's.

    Then, if there are moments, the update that AdamW makes of it, compared in the same way.
    """
    found: dict[str, list[Vector]] = {}
    baseline: list[Tensor] = []
    for name, vector in gradients(model, batch, losses, pass_tokens).items():
        vectors = [vector]
        if moments:
            vectors.append(moments[name].update(vector))
        baseline = baseline or vectors
        found[name] = [_beside(*pair) for pair in zip(vectors, baseline, strict=True)]
    return found


def _beside(vector: Tensor, baseline: Tensor) -> Vector:
    norm, other = (
        float(torch.linalg.vector_norm(v, dtype=torch.float64)) for v in (vector, baseline)
    )
    product = float((vector * baseline).sum(dtype=torch.float64))
    return Vector(norm, product / (norm * other) if norm * other else float("nan"))


def warm_up(
    model: PreTrainedModel,
    batches: Iterable[FixedBatch],
    losses: dict[str, Surrogate],
    pass_tokens: int,
    optimizer: AdamW,
) -> dict[str, Moments]:
    """For each algorithm, AdamW's moments of its gradients on these minibatches."""
    moments = {name: Moments(optimizer) for name in losses}
    for batch in batches:
        if any(row.advantage for row in batch.rows):
            for name, vector in gradients(model, batch, losses, pass_tokens).items():
                moments[name].add(vector)
    return moments


def measure(
    args: argparse.Namespace,
    name: str,
    settings: Sampling,
    losses: dict[str, Surrogate],
    reward: RewardFunc | None,
    optimizer: AdamW | None,
) -> tuple[Measured, int]:
    """Every algorithm on every minibatch; and how many minibatches had no gradient at all.

    Raises:
        MeasureError: too few prompts, or fewer than two minibatches with a gradient.
    """
    data = fixed_batch.read_data(args.data)
    prompts = settings.prompts
    if fixed_batch.has_responses(data):
        raise MeasureError(f"--data {args.data}: rows with responses; expected prompts to answer")
    if len(data) < prompts * args.batches:
        raise MeasureError(
            f"--data {args.data}: {len(data)} prompts; expected {prompts * args.batches} for "
            f"--batches {args.batches} of --prompts {prompts}"
        )
    model = load_model(name, DTYPES[args.dtype], choose_device(args.device))
    tokenizer = load_tokenizer(name)
    count = args.batches + args.warm_up
    with progress_bar("minibatches", "minibatches", count) as bar:

        def batches(numbers: range) -> Iterator[FixedBatch]:
            """The minibatches with these indices; after the last prompt the first one follows."""
            for number in numbers:
                places = range(number * prompts, (number + 1) * prompts)
                part = [data[place % len(data)] for place in places]
                drawn = replace(settings, seed=settings.seed + number)
                yield sample_batch(args.data, part, name, model, tokenizer, drawn, reward)
                bar.update()

        moments = None
        if optimizer is not None:
            others = batches(range(args.batches, count))
            moments = warm_up(model, others, losses, args.pass_tokens, optimizer)
        rows = [
            compare(model, batch, losses, args.pass_tokens, moments)
            for batch in batches(range(args.batches))
            if any(row.advantage for row in batch.rows)
        ]
    if len(rows) < 2 or (moments and not next(iter(moments.values())).steps):
        raise MeasureError(
            f"--data {args.data}: {len(rows)} of {args.batches} minibatches had prompts that were "
            "answered right and wrong; expected at least 2, and 1 of --warm-up (more --batches, "
            "--prompts or --group)"
        )
    # Of each algorithm, the columns of the rows.
    found = {name: list(zip(*(row[name] for row in rows), strict=True)) for name in losses}
    return found, args.batches - len(rows)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the content of ``--json``."""
    return {"models": options.each_model(args.model, lambda name: report_of(args, name))}


def report_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The figures of one checkpoint, which answers the prompts itself."""
    losses = surrogates(args.algorithm)
    config = load_config(args.config, args.overrides)
    settings = options.sampling(args, config)
    optimizer = optimizer_of(config) if args.warm_up else None
    reward = options.reward_function(args, config, settings, graded=True)
    found, without_gradient = measure(args, name, settings, losses, reward, optimizer)
    kinds = ("", "update_") if optimizer else ("",)
    return {
        "model": name,
        "data": str(args.data),
        "minibatches": len(found[next(iter(losses))][0]),
        "without_gradient": without_gradient,
        "prompts": settings.prompts,
        "group": settings.group,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "optimizer": None if optimizer is None else {"warm_up": args.warm_up, **asdict(optimizer)},
        "algorithms": [
            {**row, "loss": losses[row["algorithm"]].describe()}
            for row in summarise(found, optimizer)
        ],
        **{
            f"{kind}{figure}s": {
                algorithm: [getattr(vector, figure) for vector in vectors[place]]
                for algorithm, vectors in found.items()
            }
            for place, kind in enumerate(kinds)
            for figure in ("norm", "cosine")
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    return options.command("lab.measure.minibatch_gradients", parse_arguments, run, tables, argv)


if __name__ == "__main__":
    sys.exit(main())
