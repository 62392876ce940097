"""The arguments that upstream's ``train`` gets: a nested namespace, made from a recipe."""

from __future__ import annotations

import copy
import os
import re
from argparse import Namespace
from typing import Any

from sg_rlhf.config import MODULE_KEYS, Config, ConfigError, local_path
from sg_rlhf.config import checks as recipe_checks
from sg_rlhf.config.checks import cuda_toolkit, optional_packages
from sg_rlhf.config.checks.input_files import count_prompts
from sg_rlhf.config.recipe import nested
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.overlay.patches import flash_attn_shim
from sg_rlhf.overlay.settings import rollout_plan, worker_settings
from sg_rlhf.overlay.settings.lookup import value_of

#: A W&B key: 40 or more characters, perhaps after the name of a server; or a token with dots.
WANDB_KEY = re.compile(r"[A-Za-z0-9_.-]{40,}")


class UsageError(ValueError):
    """The settings cannot work together; the message is one line for the user."""


class UnsupportedHere(UsageError):
    """The settings could work, but not on this machine."""


def upstream_arguments(config: Config) -> Namespace:
    """Build the nested namespace that upstream's classes read, with ``sg``, and check it.

    Raises:
        UsageError: settings that cannot work together.
        UnsupportedHere: a package that they need is not installed.
    """
    try:
        recipe_checks.check(config)
        flat = _flat(config)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    _derive(flat)
    args: Namespace = _namespace(nested(flat))
    args.sg = Namespace(**config.sg.model_dump())
    if args.sg.fused_logprobs and not worker_settings.uses_fused_log_probs(args):
        print("actor.fused_logprobs: off with ds.deepcompile")
    if args.use_ms:
        _use_modelscope(config)
    return args


def _flat(config: Config) -> dict[str, Any]:
    """Every upstream setting by its dotted key; upstream changes lists in place, so copies."""
    flat = {key: copy.deepcopy(config.value(key)) for key in flags()}
    if "ds.attn_implementation" not in config.values:
        # Upstream's default is flash-attn, which the locked environment does not have.
        flat["ds.attn_implementation"] = packed_attention.VARLEN
    for key in MODULE_KEYS:
        if flat[key]:
            flat[key] = local_path(key, str(flat[key]))
    if flat["actor.eps_clip_low_high"] is None:
        flat["actor.eps_clip_low_high"] = config.clip_range()
    return flat


def _derive(flat: dict[str, Any]) -> None:
    """Fill in what upstream's script derives from other settings; a test compares them."""
    threshold = flat["algo.advantage.is_correction_threshold"]
    if len(threshold) == 1:  # an upper bound
        threshold.insert(0, 0.0)
    reward = "agent" if flat["train.agent_func_path"] else flat["reward.remote_url"]
    flat["reward.remote_url"] = reward.split(",") if reward else reward
    if flat["train.dynamic_batch_enable"]:
        flat["ds.packing_samples"] = True
        flat["rollout.max_tokens_per_gpu"] = (
            flat["rollout.max_tokens_per_gpu"] or flat["train.max_tokens_per_gpu"]
        )
    flat["ds.attn_implementation"] = packed_attention.resolve_attention(
        str(flat["ds.attn_implementation"]), flat["ds.packing_samples"]
    )
    flat["vllm.enable_sleep"] = flat["vllm.enable_sleep"] and flat["train.colocate_all"]
    flat["rollout.vllm_generate_batch_size"] = (
        flat["rollout.vllm_generate_batch_size"] or flat["rollout.batch_size"]
    )


def _namespace(tree: dict[str, Any]) -> Namespace:
    return Namespace(
        **{key: _namespace(v) if isinstance(v, dict) else v for key, v in tree.items()}
    )


def _use_modelscope(config: Config) -> None:
    """Let models come from ModelScope instead of the hub, as upstream does for ``use_ms``."""
    try:
        from modelscope.utils.hf_util import patch_hub
    except ModuleNotFoundError as error:
        lines = optional_packages.missing(config.value)
        raise UnsupportedHere("; ".join(lines) or str(error)) from None
    patch_hub()


def check_prompt_count(config: Config, args: Namespace) -> None:
    """Refuse local prompts that do not fill one rollout.

    Raises:
        UnusablePrompts: one line naming the keys and the values.
    """
    count = count_prompts(config)
    prompts = int(args.data.max_samples) if count is None else count
    rollout_plan.check_prompts(rollout_plan.plan(prompts, args), args)


def check_trackers(args: Namespace) -> None:
    """Refuse a tracker that is not installed, and a W&B key of a wrong form.

    Raises:
        UsageError: one line with the key and the remedy.
    """
    if args.sg.wandb == "auto" and os.environ.get("WANDB_MODE", "online") == "online":
        name, key = "WANDB_API_KEY", os.environ.get("WANDB_API_KEY")
        if not key:
            name, key = "logger.wandb.key", args.logger.wandb.key
        if key and not WANDB_KEY.fullmatch(key):
            raise UsageError(
                f"{name}: no W&B key: it has {len(key)} characters, expected 40 or more of A-Z, "
                "a-z, 0-9, _, - and dot; see https://wandb.ai/authorize or set sg.wandb=offline"
            )
    if args.sg.trackio and not optional_packages.is_installed("trackio"):
        raise UnsupportedHere(
            "sg.trackio=true: needs trackio, not installed: pip install 'trackio>=0.43'; or set "
            "sg.trackio=false"
        )


def check_platform(args: Namespace) -> None:
    """Refuse settings that cannot work on this machine.

    Without CUDA, packed samples get the only attention that works there.

    Raises:
        UnsupportedHere: naming each key and what to use instead.
    """
    value = value_of(args)
    if not platform.is_cpu():
        problems = [*optional_packages.missing(value), *cuda_toolkit.unsupported_settings(value)]
        if "flash_attention_2" in args.ds.attn_implementation and flash_attn_shim.absent():
            problems.append(
                f"ds.attn_implementation={args.ds.attn_implementation}: flash-attn is not "
                f"installed; use {packed_attention.VARLEN}, torch's own kernel, or install "
                f"{flash_attn_shim.PINNED} (docs/dependencies.md)"
            )
        if args.ds.param_dtype == "fp32":
            problems.append("ds.param_dtype=fp32: with CUDA use bf16 or fp16")
        if problems:
            raise UnsupportedHere("; ".join(problems))
        return
    problems = platform.unsupported_settings(value)
    if problems:
        raise UnsupportedHere(
            "; ".join(problems) + " (no CUDA here; SG_PLATFORM=cuda if the cluster's nodes have it)"
        )
    problems = optional_packages.missing(value)
    if problems:
        raise UnsupportedHere("; ".join(problems))
    if args.ds.packing_samples:
        args.ds.attn_implementation = packed_attention.VARLEN
