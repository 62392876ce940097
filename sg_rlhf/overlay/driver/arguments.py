"""The arguments that upstream's ``train`` gets: a nested namespace, made from a recipe."""

from __future__ import annotations

import copy
import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import single_line
from sg_rlhf.config import MODULE_KEYS, Config, ConfigError, local_path
from sg_rlhf.config import checks as recipe_checks
from sg_rlhf.config.checks import cuda_toolkit, input_files, optional_packages
from sg_rlhf.config.checks.files import WRITTEN_TO
from sg_rlhf.config.recipe import nested
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.data_io import model_folder
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.overlay.patches import flash_attn_shim
from sg_rlhf.overlay.settings import rollout_plan, worker_settings
from sg_rlhf.overlay.settings.lookup import value_of

REVISION = "sg.model_revision"
#: Formats that neither transformers nor vLLM loads here.
UNUSED_FORMATS = ["original/*", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]
#: A W&B key: 40 or more characters, perhaps after the name of a server; or a token with dots.
WANDB_KEY = re.compile(r"[A-Za-z0-9_.-]{40,}")


class UsageError(ValueError):
    """The settings cannot work together; the message is one line for the user."""


class UnsupportedHere(UsageError):
    """The settings could work, but not on this machine."""


def upstream_arguments(config: Config) -> Namespace:
    """Build and check the nested namespace that upstream's classes read, with ``sg``.

    Raises UsageError, or UnsupportedHere where a package is not installed.
    """
    try:
        recipe_checks.check(config)
        config = with_absolute_paths(config)
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


def with_absolute_paths(config: Config) -> Config:
    """The configuration for workers, which may have been started in another folder.

    Only a name that is there, seen from here, is a path; others may be ids of a hub.
    """
    given = config.values
    absolute: dict[str, Any] = {
        k: _absolute(given[k]) for k in input_files.READ_FROM if given.get(k)
    }
    absolute |= {k: os.path.abspath(given[k]) for k in WRITTEN_TO if given.get(k)}
    sets = [s.model_copy(update={"dataset": _absolute(s.dataset)}) for s in config.sg.eval_sets]
    trusted = [
        _absolute(local_path("sg.trust_remote_code", n)) for n in config.sg.trust_remote_code
    ]
    sg = config.sg.model_copy(update={"eval_sets": sets, "trust_remote_code": trusted})
    return replace(config, values=given | absolute, sg=sg)


def _absolute(names: str) -> str:
    """Upstream's lists have commas between names, and its data sets ``@FOLDER`` behind them."""

    def one(name: str) -> str:
        path, at, folder = name.strip().partition("@")
        found = os.path.abspath(path)
        usable = path and os.path.exists(path) and not {",", "@"} & set(found)
        return found + at + folder if usable else name

    return ",".join(map(one, names.split(",")))


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
    """Refuse local prompts that do not fill one rollout; UnusablePrompts in one line."""
    count = input_files.count_prompts(config)
    prompts = int(args.data.max_samples) if count is None else count
    rollout_plan.check_prompts(rollout_plan.plan(prompts, args), args)


def fit_to_machine(args: Namespace) -> None:
    """Replace what this machine needs in another form, in place; UsageError for what it lacks."""
    check_platform(args)
    check_trackers(args)
    pin_revision(args)


def check_trackers(args: Namespace) -> None:
    """Refuse a tracker that is not installed, and a W&B key of a wrong form."""
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
    """Refuse settings that cannot work here; without CUDA choose the attention that works."""
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


def pin_revision(args: Namespace) -> None:
    """Replace the model's id by the folder of ``sg.model_revision``, downloaded if need be.

    Upstream, transformers and vLLM load a model by its id, without a revision, at more than ten
    places. Raises UsageError if the model is a folder, or the hub does not have the revision.
    """
    revision, name = args.sg.model_revision, args.actor.model_name_or_path
    if not revision:
        return
    if Path(name).is_dir() or not model_folder.is_hub_id(name):
        raise UsageError(
            f"{REVISION}={revision}: actor.model_name_or_path={name} is a folder, which has no "
            "revisions; give an id of the hub"
        )
    # Imported here: it takes a second, and only this setting needs it.
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            ignore_patterns=UNUSED_FORMATS,
            local_files_only=constants.HF_HUB_OFFLINE,
        )
        model_folder.check(Path(folder), trusted=name in args.sg.trust_remote_code)
    except (OSError, ValueError, model_folder.ModelError) as error:
        raise UsageError(
            f"{REVISION}={revision}: {name}: {single_line(error)}; "
            f"https://huggingface.co/{name}/commits/main has its commits"
        ) from None
    if name in args.sg.trust_remote_code:
        args.sg.trust_remote_code.append(folder)
    args.actor.model_name_or_path = folder
