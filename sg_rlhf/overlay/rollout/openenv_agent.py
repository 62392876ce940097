"""The agent for an environment that speaks OpenEnv (`--train.agent_func_path FILE`).

The model's turns are actions, the environment's observations stand between them and are not
trained. The reward of a rollout is the sum of the rewards of its steps. Settings: `sg.openenv.*`.
"""

from __future__ import annotations

from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from sg_rlhf.environments.openenv_domain import OpenEnvSettings, reset_options
from sg_rlhf.environments.session import OpenEnvError, Session, Step
from sg_rlhf.overlay.reporting.errors import RewardError


class AgentExecutor(AgentExecutorBase):
    """Rollouts of one engine.

    Args:
        settings: the recipe's; by default those of this process's environment.
    """

    def __init__(self, settings: OpenEnvSettings | None = None) -> None:
        self.settings = settings or OpenEnvSettings.from_environment()

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
        """Play one episode.

        `sampling_params.max_tokens` is the budget of the whole response, observations included.

        Args:
            label: the options of the episode's reset, a JSON object.

        Returns:
            The fields that upstream's executors return.

        Raises:
            RewardError: the label is no JSON object, or the environment does not answer.
        """
        prompt_ids = list(hf_tokenizer(text=prompt, add_special_tokens=False)["input_ids"])
        budget = sampling_params.max_tokens or max(1, max_length - len(prompt_ids))
        prompt_ids = prompt_ids[-max(1, max_length - budget) :]
        episode = _Episode(self.settings, hf_tokenizer, llm_engine, sampling_params, prompt_ids)
        try:
            options = reset_options(label)
            async with Session(self.settings.url, self.settings.timeout_s) as session:
                await session.reset(options)
                await episode.play(session, min(budget, max_length - len(prompt_ids)))
        except (OpenEnvError, ValueError) as error:
            raise RewardError(f"{error}; label: {label[:200]}") from None
        return {"prompt": prompt, "label": label, "images": None, "mm_train_inputs": None} | (
            episode.result()
        )


class _Episode:
    """The tokens and rewards of an episode so far."""

    def __init__(
        self,
        settings: OpenEnvSettings,
        tokenizer: Any,
        engine: Any,
        sampling_params: Any,
        prompt_ids: list[int],
    ) -> None:
        self._settings, self._tokenizer, self._engine = settings, tokenizer, engine
        self._sampling_params = sampling_params
        self._token_ids = list(prompt_ids)
        self._action_ranges: list[tuple[int, int]] = []
        with_log_probs = sampling_params.logprobs is not None
        self._log_probs: list[float] | None = [0.0] * len(prompt_ids) if with_log_probs else None
        self._reward, self._done, self._truncated = 0.0, False, False
        self._correct: bool | None = None

    async def play(self, session: Session, max_new_tokens: int) -> None:
        """Take turns until the environment, the turns or the tokens end."""
        end = len(self._token_ids) + max_new_tokens
        for turn in range(self._settings.max_turns):
            left = end - len(self._token_ids)
            text, cut = await self._generate(min(self._settings.turn_tokens, left))
            step = await session.step({self._settings.action: text})
            self._add(step)
            if self._done:
                return
            shown = self._settings.text_of(step.observation)
            observation = self._encode(shown)
            # No observation that the model could not react to.
            full = len(self._token_ids) + len(observation) >= end
            if cut or full or turn + 1 == self._settings.max_turns:
                self._truncated = True
                return
            self._token_ids += observation
            if self._log_probs is not None:
                self._log_probs += [0.0] * len(observation)

    def _encode(self, text: str) -> list[int]:
        """An observation as it stands between two turns. A control token in its text is text."""
        before, after = (
            list(self._tokenizer(text=part, add_special_tokens=False)["input_ids"])
            for part in self._settings.between.split("{text}", 1)
        )
        plain = self._tokenizer(text=text, add_special_tokens=False, split_special_tokens=True)
        return before + list(plain["input_ids"])[: self._settings.observation_tokens] + after

    async def _generate(self, max_tokens: int) -> tuple[str, bool]:
        """Sample a turn: its text without its end token, and whether the budget cut it."""
        params = self._sampling_params.clone()  # all rollouts of a prompt share the original
        params.max_tokens = max_tokens
        params.min_tokens = min(params.min_tokens, max_tokens)
        if self._settings.stop:
            params.stop = list(self._settings.stop)
            params.include_stop_str_in_output = True
        output = (await self._engine.generate(list(self._token_ids), params)).outputs[0]
        sampled = list(output.token_ids)
        start = len(self._token_ids)
        self._token_ids += sampled
        self._action_ranges.append((start, len(self._token_ids)))
        if self._log_probs is not None:
            entries = zip(sampled, output.logprobs[: len(sampled)], strict=True)
            self._log_probs += [entry[token].logprob for token, entry in entries]
        while sampled and sampled[-1] in self._tokenizer.all_special_ids:
            sampled.pop()
        # A turn that its own limit ends is a turn: the environment says what comes of it.
        cut = output.finish_reason == "length" and max_tokens < self._settings.turn_tokens
        text = self._tokenizer.decode(
            sampled, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text), cut

    def _add(self, step: Step) -> None:
        self._reward += step.reward or 0.0
        self._done = step.done
        verdict = (step.observation.get("metadata") or {}).get("correct")
        if isinstance(verdict, bool):
            self._correct = verdict

    def result(self) -> dict[str, Any]:
        """Without a verdict of the environment, an episode with a reward above 0 is correct."""
        correct = float(self._reward > 0 if self._correct is None else self._correct)
        return {
            "observation_tokens": self._token_ids,
            "action_ranges": self._action_ranges,
            "rollout_log_probs": self._log_probs,
            "truncated": self._truncated,
            "reward": self._reward,
            "scores": correct,
            "extra_logs": {
                "correct": correct,
                "turns": float(len(self._action_ranges)),
                "ended": float(self._done),
            },
        }
