"""The Ray actor that holds the training loop: rollout, update, evaluation, logs, checkpoints.

``trainer`` extends upstream's ``PPOTrainer``; ``evaluation`` computes accuracies;
``prompt_dataset`` reads prompts; ``wandb_resume`` continues a W&B run. Placed by ``cluster``.
"""
