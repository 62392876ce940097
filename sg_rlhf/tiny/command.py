"""Build a small model that learns on a laptop's CPU, in minutes.

The package contains one of 0.86 M parameters for each of its domains. This command builds it again,
or one for another domain:

    sg-rlhf tiny --out DIR [--domain kk|math|search|package.module:NAME]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sg_rlhf.common.argument_types import OneLineParser, non_negative_int, positive_int


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    parser = OneLineParser(prog="sg-rlhf tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--domain", metavar="NAME", default="kk", help="what it learns [kk]")
    parser.add_argument("--seed", type=non_negative_int, default=0, help="weights and data [0]")
    parser.add_argument("--steps", type=positive_int, help="optimizer steps [the domain's recipe]")
    parser.add_argument("--threads", type=positive_int, default=2, help="CPU threads [2]")
    args = parser.parse_args(argv)
    # They import torch, which the help does not need.
    import torch
    from transformers.utils import logging

    from sg_rlhf.tiny.build import build, find

    try:
        domain = find(args.domain)
    except ValueError as error:
        print(f"sg-rlhf tiny: --domain: {error}", file=sys.stderr)
        return 2
    recipe = domain.recipe
    if args.steps is not None:
        recipe = replace(recipe, steps=args.steps)
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    try:
        manifest = build(domain, args.out, recipe, args.seed)
    except (ValueError, OSError) as error:
        print(f"sg-rlhf tiny: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    sampled, greedy = manifest["sampled_at_0.7"], manifest["greedy"]
    print(
        f"{args.out}: {manifest[f'held_out_{domain.items}']} held-out {domain.items}, "
        f"accuracy {sampled['accuracy']:.3f} at T 0.7, {greedy['accuracy']:.3f} greedy, "
        f"well-formed {sampled['well_formed']:.3f}"
    )
    return 0
