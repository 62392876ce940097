"""Draws by seed and position: the hash, the statistics, and vLLM's own sampler and batch with them.

The batch, the sampler and what they filter by are vLLM's; the model's logits are fixed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from sg_rlhf.sampling import seeded_sampler
from sg_rlhf.sampling.request_seeds import SeedKey, request_seed

MASK = 2**64 - 1
VOCABULARY = 12
#: Below this a correct draw falls once in a thousand changes of the hash.
LEAST_P = 1e-3


@pytest.fixture(autouse=True)
def not_compiled() -> Iterator[None]:
    """vLLM compiles how it counts ranks for 20 seconds; a run without CUDA does not either."""
    with torch.compiler.set_stance("force_eager"):
        yield


def in_python(seed: int, position: int) -> float:
    """SplitMix64 in Python's integers."""

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    state = (mixed(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    return (mixed(state) >> 12) / 2**52


def test_the_hash_is_splitmix64() -> None:
    # The first numbers of the published generator seeded with 1234567.
    known = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip
    steps = np.arange(1, 6, dtype=np.uint64) * seeded_sampler._GOLDEN
    assert seeded_sampler._splitmix64(np.uint64(1234567) + steps).tolist() == known


def test_each_number_is_its_seeds_and_positions() -> None:
    seeds = [0, 1, 42, 2**63 - 1, 2**64 - 1, request_seed(SeedKey(42, "rollout", 0, 0), 0)]
    pairs = [(seed, position) for seed in seeds for position in (0, 1, 5000, 2**40)]
    found = seeded_sampler.hash_uniforms([s for s, _ in pairs], [p for _, p in pairs])
    assert found.tolist() == [in_python(*pair) for pair in pairs]
    assert len(set(found)) == len(pairs)


def consecutive(count: int) -> list[int]:
    return list(range(count))


def of_responses(count: int) -> list[int]:
    return [
        request_seed(SeedKey(42, "rollout", n // 128, n % 128 // 8), n % 8) for n in range(count)
    ]


@pytest.mark.parametrize("seeds", [consecutive, of_responses])
def test_the_numbers_are_uniform_and_independent(seeds: Any) -> None:
    count, length = 2000, 50
    grid = seeded_sampler.hash_uniforms(
        np.repeat(np.array(seeds(count), np.uint64), length), np.tile(np.arange(length), count)
    ).reshape(count, length)
    assert grid.min() >= 0.0 and grid.max() < 1.0
    assert stats.kstest(grid.ravel(), "uniform").pvalue > LEAST_P
    # Of one position over all seeds, and of one seed over all positions.
    of_positions = [stats.kstest(column, "uniform").pvalue for column in grid.T]
    of_seeds = [stats.kstest(row, "uniform").pvalue for row in grid[:500]]
    for each in (of_positions, of_seeds):
        assert stats.kstest(each, "uniform").pvalue > LEAST_P
    # Neighbours in a response, and the same place of neighbouring seeds: no pair is likelier.
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        cells = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=[[0, 1]] * 2)[0]
        assert stats.chisquare(cells.ravel()).pvalue > LEAST_P


def test_a_changed_bit_of_the_seed_or_the_position_changes_half_of_the_bits() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(2**63, size=400, dtype=np.uint64)
    positions = rng.integers(8192, size=400)
    plain = (seeded_sampler.hash_uniforms(seeds, positions) * 2**52).astype(np.uint64)
    others = [(seeds ^ np.uint64(1 << bit), positions) for bit in range(64)]
    others += [(seeds, positions ^ (1 << bit)) for bit in range(13)]
    for changed in others:
        found = (seeded_sampler.hash_uniforms(*changed) * 2**52).astype(np.uint64)
        flipped = np.bitwise_count(plain ^ found).mean() / 52
        assert 0.47 < flipped < 0.53


def test_a_draw_has_the_rows_distribution() -> None:
    probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0, 0.08, 0.015, 0.005, 0.0])
    count = 40_000
    numbers = torch.from_numpy(seeded_sampler.hash_uniforms(range(count), [7] * count))
    tokens = seeded_sampler.inverse_cdf_sample(probs.expand(count, -1), numbers)
    counts = torch.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0].double() * count
    assert stats.chisquare(counts[probs > 0], expected * count / expected.sum()).pvalue > LEAST_P


@pytest.mark.parametrize("total", [1.0, 1 - 2**-53, 1 + 2**-24, 0.999999, 3.7, 1e-30])
def test_no_number_reaches_a_token_of_probability_zero(total: float) -> None:
    """float32 exponential noise can be 0, which makes any token the largest; here both ends of the
    range fall on tokens that have a part of the row."""
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0]], dtype=torch.float64) * total
    for number, token in ((0.0, 1), (0.2, 1), (0.5, 3), (0.9, 4), (1 - 2**-52, 4)):
        assert seeded_sampler.inverse_cdf_sample(
            probs, torch.tensor([number], dtype=torch.float64)
        ).tolist() == [token]


class Engine:
    """vLLM's sampler and batch around fixed logits."""

    def __init__(self, requests: dict[str, dict[str, Any]], logits: torch.Tensor) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.worker.gpu_input_batch import InputBatch

        self.logits = logits
        self.runner = SimpleNamespace(
            sampler=Sampler(logprobs_mode="processed_logprobs", use_fp64_gumbel=True),
            input_batch=InputBatch(
                max_num_reqs=256,
                max_model_len=64,
                max_num_batched_tokens=256,
                device=torch.device("cpu"),
                vocab_size=VOCABULARY,
                block_sizes=[16],
                max_num_blocks_per_req=[4],
                logitsprocs=LogitsProcessors(),
            ),
        )
        worker = seeded_sampler.SeededSamplingExtension()
        worker.model_runner = self.runner
        worker.use_v2_model_runner = False
        worker.vllm_config = SimpleNamespace(speculative_config=None)
        worker.draw_by_seed()
        self.drawn: dict[str, list[int]] = {}
        self.log_probs: dict[str, list[float]] = {}
        for name, settings in requests.items():
            self.add(name, **settings)

    def add(self, name: str, *, known: list[int] | None = None, **settings: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import SamplingType
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        params = SamplingParams(max_tokens=32, logprobs=0, **settings)
        generator = None
        if params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator().manual_seed(params.seed)
        state = CachedRequestState(
            req_id=name,
            # Prompts of different lengths: a position counts from the response's beginning.
            prompt_token_ids=[1] * (1 + len(name)),
            mm_features=[],
            sampling_params=params,
            generator=generator,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=list(known or []),
        )
        self.runner.input_batch.add_request(state)
        self.drawn[name] = list(known or [])
        self.log_probs[name] = []

    def remove(self, name: str) -> None:
        self.runner.input_batch.remove_request(name)

    def step(self, times: int = 1) -> Engine:
        batch = self.runner.input_batch
        for _ in range(times):
            batch.condense()
            batch.refresh_metadata()
            logits = self.logits.expand(batch.num_reqs, -1).clone()
            found = self.runner.sampler(logits, batch.sampling_metadata)
            tokens = found.sampled_token_ids[:, 0].tolist()
            chosen = found.logprobs_tensors.logprobs[:, 0].tolist()
            for name, token, log_prob in zip(batch.req_ids, tokens, chosen, strict=True):
                row = batch.req_id_to_index[name]
                batch.req_output_token_ids[row].append(token)  # as the runner's bookkeeping does
                batch.num_tokens_no_spec[row] += 1
                self.drawn[name].append(token)
                self.log_probs[name].append(log_prob)
        return self


LOGITS = torch.linspace(2.0, -2.0, VOCABULARY)


def test_a_response_does_not_depend_on_the_batch() -> None:
    requests = {f"r{n}": {"seed": n} for n in range(9)}
    together = Engine(requests, LOGITS).step(20).drawn
    backwards = Engine(dict(reversed(requests.items())), LOGITS).step(20).drawn
    alone = {name: Engine({name: r}, LOGITS).step(20).drawn[name] for name, r in requests.items()}
    assert together == backwards == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 9
    # Rows leave, others move into their places, new ones come, an unseeded one is beside them.
    engine = Engine(requests, LOGITS).step(5)
    engine.remove("r0")
    engine.remove("r4")
    engine.add("without", temperature=1.0)
    engine.step(15)
    stayed = set(requests) - {"r0", "r4"}
    assert {n: engine.drawn[n] for n in stayed} == {n: alone[n] for n in stayed}
    assert engine.drawn["r0"] == alone["r0"][:5]


def test_a_preempted_request_goes_on_where_it_was() -> None:
    whole = Engine({"r": {"seed": 5}}, LOGITS).step(20).drawn["r"]
    # It comes back with a new generator of the same seed, and the tokens that it has.
    again = Engine({"s": {"seed": 6}}, LOGITS).step(2)
    again.add("r", seed=5, known=whole[:7])
    assert again.step(13).drawn["r"] == whole


def test_greedy_requests_and_batches_without_seeds_are_vllms() -> None:
    mixed = Engine({"g": {"temperature": 0.0}, "r": {"seed": 1}}, LOGITS.flip(0)).step(5)
    assert mixed.drawn["g"] == [VOCABULARY - 1] * 5
    assert mixed.drawn["r"] == Engine({"r": {"seed": 1}}, LOGITS.flip(0)).step(5).drawn["r"]
    unseeded = {f"u{n}": {"temperature": 1.0} for n in range(4)}
    torch.manual_seed(3)
    ours = Engine(unseeded, LOGITS).step(6).drawn
    engine = Engine(unseeded, LOGITS)
    layer = engine.runner.sampler.topk_topp_sampler
    layer.forward = layer.forward_cpu
    torch.manual_seed(3)
    assert engine.step(6).drawn == ours


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"temperature": 0.5}, VOCABULARY),
        ({"temperature": 1.3, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.6}, None),
        ({"temperature": 1.0, "top_p": 0.9, "top_k": 4}, None),
    ],
)
def test_temperature_and_filters_are_vllms(settings: dict[str, Any], allowed: int | None) -> None:
    engine = Engine({f"r{n}": {"seed": 7 * n, **settings} for n in range(200)}, LOGITS).step(25)
    tokens = [token for drawn in engine.drawn.values() for token in drawn]
    log_probs = [one for row in engine.log_probs.values() for one in row]
    # What the layer hands back for the tokens is the distribution that they were drawn from.
    of_token = dict(zip(tokens, log_probs, strict=True))
    probs = np.exp([of_token[token] for token in sorted(of_token)])
    assert probs.sum() == pytest.approx(1.0, abs=2e-3)  # a rare one may not have come
    plain = torch.softmax(LOGITS / settings["temperature"], -1)
    top_p, top_k = settings.get("top_p", 1.0), settings.get("top_k", VOCABULARY)
    kept = plain[:top_k] / plain[:top_k].sum()
    kept = kept[: int((kept.cumsum(0) < top_p).sum()) + 1]
    assert allowed in (None, len(kept))
    expected = kept / kept.sum()
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert counts[len(kept) :].sum() == 0
    scaled = expected.double().numpy()
    pvalue = stats.chisquare(counts[: len(kept)], scaled / scaled.sum() * len(tokens)).pvalue
    assert pvalue > LEAST_P
    assert probs == pytest.approx(expected[sorted(of_token)].tolist(), rel=1e-4)


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({}, LOGITS)
    layer = engine.runner.sampler.topk_topp_sampler
    layer.forward = lambda logits, generators, k: None
    with pytest.raises(RuntimeError, match=r"TopKTopPSampler takes .*bootstrap\.sh"):
        seeded_sampler.SeededSampler(engine.runner)
    layer.forward = layer.forward_cpu
    del engine.runner.input_batch.num_tokens_no_spec
    with pytest.raises(RuntimeError, match="lacks .*num_tokens_no_spec"):
        seeded_sampler.SeededSampler(engine.runner)


def test_cudas_runner_and_speculation_are_left_alone() -> None:
    for v2, speculative in ((True, None), (False, object())):
        worker = seeded_sampler.SeededSamplingExtension()
        worker.use_v2_model_runner = v2
        worker.vllm_config = SimpleNamespace(speculative_config=speculative)
        worker.draw_by_seed()  # without a model_runner it would fail
