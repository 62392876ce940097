"""Every algorithm's update by the real trainer: the same for every sharding, GRPO where off."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import ROOT, run_ranks

# With all tests the fixture makes every algorithm's update twice: minutes on a busy machine.
pytestmark = pytest.mark.integration

ALGORITHMS = sorted(path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml"))
#: Those of `make test`; `make test-all` has every one.
QUICK = {"grpo", "grpo_sg", "grpo_sg_outside", "lopti", "uniform", "grpo_sg_off", "lopti_off"}
#: (ranks, responses per micro-batch): one step of 8 responses, whole and cut unevenly. One rank has
#: micro-batches of 1 and 2 responses, the other of 3 and 2.
LAYOUTS = {"1x8": (1, 8), "2 ranks, rounds": (2, "rounds")}
#: Log-probs are bf16, so batches of another shape are rounded otherwise.
ROUNDING = 0.02
#: Statistics whose sums over the 8 responses must not depend on how they are cut.
COMPARED = (
    "policy_loss", "kl", "entropy_loss", "actor_grad_norm", "sg/n_tokens", "sg/weight_mean",
    "sg/w_one_minus_p_mean", "sg/zeroed_pos",
)  # fmt: skip


def algorithms(names: Iterable[str]) -> list[Any]:
    """The cases of a test."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.fixture(scope="module")
def updates(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Of the algorithms that the chosen tests ask for."""
    folder = tmp_path_factory.mktemp("updates")
    cases = [
        item.callspec.params
        for item in request.session.items
        if item.path == Path(__file__) and isinstance(item, pytest.Function)
    ]
    names = ",".join(sorted(QUICK | {str(case["name"]) for case in cases if "name" in case}))
    found = {}
    for layout, (ranks, micro_batch) in LAYOUTS.items():
        out: Path = folder / f"{ranks}_{micro_batch}.pt"
        run_ranks("update_on_ranks.py", ranks, str(micro_batch), str(out), names)
        found[layout] = torch.load(out, weights_only=True)
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
@pytest.mark.parametrize("name", algorithms(ALGORITHMS))
def test_the_update_does_not_depend_on_the_sharding(
    updates: dict[str, dict[str, Any]], name: str, layout: str
) -> None:
    whole, cut = updates["1x8"][name], updates[layout][name]
    assert distance(cut["gradient"], whole["gradient"]) < ROUNDING
    assert len(cut["rows"]) == len(whole["rows"])
    for found, expected in zip(cut["rows"], whole["rows"], strict=True):
        for key in COMPARED:
            assert found[key] == pytest.approx(expected[key], rel=ROUNDING, abs=2e-3), key


@pytest.mark.parametrize(
    "name",
    algorithms([
        "uniform", "grpo_sg_quotient", "lopti_off", "ar_off", "random_off", "stapo_off",
        "grpo_sg_off", "grpo_sg_outside_off", "grpo_sg_normalized_off", "reverse_off",
        "tr_grpo_off", "grpo_sg_engine_off", "grpo_sg_centred_off", "linear_off", "power_off",
        "mask_only_off", "negative_only_off", "positive_only_off",
        "reshape_reversed_off", "stare_off", "top_entropy_off",
    ]),
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_switched_off_it_is_grpo_bit_for_bit(
    updates: dict[str, dict[str, Any]], name: str, layout: str
) -> None:
    """The same gradient, and so the same update, as upstream's own loss gives."""
    assert torch.equal(updates[layout][name]["gradient"], updates[layout]["grpo"]["gradient"])


@pytest.mark.parametrize(
    "name",
    algorithms(
        n for n in ALGORITHMS if n not in ("grpo", "uniform", "grpo_sg_quotient", "dr_grpo")
    ),
)
def test_it_does_something(updates: dict[str, dict[str, Any]], name: str) -> None:
    """Dr. GRPO differs in the advantages, which are given here."""
    grpo = updates["1x8"]["grpo"]["gradient"]
    assert distance(updates["1x8"][name]["gradient"], grpo) > ROUNDING


@pytest.mark.parametrize("name", algorithms(["lopti", "ar_lopti"]))
def test_lopti_updates_every_token_once(updates: dict[str, dict[str, Any]], name: str) -> None:
    low, rest = updates["1x8"][name]["rows"]
    (together,) = updates["1x8"]["uniform"]["rows"]
    assert (low["pass"], rest["pass"]) == ("low", "rest")
    assert low["sg/n_tokens"] + rest["sg/n_tokens"] == together["sg/n_tokens"]
    assert min(low["sg/n_tokens"], rest["sg/n_tokens"]) > 10
    mean_of_1_minus_p = [row["sg/w_one_minus_p_mean"] for row in (low, rest)]  # w = 1
    assert mean_of_1_minus_p[0] > 0.5 > mean_of_1_minus_p[1]
    (off,) = updates["1x8"]["lopti_off"]["rows"]
    assert off["pass"] == "rest"


@pytest.mark.full
@pytest.mark.parametrize(
    ("micro_batch", "ranks", "dynamic"),
    [
        ("rounds", 2, []),
        # Upstream's cut by tokens: three or four micro-batches.
        ("1", 1, ["train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=160"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "sharded",
    [
        ["ds.zero_stage=2"],
        ["ds.zero_stage=1"],
        ["ds.zero_stage=2", "ds.adam_offload=true"],
    ],
)
def test_below_zero_3_no_micro_batch_is_lost(
    tmp_path: Path, micro_batch: str, ranks: int, dynamic: list[str], sharded: list[str]
) -> None:
    """Where a step has any number of micro-batches, as where it has a fixed one; rank 0's part."""
    found = {}
    for name, of_rank, more in (("any", micro_batch, dynamic), ("fixed", "2", [])):
        out = tmp_path / f"{name}.pt"
        run_ranks("update_on_ranks.py", ranks, of_rank, str(out), "grpo", *sharded, *more)
        found[name] = torch.load(out, weights_only=True)["grpo"]
    assert distance(found["any"]["gradient"], found["fixed"]["gradient"]) < ROUNDING
    (cut,), (whole,) = found["any"]["rows"], found["fixed"]["rows"]
    for key in COMPARED:
        assert cut[key] == pytest.approx(whole[key], rel=ROUNDING, abs=2e-3), key
