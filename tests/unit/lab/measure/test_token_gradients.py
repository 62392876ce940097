"""`lab.measure.token_gradients`: its numbers against autograd, its sample, its files."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lab.measure import token_gradients
from lab.measure.checkpoint import TokenRow
from lab.measure.token_figures import EDGES, summarise
from lab.measure.token_gradients import stratified
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.tiny.build import shipped

MODEL = "module:sg_rlhf.tiny.kk_tiny"
PROMPT, RESPONSE = "Try", "Guess</think><answer>(1) Luke ok"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(points, the whole report) of every token of three rows."""
    folder = tmp_path_factory.mktemp("tokens")
    data = folder / "samples.jsonl"
    responses = [RESPONSE, "Guess ok", "Try Luke=knight"]
    rows = [{"prompt": PROMPT, "response": response} for response in responses]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "o.json"
    arguments = ["--model", MODEL, "--data", data, "--json", out, "sg.weighting.lower=0.5"]
    assert token_gradients.main([str(argument) for argument in arguments]) == 0
    (report,) = json.loads(out.read_text())["models"]
    return report["points"], report


def test_norms_are_autograds_and_finite_differences(measured):
    """One plain backward per token, with another attention; and the slope along the gradient."""
    points = [point for point in measured[0] if point["row"] == 0]
    tokenizer = AutoTokenizer.from_pretrained(shipped("kk"))
    model = AutoModelForCausalLM.from_pretrained(shipped("kk"), dtype=torch.float64).eval()
    prompt, response = tokenizer(PROMPT)["input_ids"], tokenizer(RESPONSE)["input_ids"]
    ids = torch.tensor([[*prompt, *response]])
    params = list(model.parameters())
    assert [point["token_id"] for point in points] == response

    def log_prob(place):
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 + place]
        return logits.log_softmax(-1)[response[place]]

    for place, point in enumerate(points):
        value = log_prob(place)
        gradients = torch.autograd.grad(value, params)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        assert point["p"] == pytest.approx(value.exp().item(), rel=1e-4)
        assert point["grad_norm"] == pytest.approx(norm, rel=1e-3)
    place = max(range(len(points)), key=lambda i: points[i]["grad_norm"])
    gradients = torch.autograd.grad(log_prob(place), params)
    norm, step = points[place]["grad_norm"], 1e-3
    values = []
    with torch.no_grad():
        for sign in (1, -2):
            for param, gradient in zip(params, gradients, strict=True):
                param.add_(gradient, alpha=sign * step / norm)
            values.append(log_prob(place).item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(norm, rel=1e-2)


def test_points_fit_together(measured):
    points, report = measured
    cfg = GrpoSG(lower=0.5)
    assert report["tokens"] == len(points) == report["batch"]["tokens"]
    for point in points:
        weight = 2.0 * (1 / (1 + math.exp(-9 * point["p"])) - 0.25)
        assert point["weight"] == pytest.approx(min(max(weight, cfg.lower), cfg.upper), rel=1e-6)
        assert point["weighted"] == pytest.approx(point["weight"] * point["grad_norm"])
        assert point["w_one_minus_p"] == pytest.approx(point["weight"] * point["one_minus_p"])
        assert point["one_minus_p"] == pytest.approx(1 - point["p"], abs=1e-9)
        rest = point["one_minus_p"]
        assert rest <= point["logit_norm"] <= math.sqrt(2) * rest * (1 + 1e-12)
        assert EDGES[point["stratum"]] <= point["p"] <= EDGES[point["stratum"] + 1]
        assert point["represents"] == 1.0
    summary = report["summary"]
    assert sum(row["share_of_grad_norm"] for row in summary["strata"]) == pytest.approx(1.0)
    assert sum(row["tokens"] for row in summary["strata"]) == len(points)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=300), st.integers(1, 400), st.integers(0, 9)
)
def test_a_sample_shows_every_stratum_and_counts_for_all(probs, n, seed):
    tensor = torch.tensor(probs, dtype=torch.float64)
    chosen, stratum, represents = stratified(tensor, n, seed)
    assert len(chosen) == len(chosen.unique()) == min(n, len(probs))
    assert represents.sum().item() == pytest.approx(len(probs) if n >= 9 else represents.sum())
    every = torch.bucketize(tensor, torch.tensor(EDGES[1:-1], dtype=torch.float64))
    assert torch.equal(every[chosen], stratum)
    sizes = {int(k): int((every == k).sum()) for k in every.unique()}
    taken = {k: int((stratum == k).sum()) for k in sizes}
    if n >= len(sizes):
        assert all(count > 0 for count in taken.values())
        for k, count in taken.items():
            assert represents[stratum == k].sum().item() == pytest.approx(sizes[k])
            # Equal shares: less than the largest share only where the stratum is used up.
            assert count >= max(taken.values()) - 1 or count == sizes[k]
    again = stratified(tensor, n, seed)
    assert torch.equal(chosen, again[0])


def test_the_sum_over_the_batch_is_autograds(tmp_path):
    """Eq. 17 and 18, with one plain backward per token."""
    data, out = tmp_path / "samples.jsonl", tmp_path / "o.json"
    graded = [(RESPONSE, 1.0), ("Guess ok", -0.5), ("Try Luke=knight", 0.0)]
    rows = [{"prompt": PROMPT, "response": text, "advantage": a} for text, a in graded]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert token_gradients.main(["--model", MODEL, "--data", str(data), "--json", str(out)]) == 0
    (report,) = json.loads(out.read_text())["models"]

    tokenizer = AutoTokenizer.from_pretrained(shipped("kk"))
    model = AutoModelForCausalLM.from_pretrained(shipped("kk"), dtype=torch.float64).eval()
    prompt = tokenizer(PROMPT)["input_ids"]
    parts, gradients = [], []
    for text, advantage in graded[:2]:
        response = tokenizer(text)["input_ids"]
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
        for place, token in enumerate(response):
            value = logits[len(prompt) - 1 + place].log_softmax(-1)[token]
            found = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            gradients.append(advantage * torch.cat([g.flatten() for g in found]))
            p = value.exp().item()
            weight = min(max(2.0 * (1 / (1 + math.exp(-9 * p)) - 0.25), 1.0), 1.4)
            parts.append((weight, abs(advantage), 1 - p, gradients[-1].norm().item()))
    total = sum(w * g for (w, *_), g in zip(parts, gradients, strict=True)).norm().item()
    largest = max(norm / (a * rest) for _, a, rest, norm in parts)
    units = torch.stack([g / g.norm() for g in gradients])
    cosines = (units @ units.T)[~torch.eye(len(units), dtype=torch.bool)]
    expected = {
        "norm": total,
        "over_sum_of_norms": total / sum(w * norm for w, _, _, norm in parts),
        "over_bound": total / (largest * sum(w * a * rest for w, a, rest, _ in parts)),
        "over_independent": total / math.sqrt(sum((w * norm) ** 2 for w, _, _, norm in parts)),
        "mean_cosine": cosines.mean().item(),
    }
    assert report["sum"] == pytest.approx(expected, rel=1e-3)
    assert 0 < report["sum"]["over_bound"] < report["sum"]["over_sum_of_norms"] < 1


def test_without_advantages_there_is_no_sum(measured):
    assert measured[1]["sum"] is None


def columns(p, grad_norm, represents=1.0, stratum=0):
    rest = 1 - np.array(p)
    found = {
        "p": p, "one_minus_p": rest, "logit_norm": rest, "grad_norm": grad_norm, "weight": 1.0,
        "weighted": grad_norm, "w_one_minus_p": rest, "represents": represents, "stratum": stratum,
    }  # fmt: skip
    return {name: np.broadcast_to(np.array(values), rest.shape) for name, values in found.items()}


def test_the_summary_by_hand():
    summary = summarise(columns([0.9, 0.4, 0.2], [1.0, 2.0, 5.0], [3.0, 1.0, 1.0], [6, 3, 2]))
    assert summary["spearman"]["grad_norm_vs_one_minus_p"] == pytest.approx(1.0)
    assert summary["spearman"]["grad_norm_vs_one_minus_p_where_p_below_0.5"] is None  # two points
    # Five tokens with norms 1, 1, 1, 2, 5: mean 2, variance (1 + 1 + 1 + 0 + 9) / 5.
    assert summary["spread"]["grad_norm"] == pytest.approx(math.sqrt(12 / 5) / 2)
    shares = [row["share_of_grad_norm"] for row in summary["strata"]]
    assert shares == pytest.approx([0.5, 0.2, 0.3])
    reverse = summarise(columns([0.9, 0.5, 0.2], [5.0, 2.0, 1.0]))
    assert reverse["spearman"]["grad_norm_vs_one_minus_p"] == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "none.jsonl: no such file"),
        (["sg.weighting.type=random"], "sg.weighting.type=random: expected a weight that is a"),
        (
            ["sg.weighting.type=ar", "sg.weighting.placement=outside"],  # AR takes no other one
            "sg.weighting.type=ar: expected a weight that is a function of p",
        ),
        (["--tokens", "0"], "--tokens: 0: expected a whole number"),
    ],
)
def test_bad_options_are_one_line(tmp_path, refused, arguments, message):
    first = ["--model", MODEL, "--data", tmp_path / "none.jsonl", "--json", tmp_path / "o.json"]
    assert message in refused(token_gradients.main, *first, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_several_checkpoints_are_measured_on_one_batch(measured, tmp_path, capsys):
    data, out = tmp_path / "samples.jsonl", tmp_path / "o.json"
    data.write_text(json.dumps({"prompt": PROMPT, "response": RESPONSE}) + "\n")
    arguments = ["--data", str(data), "--json", str(out), "sg.weighting.lower=0.5"]
    assert token_gradients.main(["--model", MODEL, MODEL, *arguments]) == 0
    first, second = json.loads(out.read_text())["models"]
    assert first == second and capsys.readouterr().out.count("Spearman's") == 2
    expected = [point for point in measured[0] if point["row"] == 0]
    for found, point in zip(first["points"], expected, strict=True):
        assert found["grad_norm"] == pytest.approx(point["grad_norm"], rel=1e-9)


def test_a_chunk_counts_the_logits_of_a_large_vocabulary(monkeypatch):
    config = LlamaConfig(
        vocab_size=4096, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    row = TokenRow((1, 2), tuple(range(40)))
    chunks = []
    known = token_gradients.token_gradients

    def recorded(*arguments, chunk):
        chunks.append(chunk)
        return known(*arguments, chunk=chunk)

    monkeypatch.setattr(token_gradients, "token_gradients", recorded)
    monkeypatch.setattr(token_gradients, "CHUNK_BYTES", 2**23)
    places, scale = torch.arange(12), torch.ones(12, dtype=torch.float64)
    token_gradients.row_figures(model, row, places, 1.0, GrpoSG(), scale)
    of_logits = 40 * 4096 * 8
    assert 1 < chunks[0] <= 2**23 // of_logits
