"""What the overlay expects of upstream, checked before anything starts.

The overlay subclasses upstream and replaces names of it (``register.PATCHES``). It is right only
for the version it was written against, so :func:`check` compares upstream's version, signatures and
call order with the tables below, looks for every replaced name in its package's source, and says in
a sentence what moved. It reads source with :mod:`ast`; nothing of upstream is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from importlib import metadata
from pathlib import Path

from sg_rlhf.config.upstream_flags import UpstreamChanged, upstream_root
from sg_rlhf.overlay.patches.table import PATCHES

UPSTREAM_VERSION = "0.11.2"

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


def check(root: Path | None = None, version: str | None = None) -> None:
    """Raise unless upstream is what the overlay was written against.

    Args:
        root: directory of the ``openrlhf`` package; the installed one if None.
        version: upstream's version; the installed distribution's if None.

    Raises:
        UpstreamChanged: one sentence naming the file, the name, what was expected and found.
    """
    root = root or upstream_root()
    version = version or metadata.version("openrlhf")
    if version != UPSTREAM_VERSION:
        raise UpstreamChanged(
            f"OpenRLHF {version} is installed, but the overlay is written against "
            f"{UPSTREAM_VERSION}; run scripts/bootstrap.sh, or port sg_rlhf/overlay"
        )
    for (file, name), expected in SIGNATURES.items():
        found = _parameters(_function(_parsed(root / file), file, name))
        if found != expected:
            raise UpstreamChanged(
                f"openrlhf/{file}: {name} takes ({found}), but the overlay expects ({expected})"
            )
    for (file, name), names in CALL_ORDER.items():
        _check_order(file, name, names, _used_names(_function(_parsed(root / file), file, name)))
    for patch in PATCHES:
        _check_name(patch.module, patch.name, root)
    _parsed.cache_clear()  # large


def _check_name(module: str, name: str, root: Path) -> None:
    """Raise unless the source of ``module`` defines ``name``, or the registry it is an entry of."""
    path = _source_of(module, root)
    node: ast.AST | None = _parsed(path) if path.is_file() else None
    for part in name.partition("[")[0].split("."):
        node = node and _defined(node, path.parent).get(part)
    if node is None:
        raise UpstreamChanged(f"{module}: {name} is gone, and the overlay replaces it")


def _source_of(module: str, root: Path) -> Path:
    package, *parts = module.split(".")
    if package != root.name:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UpstreamChanged(f"{package} is not installed; run scripts/bootstrap.sh")
        root = Path(next(iter(spec.submodule_search_locations)))
    path = root.joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _defined(scope: ast.AST, folder: Path) -> dict[str, ast.AST]:
    """Names that a module or class defines or imports, in an `if` or a `try` too.

    Args:
        folder: the module's, for what it imports by a star from beside it.
    """
    found: dict[str, ast.AST] = {}
    for node in getattr(scope, "body", []):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.level == 1:
            beside = _parsed(folder / f"{str(node.module).replace('.', '/')}.py")
            found |= _defined(beside, folder)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.If, ast.Try)):
            found |= _defined(node, folder) | _defined(ast.Module(node.orelse, []), folder)
    return found


def _function(tree: ast.Module, file: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node: ast.AST = tree
    for part in name.split("."):
        body = getattr(node, "body", [])
        matches = [n for n in body if getattr(n, "name", None) == part]
        if not matches:
            raise UpstreamChanged(f"openrlhf/{file}: {name} is gone, and the overlay relies on it")
        node = matches[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), name
    return node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    a = function.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    if a.vararg:
        names.append(f"*{a.vararg.arg}")
    names += [p.arg for p in a.kwonlyargs]
    if a.kwarg:
        names.append(f"**{a.kwarg.arg}")
    return ", ".join(names)


def _used_names(function: ast.AST) -> list[str]:
    """Names and attributes in the order in which the source has them."""
    found = [
        (node.end_lineno or 0, node.end_col_offset or 0, text)
        for node in ast.walk(function)
        if (text := getattr(node, "id", None) or getattr(node, "attr", None))
        and isinstance(node, (ast.Name, ast.Attribute))
    ]
    return [text for _, _, text in sorted(found)]


def _check_order(file: str, name: str, expected: tuple[str, ...], used: list[str]) -> None:
    position = 0
    for wanted in expected:
        if wanted not in used[position:]:
            after = f" after {expected[expected.index(wanted) - 1]}" if position else ""
            raise UpstreamChanged(
                f"openrlhf/{file}: {name} no longer uses {wanted}{after}, "
                "and the overlay relies on it"
            )
        position = used.index(wanted, position) + 1
