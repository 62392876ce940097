"""What a recipe's token weighting does, before any training: curve, range, mean and dead zones.

Each sampled token's update is scaled by a weight w. In GRPO-SG that is w(p), p being the token's
probability under the policy. This command says what the policy loss of a recipe does with a token,
and shows w for its settings, or for the published constants.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, UpstreamChanged
from sg_rlhf.weights.describe import EQ_19, Weighting, describe_weights, own_parameters

EXAMPLES = """\
examples:
  the published constants, in the product form that is the default here
    python -m sg_rlhf.weights
  Eq. 19 as it is printed: every weight is 1, so it is plain GRPO
    python -m sg_rlhf.weights sg.form=quotient
  the weighting of a recipe, as JSON for a script
    python -m sg_rlhf.weights --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml --json
  an algorithm on top of a recipe
    python -m sg_rlhf.weights --config configs/kk/grpo_tiny_cpu.yaml \\
        --config configs/algorithms/reverse.yaml
  a narrower range that leaves no dead zone, with a picture
    python -m sg_rlhf.weights sg.upper=1.2 --plot weights.png
  the dead zone under another clip
    python -m sg_rlhf.weights actor.eps_clip_low_high=[0.2,0.28]

keys: actor.policy_loss_type, sg.shaping, sg.form, sg.alpha, sg.mu, sg.tau, sg.lower, sg.upper,
sg.placement, sg.normalize, sg.random_spread, sg.ar_alpha, sg.stapo_prob, sg.stapo_entropy, and any
other key of a recipe. Without a recipe the loss is grpo_sg and the PPO clip,
actor.eps_clip_low_high=[low,high], the paper's [0.2,0.24]; with one they are what it trains with. A
weight that is the same for every token is reported here and refused by sg_rlhf.train.

mean: of w over p uniform on (0, 1) at ratio 1, a property of the curve alone. A policy's tokens are
not uniform, most have p near 1; the mean of a run is its metric weight_mean.

dead zone: the p at which a token has no policy gradient at ratio 1, by the sign of its advantage.
JSON keys: dead_zone_positive and dead_zone_negative [first, last], dead_zone_dual_clip (A < 0 and w
above actor.dual_clip), null where there is none; dead_zone_p is the first p of dead_zone_positive.
dead_weights gives the same as weights, for the weightings that are not a function of p alone too.
With sg.normalize all of it is before the division by the mean weight. docs/method.md explains.
"""

TABLE_P = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
CURVE_POINTS = 501
CONSTANTS = ("form", "alpha", "mu", "tau", "lower", "upper")  # of Eq. 19


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


def curve(weighting: Weighting, probs: list[float], **changes: Any) -> list[float]:
    """w at each p, in float64; ``changes`` replaces fields of the token weights first."""
    if weighting.cfg is not None:
        weighting = replace(weighting, cfg=replace(weighting.cfg, **changes))
    return weighting.weights([math.log(p) if p else -math.inf for p in probs])


def summary(weighting: Weighting) -> dict[str, Any]:
    """The JSON object: the settings that take effect and what they can do; see --help."""
    from sg_rlhf.algo.shaping import CONSTANT_TOLERANCE

    cfg = weighting.cfg
    constants = CONSTANTS if cfg and cfg.shaping in EQ_19 else ()
    low, high = weighting.limits()
    dead = {zone.kind: zone for zone in weighting.dead_zones()}
    kinds = ("positive", "negative", "dual_clip")
    zones = {
        f"dead_zone_{kind}": list(dead[kind].zone or ()) or None if kind in dead else None
        for kind in kinds
    }
    levels = {kind: dead[kind].level if kind in dead else None for kind in kinds}
    return {
        "policy_loss_type": weighting.loss,
        "shaping": cfg.shaping if cfg else "uniform",
        **{name: getattr(cfg, name) if name in constants else None for name in CONSTANTS},
        **(own_parameters(cfg) if cfg else {}),
        "placement": cfg.placement if cfg else None,
        "normalize": cfg.normalize if cfg else None,
        "lopti_threshold": weighting.lopti_threshold,
        "kl_estimator": weighting.kl,
        "eps_low": weighting.eps_low,
        "eps_high": weighting.eps_high,
        "dual_clip": weighting.dual_clip,
        "min": low,
        "max": high,
        "mean": weighting.mean(),
        "constant": high - low <= CONSTANT_TOLERANCE,
        "dead_zone_p": zones["dead_zone_positive"] and zones["dead_zone_positive"][0],
        **zones,
        "dead_weights": {
            "positive_above": levels["positive"],
            "negative_below": levels["negative"],
            "negative_above": levels["dual_clip"],
        },
    }


def table(weighting: Weighting) -> str:
    """The text that people read: curve, range, mean, and what they mean."""
    cfg, report = weighting.cfg, summary(weighting)
    lines = [textwrap.fill(weighting.describe(), 88, subsequent_indent="  ")]
    if cfg and cfg.shaping in EQ_19:
        weights = curve(weighting, list(TABLE_P))
        lines += ["", "     p   weight"]
        lines += [f"  {p:4.2f}   {w:6.3f}" for p, w in zip(TABLE_P, weights, strict=True)]
    lines += ["", f"range: {report['min']:.4g} to {report['max']:.4g}"]
    if report["mean"] is None:
        lines.append("mean: not known without a model, as w depends on more than p")
    else:
        lines.append(f"mean: {report['mean']:.4g} over p uniform on (0, 1)")
    lines += [textwrap.fill(n, 88, subsequent_indent="  ") for n in notes(weighting, report)]
    return "\n".join(lines)


def notes(weighting: Weighting, report: dict[str, Any]) -> list[str]:
    """What a user should know about these settings before a run."""
    found = []
    cfg = weighting.cfg
    if cfg and report["constant"] and cfg.shaping != "uniform":
        plain = "GRPO" if weighting.loss == "grpo_sg" else weighting.loss
        scale = "" if abs(report["min"] - 1) < 1e-6 else " at another scale"
        found.append(
            f"constant: every token gets the same weight, so this is plain {plain}{scale}; "
            f"sg_rlhf.train refuses it unless sg.allow_constant=true"
        )
    if not weighting.is_curve():
        found.append(
            "the weight is not a function of p alone, so there is no curve; the share of zeroed "
            "tokens is in the training metrics"
        )
    if weighting.lopti_threshold is not None:
        found.append(
            f"two updates: tokens with p_old < {weighting.lopti_threshold:g}, then the rest; a "
            "token has its policy gradient in one of them"
        )
    found += _dead_zone_notes(weighting, report)
    if cfg and cfg.normalize:
        inside = cfg.placement == "inside"
        moving = "their range and dead zones move" if inside else "their range moves"
        found.append(
            f"normalize={cfg.normalize}: training divides these weights by their mean over the "
            f"tokens, so {moving} with the data"
        )
    if weighting.kl in KL_ESTIMATORS:
        found.append(_kl_note(weighting))
    return found


def _dead_zone_notes(weighting: Weighting, report: dict[str, Any]) -> list[str]:
    found = []
    for dead in weighting.dead_zones():
        above = dead.relation == ">"
        bound = f"{dead.name} = {dead.level:g}"
        if dead.zone:
            verb = "exceeds" if above else "is below"
            span = f"for p from {dead.zone[0]:.4g} to {dead.zone[1]:.4g}"
            text = f"{span} the weight {verb} {bound}, so a token with"
        else:
            text = f"a token with a weight {'above' if above else 'below'} {bound} and"
        if dead.positive:
            found.append(
                f"dead zone: {text} A > 0 has no policy gradient even on-policy (ratio 1); a "
                "weight that stays below it, sg.placement=outside or a larger eps_high avoids this"
            )
        else:
            found.append(f"dead zone for A < 0: {text} A < 0 is never pushed down at ratio 1")
    if found:
        return found
    if weighting.loss == "cispo":
        return ["dead zone: none; the clip bounds the importance ratio and removes no gradient"]
    if report["min"] == 0:
        found.append("a token of weight 0 has no policy gradient at any ratio")
    ratio = "the response's ratio" if weighting.loss == "gspo" else "the ratio"
    clip = f"{1 - weighting.eps_low:g} to {1 + weighting.eps_high:g}"
    if weighting.cfg and weighting.cfg.placement == "inside":
        ratio = "w times the ratio"
    found.append(f"dead zone: none at ratio 1; the clip acts where {ratio} leaves {clip}")
    return found


def _kl_note(weighting: Weighting) -> str:
    text = f"KL: {weighting.kl}, "
    if weighting.kl_cfg is None:
        text += "weighted by the same w"
    else:
        text += f"which alone is weighted, by {describe_weights(weighting.kl_cfg)}"
    if weighting.kl == "wk3_eq11":
        text += "; w*rho - log(w*rho) - 1 with rho = p_ref / p is least at p = w * p_ref"
    return text


def check_curve(weighting: Weighting) -> None:
    """``ConfigError`` for a weighting that no curve over p can show."""
    if weighting.cfg is not None and not weighting.is_curve():
        raise ConfigError(
            f"sg.shaping={weighting.cfg.shaping}: not a function of p alone, so --plot has no "
            "curve to draw; leave --plot out"
        )


def plot(weighting: Weighting, path: Path) -> None:
    """The weight curve with its bounds, mean and dead zones, written to ``path``."""
    from matplotlib.figure import Figure

    cfg = weighting.cfg
    probs = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    if cfg and cfg.shaping in EQ_19:
        wide = curve(weighting, probs, shaping="grpo_sg", lower=0.0, upper=max(10.0, cfg.upper))
        is_reverse = cfg.shaping == "reverse"
        before = [2 - w for w in wide] if is_reverse else wide
        axes.plot(probs, before, color="0.6", lw=1.2, ls=":", label="before the clip to [L, U]")
        for name, bound in (("L", cfg.lower), ("U", cfg.upper)):
            level = 2 - bound if is_reverse else bound
            label = f"2 - {name} = {level:g}" if is_reverse else f"{name} = {level:g}"
            axes.axhline(level, color="0.75", lw=0.8)
            axes.annotate(label, (1.01, level), va="center", annotation_clip=False)
    weights = curve(weighting, probs)
    axes.plot(probs, weights, color="tab:blue", lw=2.4, label="weight w(p)")
    mean = weighting.mean()
    if mean is not None and max(weights) > min(weights):
        shown = f"mean over uniform p = {mean:.4g}"
        axes.axhline(mean, color="tab:green", lw=1, ls="-.", label=shown)
    for dead in weighting.dead_zones():
        color = "tab:red" if dead.positive else "tab:orange"
        assert dead.zone is not None  # `check_curve`
        first, last = dead.zone
        shade = f"dead zone for A {'>' if dead.positive else '<'} 0: {first:.3g} < p < {last:.3g}"
        axes.axvspan(first, last, color=color, alpha=0.14, lw=0, label=shade)
        axes.axhline(dead.level, color=color, lw=1, ls="--", label=f"{dead.name} = {dead.level:g}")
    axes.set(xlim=(0, 1), xlabel="token probability p", ylabel="weight w")
    name, _, rest = weighting.describe().partition(": ")
    axes.set_title(f"{name}\n{textwrap.fill(rest, 96)}", fontsize=10)
    if max(weights) > min(weights):
        axes.margins(y=0.12)
    else:  # or the axis would magnify rounding
        axes.set_ylim(0, 2 * max(weights) or 1)
    axes.legend(loc="best", fontsize=8.5, framealpha=0.95)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """The command; 0, or 2 after one line on stderr."""
    arguments = parse_arguments(argv)
    try:
        weighting = Weighting.of(
            load_config(arguments.config, arguments.overrides), allow_constant=True
        )
        if arguments.plot:
            check_curve(weighting)
            plot(weighting, Path(arguments.plot))
    except (ConfigError, UpstreamChanged) as error:
        return _fail(str(error))
    except (OSError, ValueError) as error:
        return _fail(f"--plot {arguments.plot}: {error}")
    if arguments.json:
        print(json.dumps(summary(weighting)))
    else:
        print(table(weighting))
        unread = [o for o in arguments.overrides if o.startswith("sg.")]
        if unread and weighting.cfg is None and weighting.kl_cfg is None:
            print(
                f"not read by policy loss {weighting.loss}: {', '.join(unread)}; "
                "actor.policy_loss_type=grpo_sg reads it"
            )
        if arguments.plot:
            print(f"picture: {arguments.plot}")
    return 0


def _fail(message: str) -> int:
    print(f"sg_rlhf.weights: {' '.join(message.split())}", file=sys.stderr)
    return 2
