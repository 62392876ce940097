"""The signatures and the call order of upstream that the overlay relies on.

Whoever ports the overlay to another version of OpenRLHF runs this first: each failed case names the
function that changed. It reads the source of upstream with :mod:`ast` and imports nothing of it.
"""

from __future__ import annotations

import ast
import functools

import pytest

from sg_rlhf.config.upstream_flags import UpstreamChanged, upstream_root
from sg_rlhf.overlay.patches import version

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
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer.ppo_train"): "self, kl_ctl",
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer.training_step"): (
        "self, experience, kl_ctl, step, loss_batch_info"
    ),
    ("trainer/ray/ppo_actor.py", "PolicyModelActor.init_model_from_pretrained"): (
        "self, strategy, pretrain, max_steps, vllm_engines"
    ),
    ("trainer/ray/ppo_actor.py", "PolicyModelActor.save_checkpoint"): (
        "self, tag, client_states, metric_value, metric_key"
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
    ("trainer/ray/vllm_engine.py", "RolloutRayActor.__init__"): (
        "self, *args, bundle_indices, agent_func_path, remote_rm_url, mm_pad_token_ids, **kwargs"
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
    ("trainer/ppo_trainer.py", "compute_eval_metrics"): (
        "eval_dataloader, samples_list, n_samples_per_prompt"
    ),
    ("trainer/ppo_trainer.py", "prepare_datasets"): "strategy, tokenizer",
    ("trainer/ppo_trainer.py", "BasePPOTrainer.__init__"): (
        "self, strategy, actor_model_group, critic_model_group, reward_model_group, "
        "reference_model_group, vllm_engines, tokenizer"
    ),
    ("trainer/ppo_trainer.py", "BasePPOTrainer.train_step"): "self, rollout_samples, global_step",
    ("trainer/ppo_trainer.py", "BasePPOTrainer.ppo_train"): "self, global_steps",
    ("trainer/ppo_trainer.py", "BasePPOTrainer.broadcast_to_vllm"): "self",
    ("trainer/ppo_trainer.py", "BasePPOTrainer.save_logs_and_checkpoints"): (
        "self, global_step, logs_dict, client_states"
    ),
    ("trainer/ppo_trainer.py", "BasePPOTrainer._compute_rollout_stats"): "self, experiences",
    ("trainer/ppo_trainer.py", "BasePPOTrainer.init_checkpoint_states"): "self",
    ("trainer/ppo_trainer.py", "PPOTrainer.get_max_steps"): "self",
    ("trainer/ppo_trainer.py", "PPOTrainer.fit"): "self, global_step",
    ("trainer/ppo_trainer.py", "PPOTrainer.evaluate"): "self, global_step, **generate_kwargs",
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.make_experience"): (
        "self, samples_list"
    ),
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker._dispatch_forward"): (
        "self, group, sync_condition, **kwargs"
    ),
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker._flatten_results"): (
        "self, refs, duplicate_factor"
    ),
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.make_experience_batch"): (
        "self, rollout_samples"
    ),
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.split_rollout_samples"): (
        "self, rollout_samples"
    ),
    ("trainer/ppo_utils/experience.py", "Experience.concat_experiences"): (
        "experiences_list, pad_token_id"
    ),
    ("trainer/ppo_utils/experience.py", "balance_experiences"): "experiences, args",
    # Samples of an optimizer step are a rank's next ones in the buffer.
    ("trainer/ppo_utils/replay_buffer.py", "NaiveReplayBuffer.setup_dynamic_batch"): (
        "self, strategy"
    ),
    ("trainer/ray/launcher.py", "RayActorGroup.async_run_method_batch"): (
        "self, method_name, **kwargs"
    ),
    (
        "trainer/ppo_utils/experience_maker.py",
        "RemoteExperienceMaker.compute_advantages_and_returns",
    ): ("self, experiences"),
    ("trainer/ppo_utils/samples_generator.py", "SamplesGenerator._generate_vllm"): (
        "self, dataloader_iter, num_prompts, dynamic_filtering, **generate_kwargs"
    ),
    (
        "trainer/ppo_utils/samples_generator.py",
        "SamplesGenerator._process_response_into_experience",
    ): ("self, response, **generate_kwargs"),
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
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer.__init__"): (
        "PolicyLoss",
        "_init_vllm_sync_group",
    ),
    # wk3 reuses the weights of the policy loss, so the loss must be computed before the KL.
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer.training_step"): (
        "actor_loss_fn",
        "compute_approx_kl",
        "backward",
        "optimizer_step",
    ),
    # The buffer is trained in its own order, by windows of an optimizer step's micro-batches.
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer.ppo_train"): (
        "DataLoader",
        "replay_buffer",
        "iter_grad_accum_global_norm",
    ),
    # Without a pass of the policy, zeros stand for its log-probs until the KL is computed.
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.make_experience"): (
        "_dispatch_forward",
        "actor_model_group",
        "_flatten_results",
        "use_loss",
        "compute_approx_kl",
    ),
    ("trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.make_experience_batch"): (
        "split_rollout_samples",
        "make_experience",
        "compute_advantages_and_returns",
    ),
    # The plain folder of a save is counted after both are written.
    ("trainer/ray/ppo_actor.py", "PolicyModelActor.save_checkpoint"): ("save_ckpt", "save_model"),
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer._init_vllm_sync_group"): (
        "stateless_init_process_group",
    ),
    # The same parameters, by the same rule, and the same way to the engines.
    ("trainer/ray/ppo_actor.py", "ActorPPOTrainer.broadcast_to_vllm"): (
        "reset_prefix_cache",
        "_model_update_group",
        "reduce_tensor",
        "all_gather_object",
        "use_cuda_ipc",
        "named_parameters",
        "requires_grad",
    ),
    # What is awake before the weights come.
    ("trainer/ppo_trainer.py", "BasePPOTrainer.broadcast_to_vllm"): (
        "enable_sleep",
        "batch_vllm_engine_call",
        "async_run_method",
    ),
    # A loaded optimizer is offloaded at once, into the buffers that its state has.
    ("trainer/ray/ppo_actor.py", "PolicyModelActor.init_model_from_pretrained"): (
        "load_ckpt",
        "offload_deepspeed_states",
        "ActorPPOTrainer",
    ),
    ("trainer/ray/vllm_engine.py", "create_vllm_engines"): ("RolloutRayActor",),
    ("trainer/ppo_trainer.py", "BasePPOTrainer.__init__"): ("RemoteExperienceMaker",),
    ("trainer/ppo_trainer.py", "PPOTrainer.__init__"): ("SamplesGenerator",),
    ("trainer/ppo_trainer.py", "BasePPOTrainer.train_step"): (
        "make_experience_batch",
        "_compute_rollout_stats",
        "balance_experiences",
        "async_run_method_batch",
        "ppo_train",
        "broadcast_to_vllm",
    ),
    ("trainer/ppo_trainer.py", "PPOTrainer.evaluate"): ("compute_eval_metrics",),
    # The rollout's time ends with its row, before a checkpoint or an evaluation that follows.
    ("trainer/ppo_trainer.py", "PPOTrainer.fit"): (
        "generate_samples",
        "train_step",
        "save_logs_and_checkpoints",
        "evaluate",
        "save_best_checkpoint",
    ),
    ("trainer/ppo_utils/samples_generator.py", "SamplesGenerator.generate_samples"): (
        "_dataloader_iter",
        "_generate_vllm",
    ),
    ("cli/train_ppo_ray.py", "train"): (
        "create_vllm_engines",
        "PolicyModelActor",
        "PPOTrainer",
        "get_max_steps",
    ),
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
