"""vLLM in this process. A thread steps it, so that responses are stored as they finish."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from sg_rlhf.eval.engines.base import Model, Sample
from sg_rlhf.sampling import seeded_sampler, vllm_settings
from sg_rlhf.tasks.questions import EvalError, one_line

#: Bytes of the engine's keys and values on a CPU, where no trainer shares the memory.
CPU_CACHE = 2 * 2**30


def set_environment(cpu: bool) -> None:
    """Variables of vLLM and of the CPU's threads; values that the user exported win.

    To be called before torch is imported, which reads them once.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR"}
    if cpu:
        wanted |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Else two more processes import vLLM, and outlive a killed one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # One core is left to the threads that prepare, grade and write.
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
        }
    else:
        wanted |= vllm_settings.cuda_variables()
    for variable, value in wanted.items():
        os.environ.setdefault(variable, value)


class VllmEngine:
    """One vLLM engine, over `tensor_parallel` devices.

    Args:
        context: most tokens of prompt and response together that any sample needs.
        dtype: torch's name of the weights' type, or "auto" for the model's own.
    """

    # More than vLLM runs at a time, so that it never waits. With all dialogues in flight, every
    # first turn would come before any second turn, and prefixes would have left the cache.
    in_flight = 1024

    def __init__(
        self, model: Model, context: int, dtype: str, cpu: bool, tensor_parallel: int = 1
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            arguments = EngineArgs(
                model=model.location,
                revision=model.revision,
                tokenizer_revision=model.revision,
                dtype=dtype,
                max_model_len=context,
                tensor_parallel_size=tensor_parallel,
                disable_log_stats=True,
                trust_remote_code=False,
                **vllm_settings.engine_settings_here(),
                **(vllm_settings.cpu_settings(context, CPU_CACHE) if cpu else {}),
                worker_extension_cls=seeded_sampler.EXTENSION if cpu else "",
            )
            self._engine = LLMEngine.from_engine_args(
                arguments, usage_context=UsageContext.LLM_CLASS
            )
            if cpu:
                self._engine.collective_rpc("draw_by_seed")
        except (ValueError, RuntimeError, OSError) as error:
            raise EvalError(f"--engine vllm: it did not start: {one_line(error)}") from error
        self._new: list[tuple[str, Sample]] = []
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._added = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, sample: Sample) -> Sample:
        self._added += 1
        key = str(self._added)
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._new.append((key, sample))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_while_waiting())
        answer = await future
        ids = tuple(answer.token_ids)
        return replace(
            sample,
            response=answer.text,
            finish_reason="length" if answer.finish_reason == "length" else "stop",
            tokens=len(ids),
            token_ids=ids,
        )

    def close(self) -> None:
        self._thread.shutdown()  # after the step that runs
        self._engine.engine_core.shutdown()

    async def _step_while_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                new, self._new = self._new, []
                for output in await loop.run_in_executor(self._thread, self._step, new):
                    future = self._waiting.pop(output.request_id)
                    if not future.done():
                        future.set_result(output.outputs[0])
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            self._waiting.clear()

    def _step(self, new: list[tuple[str, Sample]]) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        for key, sample in new:
            self._add(key, sample)
        try:
            return [output for output in self._engine.step() if output.finished]
        except EngineDeadError as error:
            raise EvalError("vLLM's engine died, see above") from error

    def _add(self, key: str, sample: Sample) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        settings = sample.benchmark.settings
        params = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=sample.max_tokens,
            seed=None if settings.temperature == 0.0 else sample.seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            stop=list(sample.stop),
            stop_token_ids=list(sample.stop_ids),
            include_stop_str_in_output=bool(sample.stop),
        )
        prompt = TokensPrompt(prompt_token_ids=list(sample.prompt_ids))
        self._engine.add_request(key, prompt, params)
