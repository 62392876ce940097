"""What the measurements stand on: log-probs of padded rows, batches read and saved, the losses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from lab.measure import fixed_batch
from lab.measure.ascent import sharpness
from lab.measure.batch_loss import UNIFORM, BatchLoss, Surrogate
from lab.measure.checkpoint import MeasureError, TokenRow, passes, responses, vocabulary
from lab.measure.fixed_batch import BatchRow, FixedBatch, from_responses
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.token_weights import token_weights
from sg_rlhf.algo.weightings import TokenContext, make_weighting, token_keys
from sg_rlhf.algo.weightings.ar import AdvantageReweighting
from sg_rlhf.algo.weightings.grpo_sg import GrpoSG
from sg_rlhf.algo.weightings.random import Random
from sg_rlhf.algo.weightings.stapo import Stapo
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tiny.build import shipped

TOKENIZER = AutoTokenizer.from_pretrained(shipped("kk"))
WIDE = GrpoSG(lower=0.5, upper=1.5)


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    """An untrained model that is far from uniform, in float64."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.5, pad_token_id=0, eos_token_id=1,
        attn_implementation=request.param,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().eval()


def batch_of(temperature=1.0):
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return tuple(torch.randint(2, 30, (n,), generator=generator).tolist())

    shapes = ((3, 5), (7, 1), (2, 9), (4, 4), (1, 6))
    advantages = (1.5, -0.5, 0.8, -2.0, 0.0)
    rows = [BatchRow(ids(p), ids(r), a) for (p, r), a in zip(shapes, advantages, strict=True)]
    return FixedBatch(tuple(rows), temperature, "", "a test")


def log_probs_alone(model, row, temperature):
    """Each response token's log-prob from the plain logits of one row without padding."""
    logits = model(input_ids=torch.tensor([[*row.prompt, *row.response]])).logits[0] / temperature
    start = len(row.prompt)
    table = logits[start - 1 : -1].log_softmax(-1)
    return table.gather(1, torch.tensor(row.response)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_padding_changes_neither_log_probs_nor_gradients(model, temperature):
    batch = batch_of(temperature)
    together = responses(model, batch.rows, temperature)
    found = together.log_probs_BT()
    assert bool((found[~together.mask_BT] == 0).all())
    alone = [log_probs_alone(model, row, temperature) for row in batch.rows]
    for place, expected in enumerate(alone):
        torch.testing.assert_close(
            found[place][together.mask_BT[place]], expected, atol=1e-5, rtol=0
        )
    params = list(model.parameters())
    gradients = torch.autograd.grad((found**2).sum(), params)
    expected_gradients = torch.autograd.grad(sum((a**2).sum() for a in alone), params)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("pass_tokens", [1, 20, 1000])
def test_every_row_is_in_one_pass_that_fits(pass_tokens):
    rows = batch_of().rows
    found = list(passes(rows, pass_tokens))
    assert sorted(i for part in found for i in part) == list(range(len(rows)))
    for part in found:
        assert len(part) == 1 or max(len(rows[i]) for i in part) * len(part) <= pass_tokens


def total(loss):
    return float(sum(piece.item() for piece in loss()))


def gradient(loss, model):
    params = list(model.parameters())
    for param in params:
        param.grad = None
    for piece in loss():
        piece.backward()
    flat = torch.cat([param.grad.flatten() for param in params])
    for param in params:
        param.grad = None
    return flat


def test_nll_is_the_mean_over_tokens_however_it_is_cut(model):
    batch = batch_of(0.7)
    expected = -torch.cat([log_probs_alone(model, r, 0.7) for r in batch.rows]).mean().item()
    for pass_tokens in (1, 1000):
        loss = BatchLoss(model, batch, None, pass_tokens=pass_tokens)
        assert total(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize(
    "weights",
    [
        UNIFORM,
        WIDE,
        replace(WIDE, placement="outside"),
        replace(WIDE, normalize="batch_mean"),
        GrpoSG(lower=0.0, upper=0.0, allow_constant=True),
        Random(seed=4),
        AdvantageReweighting(placement="outside"),
        Stapo(prob=0.3, entropy=2.0),
        make_weighting("mask_only"),
        make_weighting("top_entropy", {"share": 0.4}),
        make_weighting("grpo_sg", {"probability": "engine"}),
    ],
    ids=[
        "uniform",
        "inside",
        "outside",
        "batch mean",
        "zero",
        "random",
        "ar",
        "stapo",
        "mask only",
        "top entropy",
        "engine",
    ],
)
def test_at_the_centre_value_and_gradient_are_the_trainings_loss(model, weights, token_level):
    """Held weights and pieces change nothing where the training starts: ratio 1."""
    batch = batch_of()
    surrogate = Surrogate(weights=weights, token_level=token_level)
    loss = BatchLoss(model, batch, surrogate, pass_tokens=20)
    out = responses(model, batch.rows)
    log_probs = out.log_probs_BT()
    advantages = torch.tensor(batch.advantages(), dtype=torch.float64)[:, None].expand_as(log_probs)
    keys = torch.zeros_like(out.targets_BT)
    for place, row in enumerate(batch.rows):  # as of each sequence alone
        ids = torch.tensor([[*row.prompt, *row.response]])
        alone = token_keys(ids, torch.ones_like(ids))[0, len(row.prompt) - 1 :]
        keys[place][out.mask_BT[place]] = alone
    distribution = torch.distributions.Categorical(logits=out.logits_BTV.detach())
    context = TokenContext(
        old_log_probs=log_probs, engine_log_probs=log_probs, advantages=advantages, keys=keys,
        entropy=distribution.entropy(),
    )  # fmt: skip
    mean = "token-mean" if token_level else "seq-mean"
    settings = LossSettings(weights, 0.2, 0.24, 10.0, aggregation=mean)
    expected = policy_loss(
        log_probs, log_probs.detach(), advantages, out.mask_BT, settings, context=context
    ).loss
    if weights.name in ("stapo", "mask_only", "top_entropy"):
        context = replace(context, eps=(0.2, 0.24))
        used = token_weights(log_probs, weights, out.mask_BT, context=context)[out.mask_BT]
        assert 0 < float(used.mean()) < 1
    assert len(list(loss())) > 1  # passes
    assert total(loss) == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(expected, model.parameters())])
    torch.testing.assert_close(gradient(loss, model), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", [UNIFORM, WIDE, replace(WIDE, placement="outside")])
def test_away_from_the_centre_the_weights_are_those_of_the_centre(model, weights):
    batch = batch_of()
    loss = BatchLoss(model, batch, Surrogate(weights=weights, dual_clip=None))
    out = responses(model, batch.rows)
    old, mask = out.log_probs_BT().detach(), out.mask_BT
    advantages = torch.tensor(batch.advantages(), dtype=torch.float64)[:, None].expand_as(old)
    w = torch.ones_like(old)
    if weights is not UNIFORM:
        w = (2.0 * (torch.sigmoid(9.0 * old.exp()) - 0.25)).clamp(0.5, 1.5)
    head = model.lm_head.weight
    before = head.detach().clone()
    with torch.no_grad():
        head.add_(0.05 * torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
        r = (responses(model, batch.rows).log_probs_BT() - old).exp()
        x = w * r if weights.placement == "inside" else r
        value = torch.min(x * advantages, x.clamp(0.8, 1.24) * advantages)
        value = value if weights.placement == "inside" else w * value
        expected = -(value * mask).sum() / mask.sum()
        found = total(loss)
        head.copy_(before)
    assert float((r - 1).abs().max()) > 0.05
    assert found == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("surrogate", [None, Surrogate(), Surrogate(weights=WIDE)])
def test_sharpness_of_a_model_follows_the_first_order_at_small_radii(model, surrogate):
    loss = BatchLoss(model, batch_of(), surrogate, pass_tokens=20)
    params = list(model.parameters())
    norm = gradient(loss, model).norm().item()
    small = sharpness(params, loss, 1e-3, steps=2)
    assert small.grad_norm == pytest.approx(norm, rel=1e-6)
    assert small.value == pytest.approx(1e-3 * norm, rel=0.05)
    large = sharpness(params, loss, 0.3, steps=6)
    assert large.value > 10 * small.value
    assert sharpness(params, loss, 0.3, steps=6) == large


def test_a_batch_survives_its_file(tmp_path):
    ids = tuple(TOKENIZER("Guess")["input_ids"])
    rows = (BatchRow(ids, ids, 0.5, 3.0), BatchRow(ids, ids * 2, None, None))
    batch = FixedBatch(rows, 0.7, vocabulary(TOKENIZER), "somewhere", 2)
    path = tmp_path / "new" / "batch.json"
    fixed_batch.save(batch, path, TOKENIZER)
    assert fixed_batch.load(path) == batch
    assert json.loads(path.read_text())["rows"][0]["response"] == "Guess"
    assert [p.name for p in path.parent.iterdir()] == ["batch.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "other", "rows": []}', "\x00"])
def test_another_file_is_no_batch(tmp_path, text):
    path = tmp_path / "batch.json"
    path.write_text(text)
    with pytest.raises(MeasureError, match=r"batch\.json: not a batch that this command wrote"):
        fixed_batch.load(path)


def test_advantages_must_be_there_and_not_all_zero():
    row = TokenRow((1,), (2,))
    for values, message in (
        ((1.0, None), "without advantage"),
        ((0.0, 0.0), "every advantage is 0"),
    ):
        rows = tuple(BatchRow(row.prompt, row.response, value) for value in values)
        with pytest.raises(MeasureError, match=message):
            FixedBatch(rows, 1.0, "", "file").advantages()


def sample(response="Guess", **changes):
    pieces = [TOKENIZER.decode([t]) for t in TOKENIZER(response)["input_ids"]]
    row = {"global_step": 1, "prompt": "Try", "response": response, "advantage": 0.5, "reward": 3.0}
    return {**row, "tokens": pieces, **changes}


def test_rows_of_a_run_are_encoded_again_and_what_differs_is_counted(tmp_path):
    rows = [
        sample("Guess ok"),
        sample("Guess ok", tokens=list("Guess ok")),  # the policy spelt it out
        sample(dialogue="Guess <information> x </information> ok"),
        sample("ok", global_step=2, advantage=-1.0),
    ]
    batch = from_responses(tmp_path, rows, TOKENIZER, temperature=0.7)
    assert [TOKENIZER.decode(row.response) for row in batch.rows] == ["Guess ok", "ok"]
    assert (batch.left_out, batch.advantages(), batch.temperature) == (2, [0.5, -1.0], 0.7)
    second = from_responses(tmp_path, rows, TOKENIZER, temperature=1.0, global_step=2)
    assert second.advantages() == [-1.0]
    with pytest.raises(DataError, match="no rows with global_step 9"):
        from_responses(tmp_path, rows, TOKENIZER, temperature=1.0, global_step=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response": ""}, "row 2: response='': expected a text"),
        ({"prompt": 3}, "row 2: prompt=3: expected a text"),
        ({"advantage": "x"}, "row 2: advantage='x': expected a finite number"),
        ({"advantage": math.nan}, "row 2: advantage=nan: expected a finite number"),
    ],
)
def test_a_bad_row_is_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        from_responses(tmp_path, [sample(), sample() | changes], TOKENIZER, temperature=1.0)
