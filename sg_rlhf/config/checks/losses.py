"""Losses, token weightings, KL estimators and ``sg.on_nonfinite``: what they need of each other.

Every function takes ``value``: dotted key -> its value, and raises ValueError with one line.
"""

from __future__ import annotations

from sg_rlhf.algo.objectives import check_objective
from sg_rlhf.config.derived.topology import Value
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES, PROMPT_MEAN
from sg_rlhf.config.weighting_resolution import built_objective, built_weighting, check_update

#: ``lr_end`` of transformers' polynomial schedule.
POLYNOMIAL_END = 1e-7


#: Estimators with a baseline from the other responses to the prompt: one response would get 0.
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def check_advantages(value: Value) -> None:
    """Refuse settings with which advantages are 0 or are not what they are called."""
    estimator, group = value("algo.advantage.estimator"), value("rollout.n_samples_per_prompt")
    if estimator in GROUP_ESTIMATORS and group == 1:
        raise ValueError(
            f"rollout.n_samples_per_prompt=1: expected 2 or more with {estimator}, which compares "
            "the responses to a prompt"
        )
    bounds = value("algo.advantage.is_correction_threshold")
    if len(bounds) not in (1, 2):
        raise ValueError(
            f"algo.advantage.is_correction_threshold={bounds}: expected [HIGH] or [LOW, HIGH]"
        )
    if value("sg.advantage_std") == "population" and not (
        value("algo.advantage.estimator") == "group_norm" and value("algo.kl.use_loss")
    ):
        raise ValueError(
            "sg.advantage_std=population needs algo.advantage.estimator=group_norm and "
            "algo.kl.use_loss=true (the KL inside the reward would be rescaled too)"
        )
    for key, default, readers, remedy in (
        (
            "algo.advantage.no_std_norm", False, ("reinforce", "reinforce_baseline"),
            "set algo.advantage.estimator=dr_grpo, which does not divide by the group's standard "
            "deviation",
        ),
        ("algo.advantage.gamma", 1, ("reinforce",), "set it to 1"),
        ("algo.advantage.lambd", 1, (), "set it to 1, as a critic is not supported"),
    ):  # fmt: skip
        if value(key) != default and estimator not in readers:
            shown = str(value(key)).lower()
            raise ValueError(f"{key}={shown}: has no effect with {estimator}; {remedy}")


def check_aggregation(value: Value) -> None:
    """Refuse the mean over prompts with a loss of upstream's, which has no such mean."""
    mode, loss = value("actor.loss_agg_mode"), value("actor.policy_loss_type")
    if mode == PROMPT_MEAN and loss not in POLICY_LOSS_TYPES:
        raise ValueError(
            f"actor.loss_agg_mode={mode}: with actor.policy_loss_type={loss} expected token-mean "
            "or seq-mean-token-mean; or set actor.policy_loss_type to one of "
            f"{', '.join(POLICY_LOSS_TYPES)} (weighted_ppo with sg.weighting.type=uniform is ppo)"
        )


def check_weighting(value: Value) -> None:
    """Refuse a weighting that the loss, the KL or the update cannot use."""
    loss, estimator = value("actor.policy_loss_type"), value("algo.kl.estimator")
    use_loss = value("algo.kl.use_loss")
    if value("sg.update") == "lopti":
        _check_lopti(value)
    is_ours = loss in POLICY_LOSS_TYPES
    if not is_ours and estimator not in KL_ESTIMATORS:
        return
    weighting = built_weighting(value("sg.weighting"))
    if is_ours:
        check_objective(built_objective(loss, value("sg.objective")), weighting)
    ours = ", ".join(POLICY_LOSS_TYPES)
    with_type = f"with sg.weighting.type={weighting.name}"
    if not is_ours and weighting.reads:
        raise ValueError(
            f"algo.kl.estimator={estimator}: {with_type} expected actor.policy_loss_type to "
            f"be one of {ours}, whose weights the KL shares"
        )
    if weighting.reads and estimator in KL_ESTIMATORS and not use_loss:
        raise ValueError(
            f"algo.kl.use_loss=false: expected true {with_type} and "
            f"algo.kl.estimator={estimator}, or another estimator"
        )
    if weighting.normalize and estimator in KL_ESTIMATORS and not (is_ours and use_loss):
        raise ValueError(
            f"sg.weighting.normalize={weighting.normalize}: with algo.kl.estimator={estimator} "
            f"expected algo.kl.use_loss=true and actor.policy_loss_type to be one of {ours}, whose "
            "weights, over the rollout's mean, the KL shares"
        )
    if "entropy" in weighting.reads and value("actor.entropy_coef") is None:
        raise ValueError(
            f"actor.entropy_coef=null: sg.weighting.type={weighting.name} reads the entropy; "
            "0 computes it"
        )


def _check_lopti(value: Value) -> None:
    check_update(value("sg.update"), value("actor.policy_loss_type"))
    if value("actor.entropy_coef"):
        raise ValueError(
            f"actor.entropy_coef={value('actor.entropy_coef')}: expected 0 with sg.update=lopti, "
            "which has no entropy bonus per pass"
        )
    if not value("actor.lr_scheduler").startswith("constant"):
        raise ValueError(
            f"actor.lr_scheduler={value('actor.lr_scheduler')}: expected constant or "
            "constant_with_warmup with sg.update=lopti, which takes twice the optimizer steps "
            "that a schedule is made for"
        )


def check_schedule(value: Value) -> None:
    """Refuse a learning rate below the one at which a polynomial schedule ends."""
    rate = value("actor.adam.lr" if value("actor.optim") == "adam" else "actor.muon.lr")
    if value("actor.lr_scheduler") == "polynomial" and rate <= POLYNOMIAL_END:
        raise ValueError(
            f"actor.lr_scheduler=polynomial: ends at a rate of {POLYNOMIAL_END:g}, so it needs a "
            f"rate above (actor.adam.lr={rate:g}); use linear, which ends at 0"
        )


def check_nonfinite(value: Value) -> None:
    """Refuse ``sg.on_nonfinite=skip`` where a step cannot be skipped."""
    if value("sg.on_nonfinite") != "skip":
        return
    stage, sums = value("ds.zero_stage"), value("ds.grad_accum_dtype")
    # DeepSpeed then has another kind of optimizer, which detects no overflow.
    bf16_optimizer = stage == 1 and "32" in str(sums) and not value("ds.adam_offload")
    for applies, setting, remedy in (
        (stage not in (1, 2, 3), f"ds.zero_stage={stage}", "1, 2 or 3"),
        (bf16_optimizer, f"ds.zero_stage=1, ds.grad_accum_dtype={sums}", "ds.zero_stage=2"),
        (
            value("actor.optim") == "muon",
            "actor.optim=muon, which has a gradient in its momentum before its step",
            "adam",
        ),
    ):
        if applies:
            raise ValueError(
                f"sg.on_nonfinite=skip: not with {setting}; use {remedy}, or sg.on_nonfinite=stop"
            )
