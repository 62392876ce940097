"""vLLM's offline engine, driven step by step so that responses are stored as they finish."""

from __future__ import annotations

from collections.abc import Sequence

from sg_rlhf.eval.engines.base import Completion, EngineOptions, Request
from sg_rlhf.sampling import seeded_sampler, vllm_settings
from sg_rlhf.tasks.questions import EvalError, one_line
from sg_rlhf.tasks.suite import FinishReason


class VllmEngine:
    """One vLLM engine, over `tensor_parallel` devices."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            arguments = EngineArgs(
                model=options.model.location,
                revision=options.model.revision,
                tokenizer_revision=options.model.revision,
                dtype=options.dtype,
                max_model_len=options.context,
                tensor_parallel_size=options.tensor_parallel,
                disable_log_stats=True,
                trust_remote_code=False,
                **vllm_settings.engine_settings_here(),
                **(vllm_settings.cpu_settings(options.context) if options.cpu else {}),
                worker_extension_cls=seeded_sampler.EXTENSION if options.cpu else "",
            )
            self._engine = LLMEngine.from_engine_args(
                arguments, usage_context=UsageContext.LLM_CLASS
            )
            if options.cpu:
                self._engine.collective_rpc("draw_by_seed")
        except (ValueError, RuntimeError, OSError) as error:
            raise EvalError(f"--engine vllm: it did not start: {one_line(error)}") from error

    def add(self, requests: Sequence[Request]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            greedy = request.temperature == 0.0
            params = SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_tokens,
                seed=None if greedy else request.seed,
                output_kind=RequestOutputKind.FINAL_ONLY,
                stop=list(request.stop),
                stop_token_ids=list(request.stop_ids),
                include_stop_str_in_output=bool(request.stop),
            )
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            self._engine.add_request(request.key, prompt, params)

    def step(self) -> list[Completion]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = self._engine.step()
        except EngineDeadError as error:
            raise EvalError("vLLM's engine died, see above") from error
        done = []
        for output in outputs:
            if not output.finished:
                continue
            answer = output.outputs[0]
            reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
            ids = tuple(answer.token_ids)
            done.append(Completion(output.request_id, answer.text, reason, len(ids), ids))
        return done

    def close(self) -> None:
        self._engine.engine_core.shutdown()
