"""Sampling by a counter: a token depends on its request's seed and its position alone.

vLLM 0.32.0 gives each request with a seed its own generator. At every token it loops over the
requests and draws exponential noise for the whole vocabulary (``random_sample`` in
``v1/sample/ops/topk_topp_sampler.py``). With a small model this takes a sixth of the engine's time.

Here a hash of (seed, position) gives each request one number in [0, 1), for the whole batch at
once. The token is the one at that point of the cumulative probabilities. There is no state between
tokens, so neither preemption nor chunked prefill changes a sample. A token of probability 0 is
never drawn.

The hash is SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators,
OOPSLA 2014): a request's stream begins at its mixed seed, and position t is the t-th number.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

#: Parameters of the vLLM function that :class:`SeededSampler` replaces.
EXPECTED_SIGNATURE = ("logits", "generators", "k", "p")
EXTENSION = "sg_rlhf.sampling.seeded_sampler.SeededSamplingExtension"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
#: Bits of a uniform number. With 52 its product with the probabilities' sum, rounded, is below the
#: sum.
_BITS = 52
_UNUSED = np.uint64(64 - _BITS)


def hash_uniforms(seeds: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> Any:
    """Uniform numbers in [0, 1), each a hash of its seed and position.

    Args:
        seeds: [N], 64-bit.
        positions: [N], from 0.

    Returns:
        float64 [N], multiples of 2**-52.
    """
    steps = np.asarray(positions, np.uint64) + np.uint64(1)
    bits = _splitmix64(_splitmix64(np.asarray(seeds, np.uint64)) + steps * _GOLDEN)
    return (bits >> _UNUSED) * 2.0**-_BITS


def _splitmix64(bits: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer, a bijection of 64 bits."""
    bits = (bits ^ (bits >> _S30)) * _FIRST
    bits = (bits ^ (bits >> _S27)) * _SECOND
    return bits ^ (bits >> _S31)


def inverse_cdf_sample(probs_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """Sample one token per row by inverting the cumulative probabilities.

    Args:
        probs_NV: float [N, V], not negative; a row need not add up to 1.
        uniforms_N: float64 [N], from :func:`hash_uniforms`.

    Returns:
        int64 [N]. A token of probability 0 is never drawn.
    """
    import torch

    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    at_N1 = uniforms_N.to(cumulative_NV.device)[:, None] * cumulative_NV[:, -1:]
    token_N1 = torch.searchsorted(cumulative_NV, at_N1, right=True)
    # A row of NaN gives V. The engine's log-probs then report it.
    return token_N1.clamp_(max=probs_NV.shape[-1] - 1).squeeze(-1)


class SeededSampler:
    """Replaces ``TopKTopPSampler.forward`` in an engine without CUDA.

    Temperature, penalties, top-k, top-p and the returned log-probs stay vLLM's. A batch without any
    seed is sampled by vLLM. In a batch with some seeds, requests without one get a number from
    torch's generator.

    Args:
        runner: vLLM's V1 model runner.

    Raises:
        RuntimeError: this vLLM's sampler has another signature.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.v1.sample.ops import topk_topp_sampler

        self._layer = runner.sampler.topk_topp_sampler
        self._original_forward = self._layer.forward
        self._apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p
        self._runner = runner
        signature = tuple(inspect.signature(self._original_forward).parameters)
        needed = ("num_tokens_no_spec", "num_prompt_tokens", "generators")
        missing = [name for name in needed if not hasattr(runner.input_batch, name)]
        if signature != EXPECTED_SIGNATURE or missing:
            import vllm

            raise RuntimeError(
                f"vLLM {vllm.__version__} samples otherwise than sg_rlhf.sampling.seeded_sampler "
                f"expects (TopKTopPSampler takes {signature}, its batch lacks {missing}); "
                "install the pinned version (scripts/bootstrap.sh)"
            )

    def __call__(
        self,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        import torch

        # vLLM's warm-up passes generators that are not the batch's.
        if not generators or generators is not self._runner.input_batch.generators:
            sampled: tuple[torch.Tensor, torch.Tensor | None] = self._original_forward(
                logits, generators, k, p
            )
            return sampled
        logits = self._apply_top_k_top_p(logits, k, p)
        returned = None
        if self._layer.logprobs_mode == "processed_logits":
            returned = logits
        elif self._layer.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        probs_NV = logits.softmax(dim=-1, dtype=torch.float32)
        return inverse_cdf_sample(probs_NV, self._uniforms(generators, len(logits))), returned

    def _uniforms(self, generators: Mapping[int, torch.Generator], count: int) -> torch.Tensor:
        import torch

        rows = list(generators)
        # Position of the next token: the number of tokens that the response already has.
        batch = self._runner.input_batch
        positions = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
        seeds = np.array([g.initial_seed() for g in generators.values()], np.uint64)
        all_seeded = len(rows) == count
        uniforms_N = (torch.empty if all_seeded else torch.rand)(count, dtype=torch.float64)
        uniforms_N.numpy()[rows] = hash_uniforms(seeds, positions)
        return uniforms_N


class SeededSamplingExtension:
    """Extension of vLLM's worker: vLLM adds the class to the worker's bases.

    Set as ``worker_extension_cls``, see :data:`EXTENSION`.
    """

    model_runner: Any
    use_v2_model_runner: bool
    vllm_config: Any

    def draw_by_seed(self) -> None:
        """Sample requests that have a seed with :class:`SeededSampler`.

        Does nothing with vLLM's V2 runner, the default on CUDA, which itself samples by seed and
        position; nor with speculative decoding, which does not sample tokens one by one.
        """
        if self.use_v2_model_runner or self.vllm_config.speculative_config is not None:
            return
        runner = self.model_runner
        runner.sampler.topk_topp_sampler.forward = SeededSampler(runner)
