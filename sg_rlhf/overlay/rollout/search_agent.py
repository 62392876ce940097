"""The agent that OpenRLHF loads for search questions (`--train.agent_func_path FILE`).

OpenRLHF 0.11.2 executes this file in every rollout engine and makes one `AgentExecutor()`. The
settings are the recipe's `sg.search.*`, which reach the engine in the variable `SG_SEARCH`.

Upstream's own `MultiTurnAgentExecutor` has no stop strings, no cap on a turn or an observation, and
changes the sampling parameters that all rollouts of a prompt share; nothing of it is used here.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from sg_rlhf.overlay.reporting.activity import ENGINE, show_message
from sg_rlhf.overlay.reporting.errors import RetrievalError, RewardError
from sg_rlhf.tasks.search.codec import TokenizerCodec
from sg_rlhf.tasks.search.dialogue import Generation, SearchFailed, metrics, run_dialogue
from sg_rlhf.tasks.search.grading import parse_golds, score
from sg_rlhf.tasks.search.protocol import STOP, Passage
from sg_rlhf.tasks.search.retriever.client import FailureRate, RetrieverClient, RetrieverError
from sg_rlhf.tasks.search.settings import SearchSettings


class AgentExecutor(AgentExecutorBase):
    """Rollouts of one engine: the model searches and answers, and its answer is graded.

    Args:
        settings: the recipe's; by default those of this process's environment.
    """

    def __init__(self, settings: SearchSettings | None = None) -> None:
        self.settings = settings or SearchSettings.from_environment()
        chosen = self.settings
        self.client = RetrieverClient.from_settings(chosen, tell=partial(show_message, ENGINE))
        self.failure_rate = FailureRate(
            chosen.max_failure_rate, chosen.failure_window, chosen.min_searches
        )
        self._codec: TokenizerCodec | None = None
        self._first_answer = asyncio.Lock()
        self._answered = False

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Sample and grade one rollout.

        `sampling_params.max_tokens` is the budget of the whole response, observations included;
        a prompt that leaves less than that of `max_length` loses its beginning, as in upstream.

        Returns:
            The fields that upstream's executors return.

        Raises:
            RewardError: the label is no list of gold answers, or there are images.
            RetrievalError: the retriever does not answer, or too many searches failed.
        """
        try:
            golds = parse_golds(label)
        except ValueError as error:
            raise RewardError(f"{error}; the prompt ends: ...{prompt[-200:]!r}") from None
        if images:
            raise RewardError("search questions have no images; data.image_key names some")
        await self._require_retriever()
        if self._codec is None:  # upstream copies the tokenizer for every prompt
            self._codec = TokenizerCodec(hf_tokenizer)
        codec = self._codec
        prompt_ids = codec.encode(prompt)
        budget = sampling_params.max_tokens or max(1, max_length - len(prompt_ids))
        n_prompt = len(prompt_ids)
        prompt_ids = prompt_ids[-max(1, max_length - budget) :]
        budget = min(budget, max_length - len(prompt_ids))
        with_log_probs = sampling_params.logprobs is not None

        async def generate(context: list[int], max_tokens: int) -> Generation:
            params = sampling_params.clone()  # all rollouts of a prompt share the original
            params.max_tokens = max_tokens
            params.min_tokens = min(params.min_tokens, max_tokens)
            params.stop = list(STOP)
            params.include_stop_str_in_output = True
            request = await llm_engine.generate(context, params)
            output = request.outputs[0]
            token_ids = list(output.token_ids)
            log_probs = None
            if with_log_probs:
                entries = zip(token_ids, output.logprobs[: len(token_ids)], strict=True)
                log_probs = [entry[token].logprob for token, entry in entries]
            return Generation(token_ids, output.finish_reason == "length", log_probs)

        dialogue = await run_dialogue(
            prompt_ids,
            budget,
            generate,
            self._search,
            codec,
            self.settings,
            with_log_probs=with_log_probs,
        )
        result = score(dialogue.answer, golds, self.settings.reward)
        return {
            "prompt": prompt,
            "label": label,
            "images": None,
            "mm_train_inputs": None,
            "observation_tokens": dialogue.token_ids,
            "action_ranges": dialogue.action_ranges,
            "rollout_log_probs": dialogue.log_probs,
            "truncated": dialogue.truncated,
            "reward": result.reward,
            "scores": float(result.correct),
            "extra_logs": {
                **metrics(dialogue, golds, result),
                "prompt_cut": float(len(prompt_ids) < n_prompt),
            },
        }

    async def _search(self, query: str) -> list[Passage]:
        try:
            passages = await self.client.search(query)
        except SearchFailed as error:
            self.failure_rate.add(str(error))
            rate = self.failure_rate
            if rate.too_high:
                raise RetrievalError(
                    f"{rate.failed} of the last {rate.searches} searches of a rollout engine "
                    f"failed (sg.search.max_failure_rate={rate.limit:g}); the last: {error}"
                ) from None
            raise
        self.failure_rate.add(None)
        return passages

    async def _require_retriever(self) -> None:
        """Search once before the first rollout, so that a wrong address stops the run at once."""
        if self._answered:
            return
        async with self._first_answer:
            if self._answered:
                return
            try:
                await self.client.search("Beijing")
            except RetrieverError as error:
                raise RetrievalError(
                    f"{error}; start it with `python -m sg_rlhf.retrieval.server --index DIR "
                    "--port P` and set sg.search.url"
                ) from None
            self._answered = True
