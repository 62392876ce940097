"""The signatures and the call order of upstream that the overlay relies on.

Whoever ports the overlay to another version of OpenRLHF runs this first: each failed case names the
function that changed. It reads the source of upstream with :mod:`ast` and imports nothing of it.
"""

from __future__ import annotations

import ast
import functools

import pytest

from sg_rlhf.overlay.patches import version
from sg_rlhf.overlay.patches.version import UpstreamChanged, upstream_root

_POLICY_LOSS_FORWARD = (
    "self, log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, "
    "dp_size, batch_num_tokens, global_batch_size"
)

#: (file, qualified name) -> parameter names, in order.
SIGNATURES: dict[tuple[str, str], str] = {
    ("models/loss.py", "PolicyLoss.forward"): _POLICY_LOSS_FORWARD,
    ("models/loss.py", "aggregate_loss"): (
        "loss, loss_mask, token_level_loss, dp_size, batch_num_tokens, global_batch_size"
    ),
    ("models/utils.py", "compute_approx_kl"): (
        "log_probs, log_probs_base, log_probs_old, kl_estimator, unbiased_gradient"
    ),
    ("utils/deepspeed/deepspeed.py", "DeepspeedStrategy.get_grad_norm"): "self, model",
    ("utils/deepspeed/deepspeed.py", "DeepspeedStrategy.save_ckpt"): (
        "self, model, save_dir, tag, max_num, max_mem, client_state, save_latest, metric_value, "
        "metric_key"
    ),
    ("utils/deepspeed/deepspeed.py", "DeepspeedStrategy.load_ckpt"): (
        "self, model, load_dir, tag, load_module_strict, load_optimizer_states, "
        "load_lr_scheduler_states, load_module_only"
    ),
    ("utils/deepspeed/deepspeed.py", "DeepspeedStrategy.save_model"): (
        "self, model, tokenizer, output_dir, **kwargs"
    ),
    ("utils/distributed_util.py", "stateless_init_process_group"): (
        "master_address, master_port, rank, world_size, device"
    ),
    ("trainer/ray/vllm_worker_wrap.py", "WorkerWrap.update_weight"): (
        "self, name, dtype, shape, empty_cache"
    ),
    ("trainer/ray/vllm_worker_wrap.py", "WorkerWrap.init_process_group"): (
        "self, master_address, master_port, rank_offset, world_size, group_name, backend, use_ray"
    ),
    ("trainer/ray/vllm_engine.py", "RolloutRayActor._configure_device_env"): (
        "self, backend, bundle_indices, num_gpus"
    ),
    ("trainer/ray/vllm_engine.py", "RolloutRayActor._configure_vllm_env"): (
        "self, version, vllm, full_determinism"
    ),
    ("trainer/ray/vllm_engine.py", "RolloutRayActor.generate_responses"): (
        "self, prompt, label, sampling_params, max_length, hf_tokenizer, num_samples, images"
    ),
    ("utils/agent.py", "SingleTurnAgentExecutor._fetch_rewards_via_func"): (
        "self, queries_list, prompts_list, labels_list"
    ),
    ("utils/agent.py", "SingleTurnAgentExecutor._fetch_rewards_via_http"): (
        "self, queries_list, prompts_list, labels_list"
    ),
    ("trainer/ppo_utils/experience.py", "Experience.concat_experiences"): (
        "experiences_list, pad_token_id"
    ),
    # Samples of an optimizer step are a rank's next ones in the buffer.
    ("trainer/ppo_utils/replay_buffer.py", "NaiveReplayBuffer.setup_dynamic_batch"): (
        "self, strategy"
    ),
    ("trainer/ppo_utils/replay_buffer.py", "NaiveReplayBuffer.__init__"): (
        "self, sample_batch_size, limit, cpu_offload, packing_samples, dynamic_batch"
    ),
    ("models/actor.py", "Actor.__init__"): (
        "self, pretrain_or_model, attn_implementation, param_dtype, load_in_4bit, lora_rank, "
        "lora_alpha, lora_dropout, target_modules, ds_config, device_map, packing_samples, "
        "temperature, use_liger_kernel, freeze_visual_encoder, experts_implementation, **kwargs"
    ),
    ("utils/utils.py", "get_tokenizer"): "pretrain, model, padding_side, strategy, use_fast",
    ("utils/deepspeed/deepspeed.py", "DeepspeedStrategy.__init__"): (
        "self, seed, full_determinism, max_norm, micro_train_batch_size, train_batch_size, "
        "zero_stage, args"
    ),
    ("utils/deepspeed/deepspeed.py", "DeepspeedStrategy.get_ds_train_config"): (
        "self, optim_dict, max_norm"
    ),
    ("trainer/ray/launcher.py", "BaseModelActor._setup_distributed"): "self, strategy",
    ("trainer/ray/launcher.py", "ReferenceModelActor.init_model_from_pretrained"): (
        "self, strategy, pretrain"
    ),
    ("trainer/ray/launcher.py", "RewardModelActor.init_model_from_pretrained"): (
        "self, strategy, pretrain"
    ),
    ("trainer/ray/launcher.py", "RayActorGroup.__init__"): (
        "self, num_nodes, num_gpus_per_node, ray_actor_type, pg, num_gpus_per_actor, "
        "duplicate_actors, resources, num_resources_per_node"
    ),
    ("trainer/ray/launcher.py", "RayActorGroup.async_run_method_batch"): (
        "self, method_name, **kwargs"
    ),
    ("trainer/ppo_utils/length_penalty.py", "apply_length_penalties"): "experiences, args",
    ("models/utils.py", "compute_reward"): "r, kl_coef, kl, action_mask, reward_clip_range",
    ("trainer/ray/vllm_engine.py", "RolloutRayActor.generate"): (
        "self, prompt_token_ids, sampling_params, multi_modal_data"
    ),
    ("trainer/ray/vllm_engine.py", "_load_agent_executor"): "agent_func_path",
    ("utils/agent.py", "AgentExecutorBase.execute"): (
        "self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images"
    ),
}

#: (file, qualified name) -> names that its body must use, in this order.
CALL_ORDER: dict[tuple[str, str], tuple[str, ...]] = {
    # The ranks' address and port.
    ("trainer/ray/launcher.py", "BaseDistributedActor.__init__"): ("_get_free_port",),
}


def test_another_version_is_refused() -> None:
    version.check_version()
    with pytest.raises(UpstreamChanged, match=r"OpenRLHF 0\.12\.0 is installed.*0\.11\.2"):
        version.check_version("0.12.0")


@pytest.mark.parametrize("key", SIGNATURES, ids=lambda key: key[1])
def test_a_function_takes_the_parameters_that_the_overlay_passes(key: tuple[str, str]) -> None:
    assert parameters(function(*key)) == SIGNATURES[key]


@pytest.mark.parametrize("key", CALL_ORDER, ids=lambda key: key[1])
def test_a_function_uses_these_names_in_this_order(key: tuple[str, str]) -> None:
    position, used = 0, used_names(function(*key))
    for name in CALL_ORDER[key]:
        assert name in used[position:], f"{name} is gone or comes earlier"
        position = used.index(name, position) + 1


@functools.cache
def parsed(file: str) -> ast.Module:
    return ast.parse((upstream_root() / file).read_text())


def function(file: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a function of OpenRLHF by its file and qualified name."""
    node: ast.AST = parsed(file)
    for part in name.split("."):
        matches = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == part]
        assert matches, f"openrlhf/{file}: {name} is gone"
        node = matches[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), name
    return node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The names of a function's parameters, separated by commas."""
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg:
        names.append(f"*{a.vararg.arg}")
    names += [p.arg for p in a.kwonlyargs]
    if a.kwarg:
        names.append(f"**{a.kwarg.arg}")
    return ", ".join(names)


def used_names(node: ast.AST) -> list[str]:
    """Names and attributes in a function, in source order."""
    positions = [
        (child.end_lineno or 0, child.end_col_offset or 0, text)
        for child in ast.walk(node)
        if isinstance(child, (ast.Name, ast.Attribute))
        and (text := getattr(child, "id", None) or getattr(child, "attr", None))
    ]
    return [text for _, _, text in sorted(positions)]
