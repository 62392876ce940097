"""The rollout engine: upstream's vLLM actor that refuses missing rewards and can be probed."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import openrlhf.trainer.ray.vllm_engine as upstream
import psutil
import ray
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

from sg_rlhf.common.text import truncate
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.fork_server import client as fork_server
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import EngineReplaced, RewardError
from sg_rlhf.overlay.rollout.batch_barrier import BatchBarrier
from sg_rlhf.overlay.rollout.dispatch import EngineInstance, RequestTag
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.run_dir.weight_versions import append_version
from sg_rlhf.sampling import vllm_settings
from sg_rlhf.sampling.request_seeds import SeedKey, request_seed
from sg_rlhf.tasks import chat, reward_values

WORKER_EXTENSION = "sg_rlhf.overlay.weight_sync.receiver.BucketWorkerWrap"
CPU_WORKER_EXTENSION = "sg_rlhf.overlay.weight_sync.cpu_receiver.CpuWorkerWrap"
MAX_SHOWN_CHARACTERS = 600
#: How soon the callers of a core that ended hear of it, seconds.
DEAD_CORE_SECONDS = 0.5
#: How often a paused engine looks for outputs that are still to be counted.
PAUSED_SECONDS = 0.02
#: How often Ray starts an engine again whose process ended; the run may allow fewer
#: (``sg.engine_restarts``).
MAX_RESTARTS = 3


@dataclass
class _Response:
    """One response in the making."""

    draw: SeedKey
    number: int
    gate: BatchBarrier | None
    turn: int = 0
    #: Own tokens of its earlier turns, and the weights that sampled each
    #: (:mod:`sg_rlhf.run_dir.weight_versions`).
    tokens: int = 0
    runs: list[list[int]] = field(default_factory=list)


_response: contextvars.ContextVar[_Response | None] = contextvars.ContextVar(
    "response", default=None
)


class StrictSingleTurnExecutor(SingleTurnAgentExecutor):
    """Keeps the exception of a failing reward function, which upstream swallows into a log line.

    Upstream calls the reward function in a thread, catches whatever it raises and goes on with
    ``reward=None``. The exception is kept here under the sample's text, so that the engine can
    stop the run with its cause. So is a returned value that cannot be used
    (:mod:`sg_rlhf.tasks.reward_values`). An ``async`` reward function is awaited.
    """

    def __init__(self, remote_rm_url: Any = None) -> None:
        super().__init__(remote_rm_url)
        self.failures: dict[str, BaseException] = {}

    async def _fetch_rewards_via_func(self, queries_list: Any, *rest: Any) -> Any:
        rewards = super()._fetch_rewards_via_func(queries_list, *rest)
        return await self._keep_failure(queries_list[0], rewards)

    async def _fetch_rewards_via_http(self, queries_list: Any, *rest: Any) -> Any:
        rewards = super()._fetch_rewards_via_http(queries_list, *rest)
        return await self._keep_failure(queries_list[0], rewards)

    async def _keep_failure(self, sample: str, rewards: Awaitable[Any]) -> Any:
        try:
            # Upstream asks for one prompt at a time.
            (returned,) = await rewards
            if inspect.isawaitable(returned):
                returned = await returned
            return [reward_values.reward_fields(returned)]
        except BaseException as error:
            self.failures[sample] = error
            raise


class SGRolloutActor(upstream.RolloutRayActor.__ray_metadata__.modified_class):
    """Upstream's engine actor; on the CPU with the settings that vLLM's CPU worker takes."""

    executor: Any

    async def __init__(  # type: ignore[misc]  # Ray awaits it, as upstream's is
        self, *args: Any, remote_rm_url: Any = None, **kwargs: Any
    ) -> None:
        kwargs["worker_extension_cls"] = WORKER_EXTENSION
        settings = worker_settings.current()
        kwargs["dtype"] = settings.engine_dtype
        kwargs["trust_remote_code"] = kwargs.get("model") in settings.trusted_models
        if platform.active():
            fork_server.use_for_subprocesses()  # the engine's core
            kwargs["worker_extension_cls"] = CPU_WORKER_EXTENSION
            if not platform.has_bf16_units():
                # The bf16 weights as they are; only the products are computed in float32.
                kwargs["dtype"] = "float32"
            kwargs = vllm_settings.cpu_settings(kwargs["max_model_len"]) | kwargs
        kwargs = vllm_settings.engine_settings_here() | kwargs
        if settings.engine_log_probs:
            # After temperature and top-p, as upstream asks for them where it corrects with them.
            kwargs |= {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
        kwargs["disable_log_stats"] = True  # nobody reads vLLM's own
        self._expects_reward = bool(remote_rm_url)
        self._incarnation = uuid.uuid4().hex
        # Elsewhere a batch's height is not all that rounding depends on.
        self._exact = platform.active() or bool(kwargs.get("full_determinism"))
        self._gate: tuple[str, BatchBarrier] | None = None
        self._weights_version = 0
        #: Responses that vLLM is sampling, by its name for their requests.
        self._sampling: dict[str, _Response] = {}
        with activity.phase(activity.ENGINE, "starting vLLM and loading the model"):
            await super().__init__(*args, remote_rm_url=remote_rm_url, **kwargs)
            if platform.active():
                await self.llm.collective_rpc("draw_by_seed")
        self._core_watch = asyncio.create_task(self._end_calls_of_a_dead_core())

    async def _end_calls_of_a_dead_core(self) -> None:
        """Have those hear of the core's end who wait for an answer of it.

        vLLM tells those who wait for a response. A call that has been sent (pause, wake up, receive
        weights) it leaves without an answer for ever.
        """
        while not self.llm.errored:
            await asyncio.sleep(DEAD_CORE_SECONDS)
        for answer in self.llm.engine_core.utility_results.values():
            if not answer.done():
                answer.set_exception(self.llm.dead_error)

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        *args: Any,
        hf_tokenizer: Any,
        num_samples: int = 1,
        asked: RequestTag | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upstream's rollouts of one prompt, which end where a turn of its chat form does.

        Args:
            asked: seeds them; without it they are another draw each time.

        Raises:
            RewardError: one of them has no reward.
            EngineReplaced: another engine was meant.
        """
        if asked is not None and asked.incarnation != self._incarnation:
            raise EngineReplaced("this engine was started after the one that was asked")
        gate = self._gate_of(asked)
        # A processor of images has a tokenizer inside.
        ends = chat.turn_end_ids(prompt, getattr(hf_tokenizer, "tokenizer", hf_tokenizer))
        sampling_params = sampling_params.clone()
        # Upstream reads the last output alone. An output for every token of every response wakes
        # as many tasks, and a core is busy with nothing else.
        sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        if sampling_params.logprobs:
            sampling_params.logprobs = 0  # the sampled token's: upstream asks for the likeliest too
        if isinstance(self.executor, SingleTurnAgentExecutor) and not sampling_params.stop:
            sampling_params.detokenize = False  # it decodes the whole sample once, by itself
        if ends:
            sampling_params.stop_token_ids = [*(sampling_params.stop_token_ids or []), *ends]
            sampling_params.all_stop_token_ids.update(ends)  # what min_tokens holds back

        async def respond(number: int) -> Any:
            made = None if asked is None else _Response(asked.draw, number, gate)
            _response.set(made)  # in this task alone
            try:
                (output,) = await one(prompt, label, sampling_params, *args, **kwargs)
                if made is not None:
                    output["weight_versions"] = made.runs
                return output
            finally:
                if made is not None and made.gate is not None and not made.turn:
                    made.gate.excuse()

        one = functools.partial(
            super().generate_responses, hf_tokenizer=hf_tokenizer, num_samples=1
        )
        outputs = await asyncio.gather(*map(respond, range(num_samples)))
        for output in outputs:
            self._check_reward(output, hf_tokenizer)
        return outputs

    def _gate_of(self, asked: RequestTag | None) -> BatchBarrier | None:
        if asked is None or asked.batch is None or not self._exact:
            return None
        if self._gate is None or self._gate[0] != asked.batch:
            pause = functools.partial(self.llm.pause_generation, mode="keep", clear_cache=False)
            gate = BatchBarrier(asked.expected, pause, self.llm.resume_generation)
            self._gate = (asked.batch, gate)
        return self._gate[1]

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """Upstream's request of one response, with the response's own seed.

        The first requests of a batch enter together (:mod:`sg_rlhf.overlay.rollout.batch_barrier`).
        """
        response = _response.get()
        if response is None:
            return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        sampling_params = sampling_params.clone()
        sampling_params.seed = request_seed(response.draw, response.number, response.turn)
        gate, response.turn = None if response.turn else response.gate, response.turn + 1
        if multi_modal_data:
            if gate is not None:
                gate.excuse()
            # Upstream's call does not tell the request's name: the weights are those of its start.
            append_version(response.runs, response.tokens, self._weights_version)
            output = await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        else:
            output = await self._sample(prompt_token_ids, sampling_params, response, gate)
        response.tokens += len(output.outputs[0].token_ids)
        return output

    async def _sample(
        self,
        prompt_token_ids: list[int],
        sampling_params: Any,
        response: _Response,
        gate: BatchBarrier | None,
    ) -> Any:
        add = functools.partial(
            self.llm.add_request,
            uuid.uuid4().hex,
            TokensPrompt(prompt_token_ids=prompt_token_ids),
            sampling_params,
        )
        outputs = await (
            add() if gate is None else gate.enter((response.draw, response.number), add)
        )
        append_version(response.runs, response.tokens, self._weights_version)
        self._sampling[outputs.request_id] = response
        try:
            while True:
                output = outputs.get_nowait() or await outputs.get()
                if output.finished:
                    return output
        finally:
            del self._sampling[outputs.request_id]
            outputs.close()

    async def pause_generation(self) -> None:
        """Upstream's, which returns once every token that was sampled is counted here.

        What vLLM has computed is in its queue of outputs by then. It lets go of the cached keys and
        values of what it has begun, and computes them anew by the next weights.
        """
        await super().pause_generation()
        while not self.llm.engine_core.outputs_queue.empty():
            await asyncio.sleep(PAUSED_SECONDS)
        await asyncio.sleep(PAUSED_SECONDS)

    async def weights_are(self, version: int) -> None:
        """What is sampled from now on is by these weights; nothing may be sampled meanwhile."""
        self._weights_version = version
        states = self.llm.output_processor.request_states
        for request, response in self._sampling.items():
            # It may be finished, and its output not yet read.
            if (state := states.get(request)) is not None:
                sampled = state.detokenizer.num_output_tokens()
                append_version(response.runs, response.tokens + sampled, version)

    async def incarnation(self) -> EngineInstance:
        """This engine, and not one that is started in its place."""
        own = psutil.Process()
        processes = tuple((p.pid, p.create_time()) for p in (own, *own.children(recursive=True)))
        node = ray.get_runtime_context().get_node_id()
        group = ray.util.get_current_placement_group()
        return EngineInstance(self._incarnation, node, processes, group and group.id.hex())

    def _check_reward(self, output: dict[str, Any], tokenizer: Any) -> None:
        """Make floats of a response's reward, score and logs.

        Raises:
            RewardError: one of them is no number; one line with the cause and the sample.
        """
        try:
            self._take_numbers(output)
            return
        except reward_values.RewardValueError as error:
            why = str(error)
        text = tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)
        cause = getattr(self.executor, "failures", {}).get(text)
        if isinstance(cause, reward_values.RewardValueError):
            why = str(cause)
        elif cause is not None:
            why = f"{type(cause).__name__}: {cause}"
        raise RewardError(
            f"the reward function failed on a rollout ({why}); label {truncate(output['label'])}; "
            f"prompt {truncate(output['prompt'])}; "
            f"the sample ends: {text[-MAX_SHOWN_CHARACTERS:]!r}"
        )

    def _take_numbers(self, output: dict[str, Any]) -> None:
        reward, score = output.get("reward"), output.get("scores")
        if reward is None and not self._expects_reward:
            return  # a reward model gives it
        output["reward"] = reward_values.number_of("rewards", reward)
        output["scores"] = None if score is None else reward_values.number_of("scores", score)
        output["extra_logs"] = reward_values.logs_of(output.get("extra_logs"))
        if math.isfinite(output["reward"]):
            return
        if not worker_settings.current().skip_nonfinite:
            raise reward_values.RewardValueError(
                f"`rewards` is {output['reward']}, expected a finite number"
            )
        # Its group is left out of the update. A filter by scores would take it unnoticed.
        output["scores"] = 0.0

    async def alive(self) -> None:
        """Answers when this process and the engine's core do."""
        await self.llm.is_sleeping()

    async def receive_bucket(
        self, wire: Any, first: bool, last: bool, handles: Any = None
    ) -> list[str | None]:
        """One bucket of a weight sync, in every worker; each says None or what is wrong."""
        said: list[str | None] = await self.llm.collective_rpc(
            "receive_bucket", args=(wire, first, last, handles)
        )
        return said

    async def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        """The engine's own log-probabilities of a fixed sequence, at temperature 1.

        Returns:
            ``len(token_ids) - 1`` values: log p(token t | tokens before t), t from 1.
        """
        output = await self.generate(
            token_ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        )
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [float(entry[token].logprob) for token, entry in pairs]


RemoteRolloutActor = ray.remote(max_restarts=MAX_RESTARTS)(SGRolloutActor)
