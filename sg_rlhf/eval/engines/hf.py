"""transformers: slow, and without vLLM. For models and machines that vLLM does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sg_rlhf.eval.engines.base import Completion, EngineOptions, Request
from sg_rlhf.tasks.questions import EvalError, one_line
from sg_rlhf.tasks.suite import FinishReason

BATCH = 16


class HfEngine:
    """Batches of requests of similar length through `generate`.

    A token is drawn by its sample's seed and its place (:mod:`sg_rlhf.sampling.seeded_sampler`)
    before `generate` chooses, which may therefore search greedily.
    """

    def __init__(self, options: EngineOptions) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        location, revision = options.model.location, options.model.revision
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                location, revision=revision, padding_side="left", trust_remote_code=False
            )
            self._model = AutoModelForCausalLM.from_pretrained(
                location, revision=revision, dtype=options.dtype, trust_remote_code=False
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
        # Rows of one call share the temperature, the nucleus and the ends.
        first = self._queue[0]
        same = [
            request
            for request in self._queue
            if (request.temperature, request.top_p, request.stop_ids)
            == (first.temperature, first.top_p, first.stop_ids)
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
            StoppingCriteriaList,
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
            processors.append(seeded_draw([request.seed for request in requests], longest))
        stops = self._model.generation_config.eos_token_id
        stops = self._tokenizer.eos_token_id if stops is None else stops
        stops = [*(stops if isinstance(stops, list) else [stops]), *requests[0].stop_ids]
        # A fresh configuration: the model's own may hold a repetition penalty or a top-k.
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in requests),
            eos_token_id=stops,
            pad_token_id=pad,
        )
        ends = StopAt(self._tokenizer, [request.stop for request in requests], longest)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=config,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([ends] if ends.any else []),
            )
        stop_ids = set(stops)
        return [
            self._completion(request, row[longest:].tolist(), stop_ids, end)
            for request, row, end in zip(requests, output, ends.lengths, strict=True)
        ]

    def _completion(
        self, request: Request, ids: list[int], stops: set[Any], stopped: int | None
    ) -> Completion:
        ids = ids[: request.max_tokens]
        lengths = [i for i, token in enumerate(ids, start=1) if token in stops][:1]
        # A row that stopped after its own limit, while longer ones of its batch went on, did not.
        if stopped is not None and stopped <= len(ids):
            lengths.append(stopped)
        reason: FinishReason = "stop" if lengths else "length"
        ids = ids[: min(lengths, default=len(ids))]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(request.key, text, reason, len(ids), tuple(ids))


class StopAt:
    """A stopping criterion of `generate`: a row ends with the token that completes a stop string.

    Attributes:
        any: whether any row has a stop string.
        lengths: tokens behind the prompt up to and with that token; None where none came yet.
    """

    #: Tokens that are looked back on: each has a byte at least, and no stop string has as many.
    TAIL = 32

    def __init__(self, tokenizer: Any, stops: Sequence[tuple[str, ...]], prompt: int) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._prompt = prompt
        self.any = any(stops)
        self.lengths: list[int | None] = [None] * len(stops)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        length = input_ids.shape[1] - self._prompt
        for row, stops in enumerate(self._stops):
            if self.lengths[row] is None and stops:
                tail = input_ids[row, self._prompt :][-self.TAIL :]
                text = self._tokenizer.decode(tail, skip_special_tokens=False)
                if any(stop in text for stop in stops):
                    self.lengths[row] = length
        flags = [end is not None for end in self.lengths]
        return input_ids.new_tensor(flags).bool()


def seeded_draw(seeds: Sequence[int], prompt: int) -> Any:
    """A logits processor that leaves each row one token: a draw from the softmax of its scores.

    Args:
        seeds: one for each row.
        prompt: tokens before the responses, padding included.
    """
    import torch
    from transformers import LogitsProcessor

    from sg_rlhf.sampling import seeded_sampler

    class Drawn(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            positions = [input_ids.shape[1] - prompt] * len(seeds)
            numbers = torch.from_numpy(seeded_sampler.hash_uniforms(seeds, positions))
            token = seeded_sampler.inverse_cdf_sample(
                scores.softmax(dim=-1, dtype=torch.float32), numbers
            )
            return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    return Drawn()
