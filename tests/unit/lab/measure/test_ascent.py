"""Sharpness: linear and quadratic losses whose maximum over the ball is known exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.measure.ascent import AscentStep, Sharpness, parameter_norm, sharpness
from tests.unit.algo.batches import PROPERTY


def parameters(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


class Quadratic:
    """L(x) = 1/2 x^T H x + b^T x over two parameters together, with given eigenvalues."""

    def __init__(self, eigenvalues, seed):
        n = len(eigenvalues)
        generator = torch.Generator().manual_seed(seed)
        q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        self.hessian = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
        self.b = torch.randn(n, generator=generator, dtype=torch.float64)
        self.params = parameters((2,), (n - 2,), seed=seed + 1)

    def __call__(self):
        x = torch.cat(self.params)
        return [x @ self.hessian @ x / 2 + self.b @ x]

    def largest_rise(self, rho):
        """max of g^T e + 1/2 e^T H e over ||e|| <= rho, from its optimality conditions.

        e = (mu I - H)^-1 g with mu >= max(0, largest eigenvalue); mu = 0 if that e is inside,
        else the mu, found by bisection, for which ||e|| = rho.
        """
        gradient = self.hessian @ torch.cat(self.params).detach() + self.b
        values, vectors = torch.linalg.eigh(self.hessian)
        g = vectors.T @ gradient

        def rise(mu):
            e = g / (mu - values)
            return float(g @ e + (values * e * e).sum() / 2)

        def length(mu):
            return float((g / (mu - values)).norm())

        floor = max(0.0, float(values.max()))
        if values.max() < 0 and length(0.0) <= rho:
            return rise(0.0)
        low, high = floor, floor + 1e3 + float(g.norm()) / rho
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle) > rho else (low, middle)
        return rise(high)


@given(st.integers(0, 10_000), st.floats(1e-4, 100.0), st.integers(1, 6))
@PROPERTY
def test_a_linear_function_rises_by_rho_times_its_gradient(seed, rho, steps):
    params = parameters((3, 2), (4,), seed=seed)
    slopes = parameters((3, 2), (4,), seed=seed + 1)
    norm = parameter_norm(slopes)

    def pieces():
        return [(p * s.detach()).sum() for p, s in zip(params, slopes, strict=True)]

    result = sharpness(params, pieces, rho, steps=steps)
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    assert result.first_order == rho * result.grad_norm
    assert len(result.steps) == steps
    for step in result.steps:
        assert step.rise == pytest.approx(rho * norm, rel=1e-9, abs=1e-12)
        assert step.radius == pytest.approx(rho, rel=1e-9)


@given(st.integers(0, 10_000), st.floats(0.01, 10.0))
@PROPERTY
def test_a_convex_quadratic_reaches_the_exact_maximum(seed, rho):
    # One direction is clearly the sharpest: ascent towards it is quick.
    loss = Quadratic([0.0, 0.3, 0.5, 1.0, 3.0], seed)
    exact = loss.largest_rise(rho)
    found = sharpness(loss.params, loss, rho, steps=150).value
    assert found <= exact * (1 + 1e-9)
    assert found >= exact * (1 - 1e-3)


@given(
    st.lists(st.floats(-3.0, 3.0), min_size=3, max_size=6),
    st.integers(0, 10_000),
    st.floats(0.01, 10.0),
)
@PROPERTY
def test_any_quadratic_is_bounded_by_its_exact_maximum(eigenvalues, seed, rho):
    loss = Quadratic(eigenvalues, seed)
    result = sharpness(loss.params, loss, rho, steps=12)
    assert 0.0 <= result.value <= loss.largest_rise(rho) * (1 + 1e-6) + 1e-9
    assert all(step.radius <= rho * (1 + 1e-6) for step in result.steps)
    assert result.value == max(0.0, *(step.rise for step in result.steps))


@pytest.mark.parametrize("seed", range(5))
def test_curvature_is_seen_where_the_first_order_is_blind(seed):
    """At this radius the exact maximum is several times rho ||g||, and the ascent finds it."""
    loss = Quadratic([0.1, 0.2, 0.4, 4.0], seed)
    rho = 20.0
    result = sharpness(loss.params, loss, rho, steps=60)
    assert loss.largest_rise(rho) > 1.5 * result.first_order
    assert result.value == pytest.approx(loss.largest_rise(rho), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_maximum_inside_the_ball_is_found(seed):
    loss = Quadratic([-1.0, -1.2, -1.5, -2.0], seed)
    rho = 50.0
    result = sharpness(loss.params, loss, rho, steps=60)
    exact = loss.largest_rise(rho)
    assert result.first_order > 10 * exact  # the linear prediction is far off here
    assert result.value == pytest.approx(exact, rel=1e-2)
    assert result.steps[result.best_step - 1].radius < 0.5 * rho


def test_small_radii_approach_the_first_order():
    loss = Quadratic([-1.0, 0.5, 2.0], 3)
    ratios = []
    for rho in (1e-1, 1e-2, 1e-3, 1e-4):
        result = sharpness(loss.params, loss, rho, steps=3)
        ratios.append(abs(result.value / result.first_order - 1))
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 1e-4


def test_pieces_add_up():
    params = parameters((3,), (2,))

    def whole():
        return [sum((p**4).sum() for p in params)]

    def parts():
        return ((p**4).sum() for p in params)

    together = sharpness(params, whole, 0.5, steps=5)
    apart = sharpness(params, parts, 0.5, steps=5)
    assert apart.loss == pytest.approx(together.loss, rel=1e-14)
    rises = [[step.rise for step in result.steps] for result in (together, apart)]
    assert rises[0] == pytest.approx(rises[1], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_come_back_bit_for_bit(dtype):
    params = parameters((40,), (3, 5), dtype=dtype)
    before = [p.detach().clone() for p in params]
    results = [sharpness(params, lambda: [(p**4).sum() for p in params], 0.1) for _ in range(2)]
    assert results[0] == results[1]
    for param, origin in zip(params, before, strict=True):
        assert torch.equal(param.detach(), origin)
        assert param.grad is None


def test_parameters_come_back_after_an_error():
    params = parameters((4,))
    before = params[0].detach().clone()
    calls = []

    def fails_at_the_third():
        calls.append(1)
        if len(calls) == 3:
            assert not torch.equal(params[0].detach(), before)
            raise RuntimeError("stop")
        return [(params[0] ** 2).sum()]

    with pytest.raises(RuntimeError, match="stop"):
        sharpness(params, fails_at_the_third, 0.5)
    assert torch.equal(params[0].detach(), before)
    assert params[0].grad is None


def test_evaluations_are_steps_and_the_centre_and_the_last_has_no_graph():
    params, graphs, ticks = parameters((4,)), [], []

    def pieces():
        piece = (params[0] ** 2).sum()
        graphs.append(piece.requires_grad)
        return [piece]

    sharpness(params, pieces, 0.1, steps=4, on_step=lambda: ticks.append(1))
    assert graphs == [True, True, True, True, False]
    assert len(ticks) == 5


def test_a_parameter_outside_the_list_stays():
    moved, fixed = parameters((3,), (3,))
    result = sharpness([moved], lambda: [(moved * fixed).sum()], 0.5, steps=2)
    assert result.grad_norm == pytest.approx(float(fixed.detach().norm()))


def test_without_a_gradient_there_is_no_step():
    param = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    result = sharpness([param], lambda: [(param**2).sum()], 1.0)
    assert (result.steps, result.value, result.best_step, result.grad_norm) == ((), 0.0, 0, 0.0)


def test_a_loss_that_overflows_ends_the_ascent():
    param = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    result = sharpness([param], lambda: [torch.exp(param * 10).sum()], 1000.0, steps=5)
    assert [step.rise for step in result.steps] == [math.inf]
    assert result.value == 0.0


def test_the_best_of_all_steps_counts():
    steps = tuple(AscentStep(rise, 1.0, 1.0) for rise in (0.5, 2.0, math.nan, 1.0))
    result = Sharpness(rho=1.0, loss=0.0, grad_norm=1.0, steps=steps)
    assert (result.best_step, result.value) == (2, 2.0)
    fallen = Sharpness(rho=1.0, loss=0.0, grad_norm=1.0, steps=(AscentStep(-1.0, 1.0, 1.0),))
    assert (fallen.best_step, fallen.value) == (0, 0.0)


@pytest.mark.parametrize("rho", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_radius_is_refused(rho):
    params = parameters((2,))
    with pytest.raises(ValueError, match="rho=.*: expected a finite number above 0"):
        sharpness(params, lambda: [params[0].sum()], rho)


def test_bad_parameters_are_refused():
    (param,) = parameters((2,))
    loss = lambda: [param.sum()]  # noqa: E731
    with pytest.raises(ValueError, match="steps=0"):
        sharpness([param], loss, 1.0, steps=0)
    for params in ([], [param, param]):
        with pytest.raises(ValueError, match="each only once"):
            sharpness(params, loss, 1.0)
    for wrong in (torch.ones(2), param * 2, torch.ones(2, dtype=torch.bfloat16).requires_grad_()):
        with pytest.raises(ValueError, match="float32 or float64"):
            sharpness([wrong], loss, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_centre_that_is_not_finite_is_refused(value):
    (param,) = parameters((2,))
    with pytest.raises(ValueError, match="at the centre"):
        sharpness([param], lambda: [param.sum() * value], 1.0)
    assert param.grad is None
