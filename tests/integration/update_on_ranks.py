"""One rank of the shard-invariance test: every algorithm's update, by the real trainer.

    python update_on_ranks.py MICRO_BATCH OUT [ALGORITHM,ALGORITHM... OVERRIDE...]

Eight responses are one optimizer step; with `rounds` for MICRO_BATCH they are dealt to two ranks as
DEALT says. The learning rate is 0 and Adam's first beta 0, so that the
optimizer's first moment is the gradient itself, and one engine serves every algorithm. Rank 0
writes {algorithm: {"gradient": [parameters], "rows": [the optimizer steps]}} to OUT, of the named
algorithms or of all; below ZeRO 3 the gradient is its own part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.overlay.patches import table

table.install()

import openrlhf.utils.utils  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from sg_rlhf.config import load_config  # noqa: E402
from sg_rlhf.overlay.checkpoints.strategy import Strategy  # noqa: E402
from sg_rlhf.overlay.driver.arguments import upstream_arguments  # noqa: E402
from sg_rlhf.overlay.learner import micro_batches  # noqa: E402
from sg_rlhf.overlay.learner.update import SGActorPPOTrainer  # noqa: E402
from sg_rlhf.overlay.model.log_prob_head import PolicyModel  # noqa: E402
from sg_rlhf.tasks.kk.tiny import WarmStart  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"
RESPONSES = 8
#: Micro-batches of any number of responses: three of the first rank, five of the second.
DEALT = (((0,), (5, 2)), ((3, 4, 1), (7, 6)))
TWO_RANKS = ["actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "vllm.num_engines=2"]
MODEL = CONFIGS.parent / "sg_rlhf" / "tiny" / "kk_tiny"


#: Of the policy to the old one: ratios .61, .90, 1, 1.11 and 1.65.
LOG_RATIOS = (-0.5, -0.1, 0.0, 0.1, 0.5)
#: Algorithms with their parameter at the value that makes them GRPO.
SWITCHED_OFF = {
    "lopti": ["sg.lopti_threshold=0"],
    "ar": ["sg.weighting.alpha=0", "sg.weighting.allow_constant=true"],
    "random": ["sg.weighting.spread=0", "sg.weighting.allow_constant=true"],
    "stapo": ["sg.weighting.prob=0", "sg.weighting.allow_constant=true"],
    **{
        name: ["sg.weighting.upper=1.0", "sg.weighting.allow_constant=true"]
        for name in (
            "grpo_sg",
            "grpo_sg_outside",
            "grpo_sg_normalized",
            "reverse",
            "tr_grpo",
            "grpo_sg_engine",
            "grpo_sg_centred",
            "linear",
            "power",
            "mask_only",
        )
    },
    "negative_only": ["sg.weighting.positive=1", "sg.weighting.allow_constant=true"],
    "positive_only": ["sg.weighting.negative=1", "sg.weighting.allow_constant=true"],
    "reshape_reversed": ["sg.weighting.c=0", "sg.weighting.allow_constant=true"],
    "stare": ["sg.weighting.raised=1", "sg.weighting.allow_constant=true"],
    "top_entropy": ["sg.weighting.share=1", "sg.weighting.allow_constant=true"],
}


def cases() -> dict[str, tuple[Path, list[str]]]:
    """Every shipped algorithm, and those that can be switched off: (recipe, overrides)."""
    recipes = {path.stem: path for path in sorted((CONFIGS / "algorithms").glob("*.yaml"))}
    shipped = {name: (path, []) for name, path in recipes.items()}
    shipped["stapo"][1].extend(
        ["sg.weighting.prob=0.3", "sg.weighting.entropy=1"]
    )  # to mask some here
    # Below the target entropy, and a weight that shows.
    shipped["stare"][1].extend(["sg.weighting.target_entropy=99", "sg.weighting.raised=2"])
    off = {f"{name}_off": (recipes[name], extra) for name, extra in SWITCHED_OFF.items()}
    return shipped | off


def arguments(recipe: Path, extra: list[str], micro_batch: int, more: Sequence[str] = ()) -> Any:
    """Upstream's arguments of the tiny recipe with an algorithm on top."""
    config = load_config(
        [CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml", recipe],
        [
            "actor.adam.lr=0", "actor.adam.betas=[0.0,0.999]", "actor.max_norm=1e9",
            f"train.batch_size={RESPONSES}", f"train.micro_batch_size={micro_batch}",
            f"rollout.batch_size={RESPONSES}", "rollout.n_samples_per_prompt=1",
            "rollout.micro_batch_size=1",
            # What comes before the update has no part in it: the advantages are given.
            "algo.dynamic_filtering_enable=false", "algo.advantage.estimator=reinforce",
            *extra, *more,
        ],
    )  # fmt: skip
    return upstream_arguments(config)


def rollout(actor: Any) -> list[Experience]:
    """Eight responses of different lengths, some way off the policy; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    experiences = []
    actor.eval()
    for index, (prompt, response) in zip(
        range(RESPONSES), WarmStart().texts(0, clean=False), strict=False
    ):
        prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
        response_ids = tokenizer(response, return_tensors="pt").input_ids
        # The model's own texts are likely ones: some tokens are replaced by any. More of them would
        # drown the others' gradient, in which the algorithms differ.
        strays = torch.randint(5, 200, response_ids.shape, generator=generator)
        stray = torch.rand(response_ids.shape, generator=generator) < 0.03
        sequence = torch.cat([prompt_ids, torch.where(stray, strays, response_ids)], dim=1)
        length = sequence.shape[1]
        mask = torch.ones_like(sequence)
        action_mask = (torch.arange(length - 1) >= prompt_ids.shape[1] - 1).unsqueeze(0)
        with torch.no_grad():
            log_probs = actor(sequence, attention_mask=mask, return_logprobs=True).float()
        noise = torch.randn(log_probs.shape, generator=generator)
        # On both sides of the clip's bounds, 0.8 and 1.24, and never near one: there rounding alone
        # would decide whether a token has a gradient. Between 1.24 and DAPO's 1.28 only tokens
        # whose log-prob has little rounding.
        drawn = torch.randint(len(LOG_RATIOS), log_probs.shape, generator=generator)
        log_ratios = torch.tensor(LOG_RATIOS)[drawn]
        exact = (log_probs > -1.0) & (log_probs < -0.05) & (noise > 0)
        log_ratios[exact] = math.log(1.26)
        # A log-prob above 0 is none: such a token gets a ratio above 1 instead.
        old = log_probs - torch.where(log_probs > log_ratios, log_ratios.abs(), log_ratios)
        experiences.append(
            Experience(
                sequences=sequence,
                attention_mask=mask,
                action_mask=action_mask,
                action_log_probs=old,
                base_action_log_probs=log_probs + 0.2 * noise,
                rollout_log_probs=old,
                advantages=torch.full_like(log_probs, 1.0 if index % 2 else -0.7),
                rewards=torch.zeros(1),
                total_length=torch.tensor([length]),
                response_length=torch.tensor([response_ids.shape[1]]),
                index=[index],
                info={micro_batches.SAMPLE_INDEX: torch.tensor([index])},
            )
        )
    return experiences


def gradient(actor: Any) -> torch.Tensor:
    """The latest step's gradient of every parameter, or this rank's part, in one vector."""
    engine = actor.model
    if engine.zero_optimization_stage() < 3:
        states = engine.optimizer.optimizer.state.values()
        parts = [state["exp_avg"] for state in states if "exp_avg" in state]
    else:
        parts = [
            safe_get_full_optimizer_state(parameter, "exp_avg") for parameter in engine.parameters()
        ]
    return torch.cat([part.float().flatten() for part in parts])


def parameters(actor: Any) -> torch.Tensor:
    """Every parameter in float32, in one vector; ZeRO-3 ranks gather them together."""
    parts = [safe_get_full_fp32_param(parameter) for parameter in actor.model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def prepare(
    args: Any,
    in_float32: bool = False,
    schedule: str = "constant",
    ds: dict[str, Any] | None = None,
    **of_the_actor: Any,
) -> tuple[Any, Any, Any, Any]:
    """This rank's strategy, actor with its DeepSpeed engine, optimizer and scheduler.

    Args:
        ds: further settings of DeepSpeed's `zero_optimization`.
    """
    args.local_rank = -1
    strategy = Strategy(args)
    micro_batches.prepare_strategy(strategy)
    strategy.setup_distributed()
    if in_float32:
        given = strategy.get_ds_train_config
        strategy.get_ds_train_config = lambda *a, **k: given(*a, **k) | {"bf16": {"enabled": False}}
        # Upstream knows bf16 and fp16 alone.
        openrlhf.utils.utils.convert_to_torch_dtype = lambda _name: torch.float32
    if ds is not None:
        of_args = strategy.get_ds_train_config

        def with_settings(*args: Any, **kwargs: Any) -> dict[str, Any]:
            config: dict[str, Any] = of_args(*args, **kwargs)
            config["zero_optimization"] |= ds
            return config

        strategy.get_ds_train_config = with_settings
    actor = PolicyModel(
        args.actor.model_name_or_path,
        param_dtype=args.ds.param_dtype,
        ds_config=strategy.get_ds_train_config(),
        temperature=args.rollout.temperature,
        **{"attn_implementation": "sdpa"} | of_the_actor,
    )
    settings = {
        "optim": "adam", "muon": vars(args.actor.muon), "adam": vars(args.actor.adam),
        "lr_scheduler": schedule, "lr_warmup_ratio": 0.0, "min_lr_ratio": 0.1,
        "max_norm": args.actor.max_norm, "scheduler_steps": 1000,
    }  # fmt: skip
    return strategy, *strategy.prepare((actor, settings))


def trainer_of(
    strategy: Any, actor: Any, optimizer: Any, scheduler: Any, micro_batch: int
) -> SGActorPPOTrainer:
    """The trainer of the strategy's arguments."""
    return SGActorPPOTrainer(
        strategy,
        actor,
        ema_model=None,
        actor_optim=optimizer,
        actor_scheduler=scheduler,
        micro_train_batch_size=micro_batch,
    )


def main(
    micro_batch: int, out: Path, in_rounds: bool, only: str | None = None, *overrides: str
) -> None:
    more = [*(TWO_RANKS if in_rounds else []), *overrides]
    strategy, actor, optimizer, scheduler = prepare(arguments(*cases()["grpo"], micro_batch, more))
    experiences = rollout(actor)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {}
    for name, (recipe, extra) in cases().items():
        if only is not None and name not in only.split(","):
            continue
        strategy.args = arguments(recipe, extra, micro_batch, more)
        assert micro_batches.has_variable_size(strategy.args) == in_rounds
        trainer = trainer_of(strategy, actor, optimizer, scheduler, micro_batch)
        mine = experiences[rank::ranks]
        if in_rounds:
            mine = micro_batches.concat(experiences, map(list, DEALT[rank]), pad_token_id=0)
            for experience in mine:
                setattr(experience, micro_batches.IS_LAST_OF_STEP, experience is mine[-1])
        for experience in mine:
            trainer.replay_buffer.append(experience)
        status = trainer.ppo_train(strategy.args.algo.kl.init_coef)
        found[name] = {"gradient": gradient(actor), "rows": status["sg_optimizer_steps"]}
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    in_rounds = sys.argv[1] == "rounds"
    main(1 if in_rounds else int(sys.argv[1]), Path(sys.argv[2]), in_rounds, *sys.argv[3:])
