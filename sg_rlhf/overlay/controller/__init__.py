"""The Ray actor that runs the training loop. It holds no model; ranks and engines do the work.

``trainer.Controller`` is the loop. One rollout step, with the module that does each part:

1. Generate: send the prompts to the engines and collect scored responses
   (``rollout.generator``, ``rollout.dispatch``). An asynchronous run takes them from
   ``rollout.async_buffer``.
2. Submit the next prompts of an asynchronous run (``rollout.async_buffer``).
3. Score: log-probs of policy and reference, KL, advantages, micro-batches
   (``learner.experience_maker``, ``learner.advantages``).
4. Compute statistics and keep samples for the log (``rollout_stats``, ``sample_log``).
5. Send the micro-batches to the ranks (``learner.replay_buffer``).
6. Update the policy (``learner.update``).
7. Sync the weights to the engines and compare log-probs (``engine_sync``, ``weight_sync``).
8. Log the row (``metric_log``); save a checkpoint if due (``controller_state``, ``checkpoints``).
9. Evaluate if due (``evaluation_loop``, ``evaluation``) and save the best checkpoint.

``run_start`` prepares the run directory, ``prompt_dataset`` reads and checks prompts,
``wandb_resume`` continues a W&B run. May import every package of the overlay except ``driver``.
"""
