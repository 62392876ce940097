"""The transformers engine on the tiny model: equal to `generate`, exact sampling, own seeds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from sg_rlhf.eval.engines.base import EngineOptions, Request, drain
from sg_rlhf.eval.engines.hf import HfEngine, seeded_draw
from sg_rlhf.eval.model import find_model
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import generate

TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "kk_tiny"
PROMPTS = [build_prompt(p.quiz) for size in (2, 5) for p in generate(size, 3, seed=0)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def engine():
    # Threads that wait for each other cost more than they save on products this small.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = EngineOptions("hf", find_model(str(TINY), None), 1024, "float32", cpu=True)
    engine = HfEngine(options)
    yield engine
    engine.close()
    torch.set_num_threads(threads)


def request(tokenizer, key, prompt, seed=0, temperature=1.0, top_p=1.0, max_tokens=40):
    ids = tuple(tokenizer(prompt)["input_ids"])
    return Request(key, prompt, ids, temperature, top_p, max_tokens, seed)


def run(engine, requests):
    return {c.key: c for done in drain(engine, requests) for c in done}


def test_greedy_is_what_generate_gives_each_prompt_alone(engine, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    requests = [request(tokenizer, str(i), p, temperature=0.0) for i, p in enumerate(PROMPTS)]
    found = run(engine, requests)
    assert len({len(r.prompt_ids) for r in requests}) > 1
    for asked in requests:
        ids = torch.tensor([asked.prompt_ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40)
        new = output[0, ids.shape[1] :]
        completion = found[asked.key]
        assert completion.text == tokenizer.decode(new, skip_special_tokens=True)
        assert completion.tokens == len(new)
        stopped = new[-1] == model.generation_config.eos_token_id
        assert completion.finish_reason == ("stop" if stopped else "length")


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine, tokenizer):
    requests = [request(tokenizer, str(i), p, temperature=0.0) for i, p in enumerate(PROMPTS)]
    whole = run(engine, requests)
    halves = {
        key: completion.text[: len(completion.text) // 2] for key, completion in whole.items()
    }
    stops = {key: (half[-6:], "never written") for key, half in halves.items()}
    # The first row goes on beside those that stop.
    asked = [requests[0], *(replace(r, stop=stops[r.key]) for r in requests[1:])]
    found = run(engine, asked)
    assert found["0"] == whole["0"]
    for key in list(found)[1:]:
        ids = found[key].token_ids
        assert ids == whole[key].token_ids[: len(ids)] and len(ids) < len(whole[key].token_ids)
        assert found[key].finish_reason == "stop" and found[key].tokens == len(ids)
        stop = stops[key][0]
        assert stop in tokenizer.decode(ids) and stop not in tokenizer.decode(ids[:-1])


def test_a_stop_behind_a_rows_own_limit_does_not_count(engine, tokenizer):
    long = request(tokenizer, "long", PROMPTS[0], temperature=0.0)
    ids = run(engine, [long])["long"].token_ids
    stop = tokenizer.decode(ids[3:8])
    assert stop not in tokenizer.decode(ids[:7])
    short = replace(long, key="short", max_tokens=3, stop=(stop,))
    found = run(engine, [long, short])
    assert found["short"].finish_reason == "length"
    assert found["short"].token_ids == found["long"].token_ids[:3]


def test_a_sample_does_not_depend_on_what_else_is_sampled(engine, tokenizer):
    requests = [request(tokenizer, str(i), p, seed=i) for i, p in enumerate(PROMPTS)]
    together = run(engine, requests)
    backwards = run(engine, requests[::-1])
    alone = {key: c for r in requests for key, c in run(engine, [r]).items()}
    assert together == backwards == alone
    seeds = run(engine, [request(tokenizer, str(i), PROMPTS[0], seed=i) for i in range(16)])
    assert len({completion.text for completion in seeds.values()}) > 3


def test_the_score_that_is_left_is_a_draw_from_the_softmax():
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    n = 4000
    left = seeded_draw(range(n), 3)(torch.zeros(n, 3), scores.expand(n, -1))
    assert bool(((left > -torch.inf).sum(-1) == 1).all())
    counts = torch.bincount(left.argmax(-1), minlength=5).tolist()
    assert counts[4] == 0
    expected = torch.softmax(scores.double(), -1)[:4] * n
    assert chisquare(counts[:4], expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("top_p", [1e-9, 0.9])
def test_temperature_comes_before_the_nucleus(engine, tokenizer, top_p):
    asked = [request(tokenizer, str(i), PROMPTS[0], i, 5.0, top_p, 1) for i in range(16)]
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([asked[0].prompt_ids])).logits[0, -1]
    p = torch.softmax(logits / 5.0, -1)
    order = p.argsort(descending=True)
    nucleus = order[: int((p[order].cumsum(0) < top_p).sum()) + 1]
    allowed = {tokenizer.decode([token], skip_special_tokens=True) for token in nucleus.tolist()}
    found = {completion.text for completion in run(engine, asked).values()}
    assert found <= allowed
    # at temperature 1 the nucleus of this confident model holds far fewer tokens
    assert len(found) == 1 if top_p < 0.5 else len(found) > 8


def test_a_request_ends_at_its_own_ids_and_no_other_does(engine, tokenizer):
    plain = [request(tokenizer, str(i), p, temperature=0.0) for i, p in enumerate(PROMPTS)]
    without = run(engine, plain)
    ids = without["0"].token_ids
    end = ids[len(ids) // 2]
    first = replace(plain[0], stop_ids=(end,))
    found = run(engine, [first, *plain[1:]])
    assert found["0"].token_ids == ids[: ids.index(end) + 1]
    assert found["0"].finish_reason == "stop"
    assert {k: v for k, v in found.items() if k != "0"} == {
        k: v for k, v in without.items() if k != "0"
    }
