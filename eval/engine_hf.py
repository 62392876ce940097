"""transformers: slow, and without vLLM. For models and machines that vLLM does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.engines import Completion, EngineOptions, FinishReason, Request
from eval.questions import EvalError, one_line

BATCH = 16


class HfEngine:
    """Batches of requests of similar length through `generate`.

    Sampling is exact with a generator of its own for every sample: the largest of log-probability
    plus Gumbel noise is a draw from the distribution, so `generate` may search greedily.
    """

    def __init__(self, options: EngineOptions) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        location, revision = options.model.location, options.model.revision
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                location, revision=revision, padding_side="left"
            )
            self._model = AutoModelForCausalLM.from_pretrained(
                location, revision=revision, dtype=options.dtype
            )
        except (OSError, ValueError) as error:
            raise EvalError(
                f"--engine hf: {options.model.name} does not load: {one_line(error)}"
            ) from None
        self._device = torch.device("cpu" if options.cpu else "cuda")
        self._model.to(self._device).eval()
        self._queue: list[Request] = []

    def add(self, requests: Sequence[Request]) -> None:
        self._queue += requests

    def step(self) -> list[Completion]:
        # Rows of one call share the temperature and the nucleus.
        first = self._queue[0]
        same = [
            request
            for request in self._queue
            if (request.temperature, request.top_p) == (first.temperature, first.top_p)
        ][:BATCH]
        keys = {request.key for request in same}
        self._queue = [request for request in self._queue if request.key not in keys]
        return self._generate(same)

    def close(self) -> None:
        del self._model

    def _generate(self, requests: list[Request]) -> list[Completion]:
        import torch
        from transformers import (
            GenerationConfig,
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopPLogitsWarper,
        )

        longest = max(len(request.prompt_ids) for request in requests)
        pad = self._tokenizer.pad_token_id
        pad = self._tokenizer.eos_token_id if pad is None else pad
        rows = [[pad] * (longest - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests]
        mask = [[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
        processors = LogitsProcessorList()
        if requests[0].temperature > 0.0:
            processors.append(TemperatureLogitsWarper(requests[0].temperature))
            if requests[0].top_p < 1.0:
                processors.append(TopPLogitsWarper(requests[0].top_p))
            processors.append(gumbel([request.seed for request in requests], self._device))
        stops = self._model.generation_config.eos_token_id
        stops = self._tokenizer.eos_token_id if stops is None else stops
        # A fresh configuration: the model's own may hold a repetition penalty or a top-k.
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in requests),
            eos_token_id=stops,
            pad_token_id=pad,
        )
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=config,
                logits_processor=processors,
            )
        stop_ids = set(stops if isinstance(stops, list) else [stops])
        return [
            self._completion(request, row[longest:].tolist(), stop_ids)
            for request, row in zip(requests, output, strict=True)
        ]

    def _completion(self, request: Request, ids: list[int], stops: set[Any]) -> Completion:
        ids = ids[: request.max_tokens]
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        reason: FinishReason = "length" if end is None else "stop"
        ids = ids if end is None else ids[: end + 1]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(request.key, text, reason, len(ids))


def gumbel(seeds: Sequence[int], device: Any) -> Any:
    """A logits processor that adds noise: the largest result of a row is a draw from its softmax.

    Args:
        seeds: one for each row, which has a generator of its own.
    """
    import torch
    from transformers import LogitsProcessor

    class Gumbel(LogitsProcessor):  # type: ignore[misc]
        """In float64, because a float32 draw can be 0, which would pick any token."""

        def __init__(self) -> None:
            self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            noise = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
            for row, generator in zip(noise, self._generators, strict=True):
                row.exponential_(generator=generator)
            return scores.double() - noise.log()

    return Gumbel()
