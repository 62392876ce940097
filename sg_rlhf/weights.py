"""What a token weighting does, before any training: its curve, its range and its dead zone.

Each sampled token's update is scaled by a weight w(p), p being the token's probability under the
policy. This command shows w for the settings of a recipe, or for the published constants.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from sg_rlhf.config import Config, ConfigError, load_config, token_weight_config

EXAMPLES = """\
examples:
  the published constants, in the product form that is the default here
    python -m sg_rlhf.weights
  Eq. 19 as it is printed: every weight is 1, so it is plain GRPO
    python -m sg_rlhf.weights sg.form=quotient
  the weighting of a recipe, as JSON for a script
    python -m sg_rlhf.weights --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml --json
  a narrower range that leaves no dead zone, with a picture
    python -m sg_rlhf.weights sg.upper=1.2 --plot weights.png
  the dead zone under another clip
    python -m sg_rlhf.weights actor.eps_clip_low_high=[0.2,0.28]

keys: sg.shaping, sg.form, sg.alpha, sg.mu, sg.tau, sg.lower, sg.upper, sg.placement, sg.normalize,
sg.random_spread, sg.ar_alpha, sg.stapo_prob, sg.stapo_entropy, and any other key of a recipe; the
PPO clip is actor.eps_clip_low_high=[low,high] (without a recipe the paper's [0.2,0.24]). A weight
that is the same for every token is reported here and refused by sg_rlhf.train. docs/method.md
explains all of it.
"""

PAPER_CLIP = (0.2, 0.24)
TABLE_P = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
CURVE_POINTS = 501


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sg_rlhf.weights: {message}; see --help\n")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, with the teaching help; flags and overrides in any order."""
    parser = _Parser(
        prog="python -m sg_rlhf.weights",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="a recipe (YAML); the later file wins"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--plot", metavar="F.png", help="draw the curve; a missing folder is created"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    return parser.parse_intermixed_args(argv)


def clip_range(config: Config) -> tuple[float, float]:
    """(eps_low, eps_high) of the run; the paper's if neither a recipe nor an override is given."""
    keys = ("actor.eps_clip_low_high", "actor.eps_clip")
    if not config.sources and not any(key in config.values for key in keys):
        return PAPER_CLIP
    return config.clip_range()


def curve(cfg: Any, probs: list[float], **changes: Any) -> list[float]:
    """w at each p, in float64; ``changes`` replaces fields of the config first."""
    import dataclasses

    import torch

    from sg_rlhf.algo.shaping import token_weights

    log_probs = torch.tensor(probs, dtype=torch.float64).log()
    plain = {"normalize": None, "allow_constant": True, **changes}
    return [float(w) for w in token_weights(log_probs, dataclasses.replace(cfg, **plain))]


def summary(cfg: Any, eps_high: float) -> dict[str, Any]:
    """The JSON object: the settings and what they can do."""
    from sg_rlhf.algo.shaping import weight_range

    limits = weight_range(cfg, eps_high)
    settings = ("form", "alpha", "mu", "tau", "lower", "upper", "placement")
    return {
        **{name: getattr(cfg, name) for name in settings},
        "min": limits.min,
        "max": limits.max,
        "constant": limits.constant,
        "dead_zone_p": limits.dead_zone_p,
    }


def describe(cfg: Any) -> str:
    """One line: which weighting this is."""
    from sg_rlhf.algo.shaping import is_curve
    from sg_rlhf.algo.weightings import SHAPINGS

    if cfg.shaping == "uniform":
        return "uniform: w = 1 (plain GRPO)"
    if not is_curve(cfg):
        return f"{cfg.shaping}: {SHAPINGS[cfg.shaping].summary}"
    inner = "sigmoid(tau*p)" if cfg.form == "product" else "sigmoid(p/tau)"
    name = "2 - w with w" if cfg.shaping == "reverse" else "w"
    return (
        f"{cfg.shaping}, {cfg.form} form: {name} = clip({cfg.alpha:g}*({inner} - {cfg.mu:g}), "
        f"{cfg.lower:g}, {cfg.upper:g}), tau = {cfg.tau:g}, {cfg.placement} the PPO clip"
    )


def table(cfg: Any, eps_low: float, eps_high: float) -> str:
    """The text that people read: curve, range, and what the range means."""
    from sg_rlhf.algo.shaping import is_curve

    report = summary(cfg, eps_high)
    lines = [describe(cfg)]
    if is_curve(cfg):
        weights = curve(cfg, list(TABLE_P))
        lines += ["", "     p   weight"]
        lines += [f"  {p:4.2f}   {w:6.3f}" for p, w in zip(TABLE_P, weights, strict=True)]
    lines += ["", f"range: {report['min']:.4g} to {report['max']:.4g}"]
    lines += notes(cfg, report, eps_low, eps_high)
    return "\n".join(lines)


def notes(cfg: Any, report: dict[str, Any], eps_low: float, eps_high: float) -> list[str]:
    """What a user should know about these settings before a run."""
    from sg_rlhf.algo.shaping import dead_zones, is_curve

    found = []
    if report["constant"] and cfg.shaping != "uniform":
        scale = "" if abs(report["min"] - 1) < 1e-6 else " at another scale"
        found.append(
            f"constant: every token gets the same weight, so this is plain GRPO{scale}; "
            f"sg_rlhf.train refuses it unless sg.allow_constant=true"
        )
    if not is_curve(cfg):
        found.append(
            "the weight is not a function of p alone, so there is no curve; the share of zeroed "
            "tokens is in the training metrics"
        )
        return [textwrap.fill(note, 88, subsequent_indent="  ") for note in found]
    zones = dead_zones(cfg, eps_low, eps_high)
    if zones.positive:
        found.append(
            f"dead zone: {_between(zones.positive)} the weight exceeds 1 + eps_high = "
            f"{1 + eps_high:g}, so a token with A > 0 has no policy gradient even on-policy "
            f"(ratio 1); a weight that stays below it, sg.placement=outside or a larger eps_high "
            f"avoids this"
        )
    if zones.negative:
        found.append(
            f"dead zone for A < 0: {_between(zones.negative)} the weight is below 1 - eps_low = "
            f"{1 - eps_low:g}, so a token there is never pushed down at ratio 1"
        )
    if not zones.positive and not zones.negative:
        found.append("dead zone: none at ratio 1")
    if cfg.normalize:
        found.append(
            f"normalize={cfg.normalize}: training divides these weights by their mean over the "
            f"tokens, so its range and its dead zone move with the data"
        )
    return [textwrap.fill(note, 88, subsequent_indent="  ") for note in found]


def _between(zone: tuple[float, float]) -> str:
    return f"for p from {zone[0]:.4g} to {zone[1]:.4g}"


def check_curve(cfg: Any) -> None:
    """``ConfigError`` for a weighting that no curve over p can show."""
    from sg_rlhf.algo.shaping import is_curve

    if not is_curve(cfg):
        raise ConfigError(
            f"sg.shaping={cfg.shaping}: not a function of p alone, so --plot has no curve to draw; "
            "leave --plot out"
        )


def plot(cfg: Any, path: Path, eps_low: float, eps_high: float) -> None:
    """The weight curve with its bounds and dead zones, written to ``path``."""
    from matplotlib.figure import Figure

    from sg_rlhf.algo.shaping import dead_zones

    probs = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    if cfg.shaping == "grpo_sg":
        before = curve(cfg, probs, lower=0.0, upper=max(10.0, cfg.upper))
        axes.plot(probs, before, color="0.6", lw=1.2, ls=":", label="before the clip to [L, U]")
        for name, level in (("L", cfg.lower), ("U", cfg.upper)):
            axes.axhline(level, color="0.75", lw=0.8)
            axes.annotate(f"{name} = {level:g}", (1.01, level), va="center", annotation_clip=False)
    axes.plot(probs, curve(cfg, probs), color="tab:blue", lw=2.4, label="weight w(p)")
    zones = dead_zones(cfg, eps_low, eps_high)
    for zone, sign, color, level, name in (
        (zones.positive, ">", "tab:red", 1 + eps_high, r"1 + \epsilon_{high}"),
        (zones.negative, "<", "tab:orange", 1 - eps_low, r"1 - \epsilon_{low}"),
    ):
        if zone:
            shade = f"dead zone for A {sign} 0: {zone[0]:.3g} < p < {zone[1]:.3g}"
            axes.axvspan(*zone, color=color, alpha=0.14, lw=0, label=shade)
            axes.axhline(level, color=color, lw=1, ls="--", label=f"${name} = {level:g}$")
    axes.set(xlim=(0, 1), xlabel="token probability p", ylabel="weight w")
    axes.set_title(describe(cfg).replace(": ", "\n", 1), fontsize=10)
    axes.margins(y=0.12)
    axes.legend(loc="best", fontsize=8.5, framealpha=0.95)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """The command; 0, or 2 after one line on stderr."""
    arguments = parse_arguments(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        cfg = token_weight_config(config, allow_constant=True)
        eps_low, eps_high = clip_range(config)
        if arguments.plot:
            check_curve(cfg)
            plot(cfg, Path(arguments.plot), eps_low, eps_high)
    except ConfigError as error:
        return _fail(str(error))
    except (OSError, ValueError) as error:
        return _fail(f"--plot {arguments.plot}: {error}")
    if arguments.json:
        print(json.dumps(summary(cfg, eps_high)))
    else:
        print(table(cfg, eps_low, eps_high))
        if arguments.plot:
            print(f"picture: {arguments.plot}")
    return 0


def _fail(message: str) -> int:
    print(f"sg_rlhf.weights: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
