"""The rollout engine: a Ray actor around vLLM that generates responses and scores them.

Extends upstream's ``RolloutRayActor``: seeds each request, starts a batch's requests together,
records which weights sampled each token, checks rewards, and computes log-probs of fixed texts.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import uuid
from dataclasses import dataclass, field
from typing import Any, cast

import openrlhf.trainer.ray.vllm_engine as upstream
import psutil
import ray
import vllm
from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor
from packaging import version
from transformers import PreTrainedTokenizerBase
from vllm import RequestOutput, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.fork_server import client as fork_server
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import EngineReplaced
from sg_rlhf.overlay.rollout import core_errors
from sg_rlhf.overlay.rollout.batch_barrier import BatchBarrier
from sg_rlhf.overlay.rollout.dispatch import RequestTag
from sg_rlhf.overlay.rollout.engine_pool import DEAD_CORE, EngineInstance
from sg_rlhf.overlay.rollout.environment_agent import load_agent
from sg_rlhf.overlay.rollout.executors import StrictSingleTurnExecutor, check_agent_rewards
from sg_rlhf.overlay.rollout.samples import Response, reward_error
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.run_dir.weight_versions import append_version
from sg_rlhf.sampling import vllm_settings
from sg_rlhf.sampling.request_seeds import SeedKey, request_seed
from sg_rlhf.tasks import chat, registry, reward_values

WORKER_EXTENSION = "sg_rlhf.overlay.weight_sync.receiver.BucketWorkerWrap"
CPU_WORKER_EXTENSION = "sg_rlhf.overlay.weight_sync.cpu_receiver.CpuWorkerWrap"
#: Seconds between two checks whether the core still runs.
DEAD_CORE_SECONDS = 0.5
#: Restarts of an engine's process by Ray. A run may allow fewer (``sg.engine_restarts``).
MAX_RESTARTS = 3

Barrier = BatchBarrier[RequestOutputCollector]


@dataclass
class _Response:
    """A response that is being generated; a dialogue makes several requests (``turn``).

    ``generated_tokens``: of earlier turns. ``version_runs``: see
    :mod:`sg_rlhf.run_dir.weight_versions`.
    """

    seed_key: SeedKey
    number: int
    barrier: Barrier | None
    turn: int = 0
    generated_tokens: int = 0
    version_runs: list[list[int]] = field(default_factory=list)


_response: contextvars.ContextVar[_Response | None] = contextvars.ContextVar(
    "response", default=None
)


def executor_of(agent_func_path: str | None, remote_rm_url: str | None) -> AgentExecutorBase:
    """What turns a prompt into a response with its reward; no path means responses of one turn."""
    if not agent_func_path:
        return StrictSingleTurnExecutor(remote_rm_url)
    if agent_func_path.startswith(registry.PREFIX):
        return load_agent(agent_func_path)
    return upstream._load_agent_executor(agent_func_path)


class SGRolloutActor(upstream.RolloutRayActor.__ray_metadata__.modified_class):  # type: ignore[misc]  # upstream has no types
    """Upstream's engine actor. Without CUDA it uses the settings of vLLM's CPU worker."""

    executor: AgentExecutorBase

    async def __init__(  # type: ignore[misc]  # Ray awaits it, as upstream's is
        self,
        *,
        agent_func_path: str | None = None,
        remote_rm_url: str | None = None,
        bundle_indices: list[int] | None = None,
        num_gpus: float = 1,
        full_determinism: bool = False,
        **kwargs: Any,
    ) -> None:
        """Start vLLM; ``bundle_indices`` is None for a single GPU."""
        kwargs["worker_extension_cls"] = WORKER_EXTENSION
        settings = worker_settings.current()
        kwargs["dtype"] = settings.engine_dtype
        kwargs["trust_remote_code"] = kwargs.get("model") in settings.trusted_models
        if platform.is_cpu():
            fork_server.use_for_subprocesses()  # the engine's core
            kwargs["worker_extension_cls"] = CPU_WORKER_EXTENSION
            if not platform.has_bf16_units():
                # The weights keep their bf16 values; products are computed in float32.
                kwargs["dtype"] = "float32"
            kwargs = vllm_settings.cpu_settings(kwargs["max_model_len"]) | kwargs
        else:
            gpu = vllm_settings.first_gpu()
            kwargs = vllm_settings.cuda_settings(gpu.gib if gpu else 0.0) | kwargs
        kwargs = vllm_settings.engine_settings_here() | kwargs | settings.engine_args
        # After temperature and top-p.
        kwargs |= {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
        kwargs["disable_log_stats"] = True  # nobody reads vLLM's own
        self._expects_reward = bool(remote_rm_url)
        self._instance_id = uuid.uuid4().hex
        # Elsewhere results vary with more than the batch composition.
        self._deterministic = platform.is_cpu() or full_determinism
        self._barrier: tuple[str, Barrier] | None = None
        self._core_watch = asyncio.create_task(self._fail_pending_calls())
        try:
            with activity.phase(activity.ENGINE, "starting vLLM and loading the model"):
                backend = kwargs.get("distributed_executor_backend")
                self._configure_device_env(backend, bundle_indices, num_gpus)
                self._configure_vllm_env(version, vllm, full_determinism)
                self.executor = executor_of(agent_func_path, remote_rm_url)
                self.llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**kwargs))
                await self.llm.is_sleeping()
                if platform.is_cpu():
                    await self.llm.collective_rpc("draw_by_seed")
                await self.set_weight_version(0)
        except Exception as error:  # vLLM's own says "see the log above"
            cause = await self.core_error()
            if not cause and type(error).__name__ == DEAD_CORE:
                cause = "vLLM's core was killed, or crashed"
            if not cause:
                raise
            raise RuntimeError(cause) from error
        check_agent_rewards(self.executor)

    async def _fail_pending_calls(self) -> None:
        """Fail pending calls to a core that died, which may be while the engine starts.

        vLLM fails pending responses only: pause, wake up, receive weights would never return.
        """
        while not (hasattr(self, "llm") and self.llm.errored):
            await asyncio.sleep(DEAD_CORE_SECONDS)
        for call in self.llm.engine_core.utility_results.values():
            if not call.done():
                call.set_exception(self.llm.dead_error)

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: SamplingParams,
        *args: Any,
        hf_tokenizer: PreTrainedTokenizerBase,
        num_samples: int = 1,
        tag: RequestTag | None = None,
        **kwargs: Any,
    ) -> list[Response]:
        """Generate and score the responses to one prompt; each ends with its chat format's turn.

        Raises RewardError, or EngineReplaced if the request is for an earlier instance.
        """
        if tag is not None and tag.instance_id != self._instance_id:
            raise EngineReplaced("the request was for this engine before its restart")
        barrier = self._barrier_for(tag)
        # A processor of images has a tokenizer inside.
        ends = chat.stop_token_ids(prompt, getattr(hf_tokenizer, "tokenizer", hf_tokenizer))
        sampling_params = sampling_params.clone()
        # Upstream reads only the last output. An output per token would wake a task per token,
        # which keeps a CPU core busy.
        sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        if sampling_params.logprobs:
            sampling_params.logprobs = 0  # of the sampled token only
        if isinstance(self.executor, SingleTurnAgentExecutor) and not sampling_params.stop:
            sampling_params.detokenize = False  # the executor decodes the sample
        if ends:
            sampling_params.stop_token_ids = [*(sampling_params.stop_token_ids or []), *ends]

        async def respond(number: int) -> Response:
            response = None if tag is None else _Response(tag.seed_key, number, barrier)
            _response.set(response)  # of this task only
            try:
                (output,) = await generate_one(prompt, label, sampling_params, *args, **kwargs)
                if response is not None:
                    output["weight_versions"] = response.version_runs
                return cast(Response, output)
            finally:
                if response is not None and response.barrier is not None and not response.turn:
                    response.barrier.skip()

        generate_one = functools.partial(
            super().generate_responses, hf_tokenizer=hf_tokenizer, num_samples=1
        )
        outputs = await asyncio.gather(*map(respond, range(num_samples)))
        for output in outputs:
            self._check_reward(output, hf_tokenizer)
        return outputs

    def _barrier_for(self, tag: RequestTag | None) -> Barrier | None:
        if tag is None or tag.batch is None or not self._deterministic:
            return None
        if self._barrier is None or self._barrier[0] != tag.batch:
            pause = functools.partial(self.llm.pause_generation, mode="keep", clear_cache=False)
            barrier: Barrier = BatchBarrier(tag.batch_size, pause, self.llm.resume_generation)
            self._barrier = (tag.batch, barrier)
        return self._barrier[1]

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        multi_modal_data: Any = None,
    ) -> RequestOutput:
        """Upstream's vLLM request, with the seed of the current response and a batch barrier."""
        if multi_modal_data:  # of a user's agent; the prompts have none
            raise ValueError("images are not supported")
        response = _response.get()
        if response is None:
            return await super().generate(prompt_token_ids, sampling_params)
        sampling_params = sampling_params.clone()
        sampling_params.seed = request_seed(response.seed_key, response.number, response.turn)
        barrier, response.turn = None if response.turn else response.barrier, response.turn + 1
        output = await self._sample(prompt_token_ids, sampling_params, response, barrier)
        for span in output.outputs[0].weight_versions or ():
            start = response.generated_tokens + span.start
            append_version(response.version_runs, start, int(span.version))
        response.generated_tokens += len(output.outputs[0].token_ids)
        return output

    async def _sample(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        response: _Response,
        barrier: Barrier | None,
    ) -> RequestOutput:
        add = functools.partial(
            self.llm.add_request,
            uuid.uuid4().hex,
            TokensPrompt(prompt_token_ids=prompt_token_ids),
            sampling_params,
        )
        outputs = await (
            add() if barrier is None else barrier.arrive((response.seed_key, response.number), add)
        )
        try:
            while True:
                output = outputs.get_nowait() or await outputs.get()
                if output.finished:
                    return output
        finally:
            outputs.close()

    async def set_weight_version(self, version: int) -> None:
        """Label the tokens that vLLM samples from now on. The engine must be paused."""
        await self.llm.update_weight_version(str(version))

    async def instance(self) -> EngineInstance:
        """Identify this start of the engine."""
        process = psutil.Process()
        tree = (process, *process.children(recursive=True))
        processes = tuple((p.pid, p.create_time()) for p in tree)
        node = ray.get_runtime_context().get_node_id()
        group = ray.util.get_current_placement_group()
        return EngineInstance(self._instance_id, node, processes, group and group.id.hex())

    def _check_reward(self, output: Response, tokenizer: PreTrainedTokenizerBase) -> None:
        """Convert a response's reward, score and logs to floats; raises RewardError."""
        reward, score = output.get("reward"), output.get("scores")
        if reward is None and not self._expects_reward:
            return  # from a reward model, later
        try:
            output["reward"] = reward_values.number_of("rewards", reward)
            output["scores"] = None if score is None else reward_values.number_of("scores", score)
            output["extra_logs"] = reward_values.logs_of(output.get("extra_logs"))
        except reward_values.RewardValueError as error:
            text = tokenizer.decode(output["observation_tokens"], skip_special_tokens=False)
            raise reward_error(output, str(error), text) from None

    async def ping(self) -> None:
        """Return once this process and the engine's core answer."""
        await self.llm.is_sleeping()

    async def core_error(self) -> str:
        """The last error that vLLM's core, a process of its own, has logged; "" without one."""
        return next(filter(None, map(core_errors.last_error, core_errors.OWN_LOGS)), "")

    async def receive_bucket(
        self, metadata: Any, first: bool, last: bool, handles: Any = None
    ) -> list[str | None]:
        """Receive one bucket of a weight sync; per worker an error message, or None."""
        errors: list[str | None] = await self.llm.collective_rpc(
            "receive_bucket", args=(metadata, first, last, handles)
        )
        return errors

    async def engine_facts(self) -> dict[str, Any]:
        """Version, platform, attention backend and graph mode of vLLM, from its first worker."""
        facts: list[dict[str, Any]] = await self.llm.collective_rpc("engine_facts")
        return facts[0]

    async def prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        """The engine's own log p(token t | tokens before t), t from 1, at temperature 1."""
        output = await self.generate(
            token_ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        )
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [float(entry[token].logprob) for token, entry in pairs]
