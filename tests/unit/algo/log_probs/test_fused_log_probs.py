"""Log-probs without logits: float64's values and gradients, and the faults that others had."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sg_rlhf.algo.log_probs import fused_log_probs
from sg_rlhf.algo.log_probs.from_logits import log_probs_from_logits
from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from tests.unit.algo import upstream
from tests.unit.peak import Peak

#: Largest difference from float64 on the same inputs, relative to the largest value. 16-bit
#: gradients are rounded once at the end and once on the way, as those of 16-bit logits are.
VALUE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
GRADIENT = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def problem(n=5, h=8, v=33, dtype=torch.float64, scale=1.0, seed=0, bias=True):
    """(hidden, weight, bias or None, targets)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    weight = (scale * torch.randn(v, h, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, v, (n,), generator=generator)
    return draw(n, h), weight.requires_grad_(), draw(v) if bias else None, targets


def reference(hidden, weight, bias, targets, temperature=1.0, softcap=None):
    """The same by the definition, in float64."""
    logits = hidden.double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def gradients(outputs, inputs, seed=1):
    """Of the outputs' sum with fixed random weights."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [x for x in inputs if x is not None]
    total = sum(
        (torch.randn(len(x), generator=generator, dtype=torch.float64) * x.double()).sum()
        for x in outputs
    )
    return torch.autograd.grad(total, inputs)


def assert_near(ours, theirs, tolerance):
    scale = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    assert ours.shape == theirs.shape
    assert torch.allclose(ours.double(), theirs.double(), rtol=0, atol=tolerance * scale)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9),
    h=st.integers(1, 9),
    v=st.integers(1, 70),
    chunk=st.integers(1, 40) | st.none(),
    dtype=st.sampled_from(list(VALUE)),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    softcap=st.sampled_from([None, 1.5, 30.0]),
    bias=st.booleans(),
    with_entropy=st.booleans(),
    rows=st.integers(1, 10),
    kept=st.booleans(),
    frozen=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_float64s(
    n, h, v, chunk, dtype, temperature, softcap, bias, with_entropy, rows, kept, frozen, seed
):
    inputs = problem(n, h, v, dtype, seed=seed, bias=bias)
    trained = inputs[:1] if frozen else inputs[:3]
    for x in inputs[1:3]:
        if x is not None:
            x.requires_grad_(not frozen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused_log_probs._ROWS, "cpu", rows)
        patch.setattr(fused_log_probs, "_KEPT", 10**6 if kept else 0)
        ours = selected_log_probs(
            *inputs[:2],
            inputs[3],
            bias=inputs[2],
            temperature=temperature,
            softcap=softcap,
            with_entropy=with_entropy,
            chunk=chunk,
        )
        assert (ours[1] is not None) == with_entropy
        ours = ours[: 1 + with_entropy]
        of_ours = gradients(ours, trained)
    theirs = reference(*inputs, temperature, softcap)[: 1 + with_entropy]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_near(mine, expected, VALUE[dtype])
    for mine, expected in zip(of_ours, gradients(theirs, trained), strict=True):
        assert mine.dtype == dtype
        assert_near(mine, expected, GRADIENT[dtype])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap, monkeypatch):
    monkeypatch.setattr(fused_log_probs, "_KEPT", 0)
    hidden, weight, bias, targets = problem()
    assert torch.autograd.gradcheck(
        lambda *x: selected_log_probs(
            x[0],
            x[1],
            targets,
            bias=x[2],
            temperature=0.7,
            softcap=softcap,
            with_entropy=True,
            chunk=7,
        ),
        (hidden, weight, bias),
    )


def test_the_entropys_gradient_alone():
    hidden, weight, bias, targets = problem()
    ours = selected_log_probs(hidden, weight, targets, bias=bias, with_entropy=True)[1:]
    theirs = reference(hidden, weight, bias, targets)[1:]
    found, expected = (gradients(x, (hidden, weight, bias)) for x in (ours, theirs))
    for mine, other in zip(found, expected, strict=True):
        assert_near(mine, other, 1e-11)


@pytest.mark.parametrize("kept", [0, 10**6])
@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_the_gradients_that_are_asked_for(needed, kept, monkeypatch):
    monkeypatch.setattr(fused_log_probs, "_KEPT", kept)
    inputs = [x.detach() for x in problem()]
    for x, wanted in zip(inputs[:3], needed, strict=True):
        x.requires_grad_(bool(wanted))
    asked = [x for x in inputs[:3] if x.requires_grad]
    ours = gradients(selected_log_probs(*inputs[:2], inputs[3], bias=inputs[2])[:1], asked)
    assert_near(ours[0], gradients(reference(*inputs)[:1], asked)[0], 1e-11)
    with torch.no_grad():
        assert not selected_log_probs(*inputs[:2], inputs[3])[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_log_prob_is_above_zero(dtype):
    """verl#2656: a target whose logit came from another product than the sum's had p > 1."""
    hidden, weight, bias, _ = problem(n=64, h=32, v=500, dtype=dtype, scale=3.0)
    likeliest = (hidden.double() @ weight.double().T + bias.double()).argmax(dim=1)
    for chunk in (None, 1, 7, 499):
        log_probs, entropy = selected_log_probs(
            hidden, weight, likeliest, bias=bias, temperature=0.2, with_entropy=True, chunk=chunk
        )
        assert (log_probs <= 0).all() and (entropy >= 0).all()


@pytest.mark.parametrize("chunk", [None, 5])
def test_all_logits_negative(chunk):
    """verl#7439: an online maximum that began at 0 made the entropy wrong."""
    hidden, weight, _, targets = problem(dtype=torch.float32)
    bias = torch.full((33,), -50.0)
    ours = selected_log_probs(hidden, weight, targets, bias=bias, with_entropy=True, chunk=chunk)
    for mine, expected in zip(ours, reference(hidden, weight, bias, targets), strict=True):
        assert_near(mine, expected, 1e-5)


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_tied_heads_gradient_counts_once(chunk):
    """The embedding's gradient and the head's are added, and neither twice."""
    _, weight, _, targets = problem(n=6, h=8, v=33)
    tokens = torch.tensor([3, 3, 5, 0, 32, 7])

    def through(head):
        hidden = torch.tanh(torch.nn.functional.embedding(tokens, weight))
        return head(hidden)[0].sum()

    (ours,) = torch.autograd.grad(
        through(lambda x: selected_log_probs(x, weight, targets, chunk=chunk)), weight
    )
    (theirs,) = torch.autograd.grad(through(lambda x: reference(x, weight, None, targets)), weight)
    assert_near(ours, theirs, 1e-11)


@pytest.mark.parametrize("chunk", [None, 4])
def test_logits_of_ten_thousand(chunk):
    hidden, weight, _, targets = problem(dtype=torch.float32)
    large = torch.zeros(33)
    large[::2], large[1::2] = 1e4, -1e4
    ours = selected_log_probs(hidden, weight, targets, bias=large, with_entropy=True, chunk=chunk)
    expected = reference(hidden, weight, large, targets)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.isfinite(mine).all()
        assert_near(mine, theirs, 1e-4)
    for gradient in gradients(ours, (hidden, weight)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("chunk", [None, 4])
def test_tokens_that_are_ruled_out(chunk):
    """A bias of -inf: no share of the sum, no entropy, no NaN."""
    hidden, weight, bias, _ = problem(n=4)
    bias = bias.detach()
    bias[:20] = -math.inf  # whole blocks of the vocabulary, the first one too
    targets = torch.tensor([20, 25, 32, 3])
    ours = selected_log_probs(hidden, weight, targets, bias=bias, with_entropy=True, chunk=chunk)
    assert ours[0][3] == -math.inf
    # The same as a head without them.
    allowed = reference(hidden[:3], weight[20:], bias[20:], targets[:3] - 20)
    for mine, expected in zip(ours, allowed, strict=True):
        assert_near(mine[:3], expected, 1e-12)
    of_ours = gradients([x[:3] for x in ours], (hidden, weight))
    for mine, expected in zip(of_ours, gradients(allowed, (hidden, weight)), strict=True):
        assert_near(mine, expected, 1e-11)


def test_a_nan_stays_in_its_row():
    hidden, weight, bias, targets = problem(dtype=torch.float32)
    with torch.no_grad():
        hidden[2, 3] = math.nan
    log_probs, entropy = selected_log_probs(
        hidden, weight, targets, bias=bias, with_entropy=True, chunk=8
    )
    row = torch.arange(5) == 2
    assert torch.equal(log_probs.isnan(), row) and torch.equal(entropy.isnan(), row)


def test_a_target_outside_of_the_vocabulary_is_nan():
    hidden, weight, bias, targets = problem()
    targets[0], targets[1] = -100, 33
    log_probs, _ = selected_log_probs(hidden, weight, targets, bias=bias, chunk=8)
    assert torch.equal(log_probs.isnan(), torch.arange(5) < 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_VH": torch.zeros(33, 7)}, r"weight \[33, 7\]"),
        ({"targets_N": torch.zeros(4, dtype=torch.long)}, r"targets \[4\]: expected \[5\]"),
        ({"bias": torch.zeros(3)}, r"bias \[3\]: expected \[33\]"),
        ({"weight_VH": torch.zeros(33, 8, dtype=torch.bfloat16)}, "bfloat16: expected the same"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"softcap": 0.0}, r"softcap=0\.0"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given_ = {
        "hidden_NH": torch.zeros(5, 8),
        "weight_VH": torch.zeros(33, 8),
        "targets_N": torch.zeros(5, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        selected_log_probs(**(given_ | change))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_of_a_token_that_is_all_but_certain(dtype, frozen, monkeypatch):
    """1 - p is 2e-4: rounded as p is, to 16 bits, it would be 0 or 4e-3."""
    monkeypatch.setattr(fused_log_probs, "_KEPT", 0)
    hidden, weight, _, targets = problem(dtype=dtype, scale=0.1, bias=False)
    likely = torch.zeros(33, dtype=dtype)
    likely[4] = 12.0
    targets[:] = 4
    weight.requires_grad_(not frozen)
    (ours,) = gradients(
        selected_log_probs(hidden, weight, targets, bias=likely, chunk=7)[:1], [hidden]
    )
    (theirs,) = gradients(reference(hidden, weight, likely, targets)[:1], [hidden])
    assert 0 < theirs.abs().max() < 1e-3
    scale = float(theirs.abs().max())
    assert (ours - theirs).abs().max() < (1e-9 if dtype == torch.float64 else 0.02) * scale


def test_backward_twice_is_the_same_twice():
    """What is kept of the forward pass is not overwritten by the backward pass."""
    hidden, weight, bias, targets = problem()
    ours = selected_log_probs(hidden, weight, targets, bias=bias, with_entropy=True)
    total = ours[0].sum() + ours[1].sum()
    once = torch.autograd.grad(total, (hidden, weight, bias), retain_graph=True)
    again = torch.autograd.grad(total, (hidden, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


class _Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation returned, in elements."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def test_no_tensor_of_all_logits_is_made():
    n, v = 3000, 20_000
    hidden, weight, _, targets = problem(n, 4, v, torch.float32, bias=False)
    with _Sizes() as sizes:
        log_probs, entropy = selected_log_probs(hidden, weight, targets, with_entropy=True)
        gradients((log_probs, entropy), (hidden, weight))
    assert sizes.largest <= max(1024 * 1024, v * 4) < n * v / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("h", "v"), [(2048, 151_936), (3584, 151_936), (4096, 128_256)])
def test_memory_at_4096_tokens_is_5_percent_of_the_logits(h, v, dtype):
    """At the heads of 3B to 8B models; the sizes alone are computed with, and a part of the
    vocabulary, of which every block takes the same."""
    tokens, part = 4096, 6000
    with FakeTensorMode(), Peak() as peak:
        hidden = torch.empty(tokens, h, dtype=dtype, requires_grad=True)
        weight = torch.empty(part, h, dtype=dtype, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.long)
        inputs = peak.now
        log_probs, entropy = selected_log_probs(
            hidden, weight, targets, temperature=0.7, with_entropy=True
        )
        found = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    own = sum(x.numel() * x.element_size() for x in found)
    assert entropy is not None
    assert 0 < peak.most - inputs - own < 0.05 * 4 * tokens * v


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33), (1, 2100, 9)])
def test_from_logits_is_upstreams_value_and_gradient(shape, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator).mul_(3)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    weights = torch.randn(shape[:-1], generator=generator)

    def run(function):
        leaf = logits.clone().requires_grad_()
        log_probs = function(leaf * 1.0, labels, temperature=temperature)
        (log_probs * weights).sum().backward()
        return log_probs.detach(), leaf.grad

    ours, theirs = run(log_probs_from_logits), run(upstream.log_probs_from_logits())
    assert torch.equal(ours[0], theirs[0])
    assert_near(ours[1], theirs[1], 2e-6)
    assert float(ours[0].max()) <= 0.0


def test_from_logits_makes_one_gradient():
    rows, v = 4096, 64  # four of the chunks that upstream's backward makes a whole tensor for
    logits = torch.randn(rows, v, requires_grad=True)
    labels = torch.randint(0, v, (rows,))
    made = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == rows * v:
                made.append(result.untyped_storage().data_ptr())
            return result

    log_probs = log_probs_from_logits(logits, labels)
    with Count():
        log_probs.sum().backward()
    assert len(set(made) - {logits.data_ptr()}) == 1
