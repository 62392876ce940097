"""The policy's trainer: our losses and KL in upstream's update, a row per optimizer step."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import openrlhf.trainer.ray.ppo_actor as upstream
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import make_experience_batch
from torch.nn.utils.rnn import pad_sequence

from sg_rlhf.algo import lopti
from sg_rlhf.algo.analysis.token_statistics import TokenStatistics
from sg_rlhf.algo.token_weights import weight_sum_and_count
from sg_rlhf.algo.weightings.top_entropy import TopEntropy
from sg_rlhf.overlay.checkpoints import store
from sg_rlhf.overlay.learner import gradient_check, kl, memory, nonfinite, parameter_update_check
from sg_rlhf.overlay.learner import micro_batches as batches
from sg_rlhf.overlay.learner.old_log_probs import RankOldLogProbs
from sg_rlhf.overlay.learner.overlapped_reference import PendingLogProbs, RankReference
from sg_rlhf.overlay.learner.policy_loss import (
    PolicyLossWithStatistics,
    kl_dispatcher,
    token_context,
)
from sg_rlhf.overlay.learner.replay_buffer import BalancedBuffer
from sg_rlhf.overlay.patches import free_port as ports
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY
from sg_rlhf.overlay.weight_sync import sender
from sg_rlhf.run_dir import timing_keys
from sg_rlhf.sampling.request_seeds import SeedKey, request_seed

#: Loss terms that upstream reports per micro-batch.
LOSS_TERMS = ("policy_loss", "kl", "entropy_loss")
#: Token statistics that upstream has a name for.
UPSTREAM_NAMES = {"ppo_kl": "ppo_kl", "clip_ratio": "ppo_clip_ratio", "mismatch_kl": "vllm_kl"}
#: Token statistics that a row has under another name.
LOGGED_ELSEWHERE = (
    *UPSTREAM_NAMES, "policy_loss_token_mean", "kl_mean", "n_kl_tokens", "response_length",
)  # fmt: skip


class SGActorPPOTrainer(upstream.ActorPPOTrainer):
    """Upstream's update with our policy loss and KL by name.

    Upstream's flow is untouched: it still computes log-probs, calls ``self.actor_loss_fn`` and
    ``compute_approx_kl``, runs backward and the optimizer. Stock losses are upstream's own
    modules, called with upstream's arguments.
    """

    actor_loss_fn: Any
    replay_buffer: Any
    vllm_engines: Any
    _model_update_group: Any

    def __init__(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(strategy, *args, **kwargs)
        self.actor_loss_fn = PolicyLossWithStatistics(self.actor_loss_fn, strategy.args)
        self._kl = kl_dispatcher(strategy.args, self.actor_loss_fn)
        if batches.variable_size_here(strategy.args):
            old = self.replay_buffer
            self.replay_buffer = BalancedBuffer(
                old.sample_batch_size, old.limit, old.cpu_offload, old.packing_samples
            )
        self.replay_buffer.in_order = batches.is_balanced(strategy.args)
        # Without a KL loss upstream's "kl" is the one in the reward, a number per response.
        self._terms = [
            name for name in LOSS_TERMS if name != "kl" or strategy.args.algo.kl.use_loss
        ]
        self._weighting = self.actor_loss_fn.weighting
        self._entropy_threshold: float | None = None
        if "entropy" in self._weighting.reads:
            self.actor.register_forward_hook(self._keep_entropy)
        self._rows: list[dict[str, Any]] = []
        self._window: list[dict[str, float]] = []
        self._rollout_statistics = TokenStatistics.zeros()
        self.old_log_probs = RankOldLogProbs(self)
        self.reference = RankReference()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.skips: nonfinite.RankSkips | None = None
        if self.args.sg.on_nonfinite == "skip":
            self.skips = nonfinite.RankSkips(
                self.args, self.actor_optim, self._named_parameters, self.actor_scheduler
            )
            self.actor_loss_fn.on_fault = self.skips.fault
        else:
            self._faults = gradient_check.GradientFaults(self.actor_optim, self._named_parameters)
        self._first_step = (
            parameter_update_check.UpdateWatch(self.actor.model.module, self.actor_optim)
            if self.args.sg.check_trained
            else None
        )

    def _named_parameters(self) -> Iterable[tuple[str, Any]]:
        return self.actor.model.module.named_parameters()

    def ppo_train(self, kl_ctl: float) -> dict[str, Any]:
        """Upstream's epoch over the replay buffer, twice for Lopti; adds its optimizer steps."""
        self._rows, self._window = [], []
        self._rollout_statistics = TokenStatistics.zeros()
        self._seconds.clear()
        # What is drawn here (dropout) depends on the run's place, not on its interruptions.
        place = SeedKey(self.args.train.seed, "update", self.actor.model.global_steps, 0)
        torch.manual_seed(request_seed(place, torch.distributed.get_rank()))
        memory.reset_peak()
        started = time.perf_counter()
        if self.old_log_probs.before_update():
            self._seconds["update_old_log_probs"] = time.perf_counter() - started
        if self._weighting.normalize == "batch_mean":
            self.actor_loss_fn.mean_weight = self._rollout_mean_weight()
        if isinstance(self._weighting, TopEntropy):
            self._entropy_threshold = self._rollout_entropy_threshold(self._weighting)
        try:
            if self.args.sg.update == "lopti":
                status = self._train_in_passes(kl_ctl)
            else:
                status = super().ppo_train(kl_ctl)
        except nonfinite.TooManySkips as error:
            # Not raised: the controller writes the rows before it stops the run.
            status = {nonfinite.STOP: str(error)}
        self.old_log_probs.after_update()
        self.reference.forget()
        if self.skips is not None:
            status |= self.skips.take()
        # Upstream has its means over micro-batches; these are over the rollout's optimizer steps.
        norms = [row["actor_grad_norm"] for row in self._rows]
        if norms:
            status["actor_grad_norm_mean"] = statistics.fmean(norms)
            status["actor_grad_norm_max"] = max(norms)
            status["actor_grad_norm_std"] = statistics.pstdev(norms)
            # Upstream's own mean stays where it has one.
            status = _logged(self._rollout_statistics.metrics()) | status
        status |= memory.max_over_ranks(self.strategy)
        status |= {timing_keys.PREFIX + k: self._seconds[k] for k in timing_keys.OF_THE_RANK}
        status["sg_optimizer_steps"] = self._rows
        return status

    @functools.cached_property
    def weight_sync(self) -> sender.WeightSync:
        """Planned at the first sync, when the model is whole."""
        return sender.WeightSync(self)

    def broadcast_to_vllm(self) -> None:
        """The weight sync, in buckets or as upstream does it."""
        if sender.uses_buckets(self.args):
            self.weight_sync.send()
        else:
            super().broadcast_to_vllm()

    def _init_vllm_sync_group(self, backend: str) -> None:
        """Upstream's, at a port that the kernel gives to nobody before it is listened at."""
        vllm = self.strategy.args.vllm
        if vllm.sync_with_ray:  # which needs none
            super()._init_vllm_sync_group(backend)
            return
        of_engine = vllm.tensor_parallel_size
        world_size = vllm.num_engines * of_engine + 1
        address, port = ray.util.get_node_ip_address(), ports.free_port()
        joined = [
            engine.init_process_group.remote(
                address, port, i * of_engine + 1, world_size, "openrlhf", backend, use_ray=False
            )
            for i, engine in enumerate(self.vllm_engines)
        ]
        self._model_update_group = upstream.stateless_init_process_group(
            address, port, 0, world_size, torch.cuda.current_device()
        )
        ray.get(joined)

    def _train_in_passes(self, kl_ctl: float) -> dict[str, Any]:
        """Low-probability tokens first, then the rest; a pass without a token is not made."""
        loss_fn = self.actor_loss_fn
        threshold = self.args.sg.lopti_threshold
        statuses = []
        for name in lopti.PASSES:
            tokens = self._sum_over_rollout(functools.partial(_count_pass_tokens, threshold, name))
            if not float(tokens):
                continue
            first_row, loss_fn.lopti_pass = len(self._rows), name
            try:
                statuses.append(super().ppo_train(kl_ctl))
            finally:
                loss_fn.lopti_pass = None
            for row in self._rows[first_row:]:
                row["pass"] = name
        return {
            key: statistics.fmean(status[key] for status in statuses if key in status)
            for key in statuses[-1]
        }

    def training_step(
        self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None
    ) -> dict[str, Any]:
        """One micro-batch, as upstream does it; closes a row when the optimizer stepped."""
        waited_since = time.perf_counter()
        if self.args.train.dynamic_batch_enable:
            self._begin_dynamic(step)
        number, place, of_step = self._place(step)
        self.reference.give(experience, number, place)
        started = time.perf_counter()
        self._seconds["update_reference_log_probs"] += started - waited_since
        engine = self.actor.model
        steps_before = engine.global_steps
        is_first = experience.action_log_probs is None
        self.actor_loss_fn.prompts = experience.prompts
        self.actor_loss_fn.step = steps_before + 1
        if self.skips is not None:
            self.skips.micro_batch(experience)
        # Upstream multiplies by the mask, which a NaN survives.
        for name in ("action_log_probs", "base_action_log_probs", "rollout_log_probs"):
            if (values := getattr(experience, name)) is not None:
                setattr(experience, name, values.masked_fill(experience.action_mask == 0, 0.0))
        self.actor_loss_fn.context = dataclasses.replace(
            token_context(experience, self._weighting), entropy_threshold=self._entropy_threshold
        )
        with kl.kl_context(self._kl):
            status: dict[str, Any] = super().training_step(
                experience, kl_ctl, step, loss_batch_info
            )
        if is_first:
            self.old_log_probs.keep(step, self.actor_loss_fn.old_BT)
        metrics = status["metrics"]
        # Upstream divides by its tokens, of which there are none where its samples are left out, or
        # are responses that an agent gave without one.
        if not status["num_action_tokens"] or (self.skips is not None and self.skips.faulty):
            nonfinite.without_part(status)
        self._window.append(
            # Upstream divides a micro-batch's losses by the optimizer step's tokens per
            # micro-batch, or by all of them where micro-batches are dynamic.
            {
                name: float(metrics[name]) * (of_step if loss_batch_info is None else 1)
                for name in self._terms
                if name in metrics
            }
        )
        self._into_means(status, step, loss_batch_info)
        stepped = engine.global_steps > steps_before
        if stepped and self.skips is not None and self.skips.stepped(engine.global_steps):
            self._forget_step(status)
        elif stepped:
            # DeepSpeed skips a step that is not finite and says nothing. With fp16 that is how the
            # loss scale is found; otherwise it is a damaged batch.
            if self.args.ds.param_dtype != "fp16" and not engine.was_step_applied():
                raise self._faults.error(engine.global_steps)
            self._close_row(metrics)
            # Only a step that was taken has moved the gradient into the optimizer.
            if engine.was_step_applied() and float(metrics["actor_grad_norm"]) > 0.0:
                self._judge_first_step()
        # On CUDA what backward still computes is counted where it is next waited for.
        self._seconds["update_forward"] += self.actor_loss_fn.done_at - started
        self._seconds["update_backward"] += time.perf_counter() - self.actor_loss_fn.done_at
        return status

    def _begin_dynamic(self, step: int) -> None:
        """Before a micro-batch where an optimizer step has any number of them."""
        buffer = self.replay_buffer
        if step == 0 and self.skips is not None and self.args.train.max_epochs > 1:
            # What the epoch before left out is not divided by again.
            buffer.setup_dynamic_batch(self.strategy)
        # Upstream tells DeepSpeed of one micro-batch a step and calls its step when all are there.
        # ZeRO 1 and 2 would keep the gradient of the last one alone.
        self.actor.model.set_gradient_accumulation_boundary(
            bool(buffer.dynamic_optimizer_step[step])
        )

    def _into_means(self, status: dict[str, Any], micro_batch: int, info: Any) -> None:
        """Make a micro-batch's losses the means that upstream takes them for.

        They are its share of the step's, times ranks and micro-batches. Upstream weighs them by
        tokens into the rollout's, which is right of means, and of shares only where all have as
        many tokens.
        """
        own = status["num_action_tokens"]
        if own < 1:
            return
        if info is None:
            of_step = self.replay_buffer.dynamic_batch_num_tokens[micro_batch]
            group = self.strategy.ds_device_mesh["dp"].get_group()
            share = of_step / torch.distributed.get_world_size(group=group)
        else:
            share = float(info["batch_num_tokens"]) / info["dp_size"]
        metrics = status["metrics"]
        metrics |= {key: metrics[key] * share / own for key in self._terms if key in metrics}

    def _place(self, micro_batch: int) -> tuple[int, int, int]:
        """Of an epoch's micro-batch: its optimizer step, its place there, how many there are."""
        if not self.args.train.dynamic_batch_enable:
            size = self.strategy.accumulated_gradient
            return *divmod(micro_batch, size), size
        ends = self.replay_buffer.dynamic_optimizer_step
        step = sum(ends[:micro_batch])
        first = micro_batch
        while first and not ends[first - 1]:
            first -= 1
        return step, micro_batch - first, ends.index(1, micro_batch) - first + 1

    def _forget_step(self, status: dict[str, Any]) -> None:
        """A skipped step has no row, and no part in the rollout's figures."""
        self._window = []
        self.actor_loss_fn.take_statistics()
        status["metrics"].pop("actor_grad_norm")  # that of the step before
        if self._first_step is not None:
            self._first_step.forget_gradients()

    def _judge_first_step(self) -> None:
        watch, self._first_step = self._first_step, None
        for remark in watch.verdict() if watch is not None else ():
            print(f"the first optimizer step: {remark}")

    def _keep_entropy(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        """Hand the entropies of a training forward pass to the loss that follows it."""
        entropy = getattr(outputs[1], "entropy", None) if isinstance(outputs, tuple) else None
        if entropy is not None:
            loss_fn = self.actor_loss_fn
            tokens = loss_fn.context.advantages.shape[1]
            loss_fn.context = dataclasses.replace(
                loss_fn.context, entropy=entropy.detach()[:, -tokens:]
            )

    def _rollout_mean_weight(self) -> float:
        """Mean weight of all ranks' rollout tokens under the policy that sampled them.

        One divisor for the whole rollout keeps the loss independent of how it is cut into
        micro-batches, optimizer steps and ranks.
        """
        total = self._sum_over_rollout(
            lambda item: weight_sum_and_count(
                item.action_log_probs,
                self._weighting,
                item.action_mask,
                context=token_context(item, self._weighting),
            )
        )
        return float(total[0] / total[1])

    @torch.no_grad()
    def _rollout_entropy_threshold(self, weighting: TopEntropy) -> float:
        """The entropy that the weighting's share of all ranks' rollout tokens have at least.

        A forward pass over the rollout before its first update: one threshold for all of it keeps
        a token's weight independent of micro-batches, optimizer steps and ranks.
        """
        device = torch.cuda.current_device()
        entropies = []
        buffer = self.replay_buffer
        if self.args.train.dynamic_batch_enable:
            buffer.setup_dynamic_batch(self.strategy)
            micro_batches: Iterable[Iterable[int]] = buffer.dynamic_indices
        else:
            size, count = self.micro_train_batch_size, len(buffer.items)
            micro_batches = (range(i, min(i + size, count)) for i in range(0, count, size))
        for places in micro_batches:
            items = [buffer.items[i] for i in places]
            batch = make_experience_batch(items, self.args.ds.packing_samples)
            batch.to_device(device)
            self.actor_loss_fn.context = token_context(batch, weighting)
            with torch.no_grad():
                _, output = self.actor(
                    batch.sequences,
                    batch.action_mask,
                    attention_mask=batch.attention_mask,
                    return_output=True,
                    ring_attn_group=self.strategy.ring_attn_group,
                    return_entropy=True,
                )
            entropy_BT = output.entropy[:, -batch.action_mask.shape[1] :]
            entropies.append(entropy_BT[batch.action_mask.bool()].float().cpu())
        group = self.strategy.ds_device_mesh["dp"].get_group()
        of_ranks: list[Any] = [torch.cat(entropies)]
        if (size := torch.distributed.get_world_size(group=group)) > 1:
            mine, of_ranks = of_ranks[0], [None] * size
            torch.distributed.all_gather_object(of_ranks, mine, group=group)
        return float(weighting.threshold(torch.cat(of_ranks)))

    def _sum_over_rollout(self, of_item: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The sum over the replay buffers of all data-parallel ranks."""
        total: Any = sum(of_item(item) for item in self.replay_buffer.items)
        total = total.double().to(torch.cuda.current_device())
        group = self.strategy.ds_device_mesh["dp"].get_group()
        torch.distributed.all_reduce(total, group=group)
        return torch.as_tensor(total)

    def _close_row(self, metrics: dict[str, Any]) -> None:
        loss_fn = self.actor_loss_fn
        terms = list(self._window[0])
        losses = [statistics.fmean(micro[name] for micro in self._window) for name in terms]
        sums, losses = self._reduce(loss_fn.take_statistics(), losses)
        row: dict[str, Any] = {
            "optimizer_step": self.actor.model.global_steps,
            "actor_grad_norm": float(metrics["actor_grad_norm"]),
            "actor_lr": float(metrics["actor_lr"]),
            "micro_batches": len(self._window),
            **dict(zip(terms, losses, strict=True)),
            **_logged(sums.metrics()),
            "sg/prob_hist": sums.histogram("prob_hist").tolist(),
        }
        self._window = []
        self._rows.append(row)
        self._rollout_statistics += sums

    def _reduce(self, stats: Any, losses: list[float]) -> tuple[Any, list[float]]:
        """Sum the statistics and average the losses over data-parallel ranks."""
        device = torch.cuda.current_device()
        group = self.strategy.ds_device_mesh["dp"].get_group()
        size = torch.distributed.get_world_size(group=group)
        own_losses = torch.tensor(losses, dtype=torch.float64, device=device)
        packed = torch.cat([stats.sums.to(device), own_losses])
        torch.distributed.all_reduce(packed, group=group)
        largest = stats.maxima().to(device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        packed = packed.cpu()
        count = stats.sums.numel()
        sums = type(stats)(packed[:count], stats.weight_bounds, largest.cpu())
        return sums, (packed[count:] / size).tolist()


def _logged(found: dict[str, float]) -> dict[str, float]:
    """Token statistics by the names that a row has for them."""
    ours = {f"sg/{name}": found[name] for name in found if name not in LOGGED_ELSEWHERE}
    return {name: found[key] for key, name in UPSTREAM_NAMES.items()} | ours


def _count_pass_tokens(threshold: float, name: str, item: Any) -> torch.Tensor:
    in_pass = lopti.in_pass(item.action_log_probs, threshold, name)
    return (in_pass & item.action_mask.bool()).sum()


class SGPolicyModelActor(upstream.PolicyModelActor.__ray_metadata__.modified_class):
    """Upstream's policy actor; adds the probe that compares it with the rollout engine."""

    actor: Any
    trainer: Any
    strategy: Any
    disable_ds_ckpt: bool
    save_hf_ckpt: bool

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, shown on the terminal: it may have to build an operator."""
        batches.take_rounds(args[0] if args else kwargs["strategy"])
        with activity.phase(activity.TRAINER, "loading the model into DeepSpeed"):
            return super().init_model_from_pretrained(*args, **kwargs)

    def save_checkpoint(
        self, tag: str, client_states: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Upstream's, the plain folder first; then those of checkpoints that are gone are gone too.

        A run that is killed between the two resumes before this rollout and writes the folder
        again. In upstream's order it resumes after it, and the checkpoint never gets its folder.
        """
        disable_ds, save_hf = self.disable_ds_ckpt, self.save_hf_ckpt
        if client_states and not self.strategy.is_rank_0():
            # ZeRO 3 writes a file for each rank. Only the first rank's states are read, and these
            # hold all samples that wait for their update.
            client_states = {k: v for k, v in client_states.items() if k != BUFFER_KEY}
        try:
            if save_hf:
                self.disable_ds_ckpt = True
                super().save_checkpoint(tag, client_states, **kwargs)
            self.disable_ds_ckpt, self.save_hf_ckpt = disable_ds, False
            super().save_checkpoint(tag, client_states, **kwargs)
        finally:
            self.disable_ds_ckpt, self.save_hf_ckpt = disable_ds, save_hf
        if self.save_hf_ckpt and self.strategy.is_rank_0():
            ckpt = self.strategy.args.ckpt
            store.delete_pruned_weights(
                Path(ckpt.path), ckpt.max_num, not ckpt.disable_ds, Path(ckpt.output_dir)
            )

    def sampled_log_probs(self, sequences: list[list[int]]) -> list[list[float] | None]:
        """See :meth:`sg_rlhf.overlay.learner.old_log_probs.RankOldLogProbs.of_sequences`."""
        found: list[list[float] | None] = self.trainer.old_log_probs.of_sequences(sequences)
        return found

    def expect_reference(self, results: PendingLogProbs) -> None:
        """Before an update whose samples have no reference log-probs yet."""
        self.trainer.reference.expect(results)

    def join_engines(self) -> None:
        """Connect to all engines anew, after one was started in another's place."""
        trainer = self.trainer
        if not trainer.use_cuda_ipc and torch.distributed.get_rank() == 0:
            trainer._init_vllm_sync_group(self.strategy.args.vllm.sync_backend)

    def sync_deadline(self) -> float:
        """Seconds that the engines have for a weight sync; none (infinity) in upstream's loop."""
        args = self.strategy.args
        if not sender.uses_buckets(args):
            return float("inf")
        return float(self.trainer.weight_sync.deadline_seconds)

    def prompt_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """The trainer's log-probabilities of fixed sequences at temperature 1.

        In micro-batches of like length, no larger than those of the passes before the update.
        Every rank must be called: under ZeRO-3 a forward pass gathers parameters together.

        Returns:
            For each sequence the values of log p(token t | tokens before t), t from 1.
        """
        device = torch.cuda.current_device()
        temperature, self.actor.temperature = self.actor.temperature, 1.0
        self.actor.eval()
        results: list[list[float]] = [[]] * len(sequences)
        by_length = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        size = self.strategy.args.rollout.micro_batch_size
        try:
            with torch.no_grad():
                for start in range(0, len(by_length), size):
                    places = by_length[start : start + size]
                    rows = [torch.tensor(sequences[i]) for i in places]
                    masks = [torch.ones_like(row) for row in rows]
                    log_probs = self.actor(
                        pad_sequence(rows, batch_first=True).to(device),
                        attention_mask=pad_sequence(masks, batch_first=True).to(device),
                        return_logprobs=True,
                        ring_attn_group=self.strategy.ring_attn_group,
                    )
                    for i, of_row in zip(places, log_probs.float().tolist(), strict=True):
                        results[i] = of_row[: len(sequences[i]) - 1]
        finally:
            self.actor.temperature = temperature
            self.actor.train()
            # An engine on the same GPU takes its cache back next.
            torch.cuda.empty_cache()
        return results


RemotePolicyModelActor = ray.remote(num_gpus=1)(SGPolicyModelActor)
