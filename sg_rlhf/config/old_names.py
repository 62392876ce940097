"""Settings by the names that OpenRLHF had before 0.10, and that verl and TRL have.

Only for the message about an unknown key: ``did you mean``.
"""

from __future__ import annotations

#: Name, or the end of a dotted one -> our keys.
OLD_NAMES: dict[str, tuple[str, ...]] = {
    # OpenRLHF's flat flags.
    "pretrain": ("actor.model_name_or_path",),
    "reward_pretrain": ("reward.model_name_or_path",),
    "remote_rm_url": ("reward.remote_url",),
    "agent_func_path": ("train.agent_func_path",),
    "prompt_data": ("data.prompt_dataset",),
    "eval_dataset": ("eval.dataset",),
    "prompt_max_len": ("data.max_len", "rollout.max_new_tokens"),
    "generate_max_len": ("rollout.max_new_tokens",),
    "train_batch_size": ("train.batch_size",),
    "micro_train_batch_size": ("train.micro_batch_size",),
    "rollout_batch_size": ("rollout.batch_size",),
    "micro_rollout_batch_size": ("rollout.micro_batch_size",),
    "actor_learning_rate": ("actor.adam.lr",),
    "critic_learning_rate": ("critic.adam.lr",),
    "advantage_estimator": ("algo.advantage.estimator",),
    "init_kl_coef": ("algo.kl.init_coef",),
    "kl_estimator": ("algo.kl.estimator",),
    "dynamic_filtering": ("algo.dynamic_filtering_enable",),
    "colocate_all_models": ("train.colocate_all",),
    "packing_samples": ("ds.packing_samples",),
    "gradient_checkpointing": ("actor.gradient_checkpointing_enable",),
    "bf16": ("ds.param_dtype",),
    "flash_attn": ("ds.attn_implementation",),
    "lora_rank": ("ds.lora.rank",),
    "save_path": ("ckpt.output_dir",),
    "max_ckpt_num": ("ckpt.max_num",),
    "use_wandb": ("sg.wandb", "logger.wandb.key"),
    "wandb_run_name": ("logger.wandb.run_name",),
    "use_tensorboard": ("logger.tensorboard_dir",),
    # verl.
    "model.path": ("actor.model_name_or_path",),
    "train_files": ("data.prompt_dataset",),
    "val_files": ("eval.dataset", "sg.eval_sets"),
    "prompt_key": ("data.input_key",),
    "reward_fn_key": ("data.label_key",),
    "custom_reward_function.path": ("reward.remote_url",),
    "data.train_batch_size": ("rollout.batch_size",),
    "ppo_mini_batch_size": ("train.batch_size",),
    "ppo_micro_batch_size_per_gpu": ("train.micro_batch_size",),
    "ppo_epochs": ("train.max_epochs",),
    "ppo_max_token_len_per_gpu": ("train.max_tokens_per_gpu",),
    "log_prob_micro_batch_size_per_gpu": ("rollout.micro_batch_size",),
    "rollout.n": ("rollout.n_samples_per_prompt",),
    "max_prompt_length": ("data.max_len", "rollout.max_new_tokens"),
    "max_response_length": ("rollout.max_new_tokens",),
    "optim.lr": ("actor.adam.lr",),
    "clip_ratio": ("actor.eps_clip_low_high",),
    "clip_ratio_low": ("actor.eps_clip_low_high",),
    "clip_ratio_high": ("actor.eps_clip_low_high",),
    "clip_ratio_c": ("actor.dual_clip",),
    "adv_estimator": ("algo.advantage.estimator",),
    "kl_coef": ("algo.kl.init_coef",),
    "kl_loss_coef": ("algo.kl.init_coef",),
    "kl_loss_type": ("algo.kl.estimator",),
    "use_kl_loss": ("algo.kl.use_loss",),
    "entropy_coeff": ("actor.entropy_coef",),
    "tensor_model_parallel_size": ("vllm.tensor_parallel_size",),
    "n_gpus_per_node": ("actor.num_gpus_per_node",),
    "nnodes": ("actor.num_nodes",),
    "total_epochs": ("train.num_episodes",),
    "save_freq": ("ckpt.save_steps",),
    "test_freq": ("eval.steps",),
    "project_name": ("logger.wandb.project",),
    "experiment_name": ("logger.wandb.run_name",),
    # TRL.
    "num_generations": ("rollout.n_samples_per_prompt",),
    "max_completion_length": ("rollout.max_new_tokens",),
    "learning_rate": ("actor.adam.lr",),
    "per_device_train_batch_size": ("train.micro_batch_size",),
    "num_iterations": ("train.max_epochs",),
    "num_train_epochs": ("train.num_episodes",),
    "reward_funcs": ("reward.remote_url",),
    "beta": ("algo.kl.init_coef",),
    "epsilon": ("actor.eps_clip_low_high",),
    "epsilon_high": ("actor.eps_clip_low_high",),
    "loss_type": ("actor.policy_loss_type", "actor.loss_agg_mode"),
    "scale_rewards": ("algo.advantage.estimator",),
    "max_grad_norm": ("actor.max_norm",),
    "warmup_ratio": ("actor.lr_warmup_ratio",),
    "lr_scheduler_type": ("actor.lr_scheduler",),
    "eval_steps": ("eval.steps",),
    "save_steps": ("ckpt.save_steps",),
    "run_name": ("logger.wandb.run_name",),
    "report_to": ("sg.wandb", "logger.tensorboard_dir"),
    # Short forms that people type.
    "temperature": ("rollout.temperature", "eval.temperature"),
    "lr": ("actor.adam.lr",),
    "model": ("actor.model_name_or_path",),
    "seed": ("train.seed",),
}


def ours(key: str) -> list[str]:
    """Our keys for a name of another trainer; the longest end of it that is known counts."""
    parts = key.split(".")
    ends = (".".join(parts[place:]) for place in range(len(parts)))
    return list(next((OLD_NAMES[end] for end in ends if end in OLD_NAMES), ()))
