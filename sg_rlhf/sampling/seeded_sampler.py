"""A token's draw depends on its request's seed and its place in the response, and on nothing else.

vLLM 0.29.0 gives a request with a seed a generator of its own, and draws its noise in a loop over
the requests at every token: float64 exponential noise for every word of the vocabulary, a sixth of
the engine's time for a small model. Here one number of [0, 1) is computed for each request by a
hash of (seed, position), for all of them at once, and the token is where it falls among the
cumulative probabilities. No state is carried from token to token, so that neither preemption nor a
prompt prefilled in parts moves a draw, and a token of probability 0 is never drawn.

The hash is SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators,
OOPSLA 2014): the stream of a request begins at the mixed seed, and position t is its t-th number.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

#: What :class:`SeededSampler` takes the place of: the parameters of vLLM's function.
EXPECTED_SIGNATURE = ("logits", "generators", "k", "p")
EXTENSION = "sg_rlhf.sampling.seeded_sampler.SeededSamplingExtension"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
#: A uniform number has 52 bits, so that with rounding too it stays below the sum that it is a part
#: of.
_BITS = 52
_UNUSED = np.uint64(64 - _BITS)


def hash_uniforms(seeds: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> Any:
    """Numbers in [0, 1), each from its seed and position alone.

    Args:
        seeds: [N], of 64 bits.
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
    """The token into whose part of the row's probability the row's number falls.

    Args:
        probs_NV: not negative; a row need not add up to 1.
        uniforms_N: float64, of :func:`uniforms`.

    Returns:
        int64 [N]. A token of probability 0 is never one of them.
    """
    import torch

    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    at_N1 = uniforms_N.to(cumulative_NV.device)[:, None] * cumulative_NV[:, -1:]
    token_N1 = torch.searchsorted(cumulative_NV, at_N1, right=True)
    # A row of NaN has no place; the engine's log-probs say what is wrong with it.
    return token_N1.clamp_(max=probs_NV.shape[-1] - 1).squeeze(-1)


class SeededSampler:
    """In the place of ``TopKTopPSampler.forward`` of one engine without CUDA.

    Temperature, penalties, top-k, top-p and the returned log-probs stay vLLM's. Where no request of
    a batch has a seed, so does the draw; beside requests that have one, those without get a number
    of torch's generator.

    Args:
        runner: vLLM's V1 model runner.

    Raises:
        RuntimeError: vLLM is another one than this was written against.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.v1.sample.ops import topk_topp_sampler

        self._layer = runner.sampler.topk_topp_sampler
        self._of_vllm = self._layer.forward
        self._filtered = topk_topp_sampler.apply_top_k_top_p
        self._runner = runner
        found = tuple(inspect.signature(self._of_vllm).parameters)
        lengths = ("num_tokens_no_spec", "num_prompt_tokens", "generators")
        missing = [name for name in lengths if not hasattr(runner.input_batch, name)]
        if found != EXPECTED_SIGNATURE or missing:
            import vllm

            raise RuntimeError(
                f"vLLM {vllm.__version__} draws otherwise than sg_rlhf.sampling.seeded_sampler was "
                f"written for (TopKTopPSampler takes {found}, its batch lacks {missing}); "
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

        # A warm-up's generators are not the batch's.
        if not generators or generators is not self._runner.input_batch.generators:
            found: tuple[torch.Tensor, torch.Tensor | None] = self._of_vllm(
                logits, generators, k, p
            )
            return found
        logits = self._filtered(logits, k, p)
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
        # The tokens of each request that are known; the one that is drawn comes next.
        batch = self._runner.input_batch
        positions = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
        seeds = np.array([g.initial_seed() for g in generators.values()], np.uint64)
        all_seeded = len(rows) == count
        numbers_N = torch.empty if all_seeded else torch.rand
        found = numbers_N(count, dtype=torch.float64)
        found.numpy()[rows] = hash_uniforms(seeds, positions)
        return found


class SeededSamplingExtension:
    """An extension of vLLM's worker (``worker_extension_cls``), which adds it to its bases."""

    model_runner: Any
    use_v2_model_runner: bool
    vllm_config: Any

    def draw_by_seed(self) -> None:
        """Draw the tokens of requests that have a seed by :class:`SeededSampler`.

        vLLM's V2 runner, CUDA's own, is left alone: it draws by seed and position itself. So is an
        engine that speculates, whose tokens are not drawn one by one.
        """
        if self.use_v2_model_runner or self.vllm_config.speculative_config is not None:
            return
        runner = self.model_runner
        runner.sampler.topk_topp_sampler.forward = SeededSampler(runner)
