"""The README, and what its readers need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sg_rlhf.algo.objectives import OBJECTIVES
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import WEIGHTINGS

# -- The code in README.md does what README says of it -------------------------------------------


ROOT = Path(__file__).parents[3]
METHOD, OWN_TRAINER = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
)


def a_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    old = -3 * torch.rand(4, 9, dtype=torch.float64)
    return {
        "log_probs": (old + 0.3 * torch.randn_like(old)).clamp(max=0.0).requires_grad_(),
        "old_log_probs": old,
        "advantages": torch.randn(4, 1, dtype=torch.float64).expand(4, 9),
        "response_mask": (torch.arange(9) < torch.tensor([[9], [4], [7], [1]])).double(),
    }


def test_the_method_in_a_few_lines_is_the_loss_that_trains() -> None:
    names: dict[str, Any] = {}
    exec(METHOD, names)
    shown, real = a_batch(), a_batch()
    loss = names["grpo_sg_loss"](**shown)
    expected = policy_loss(**real, settings=LossSettings("grpo_sg", 0.2, 0.24)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(shown["log_probs"].grad, real["log_probs"].grad)


def test_the_loss_in_ones_own_trainer_runs() -> None:
    names: dict[str, Any] = dict(a_batch())
    exec(OWN_TRAINER, names)
    assert names["log_probs"].grad.abs().sum() > 0
    assert "weight_mean" in names["metrics"]


def test_the_numbers_of_weightings_and_objectives() -> None:
    words = {7: "seven", 15: "fifteen"}
    text = f"{words[len(WEIGHTINGS)]} token weightings, {words[len(OBJECTIVES)]} objectives"
    assert text in (ROOT / "README.md").read_text()


# -- Ten questions of a new user: README links the page, and its section has the answer ----------
# The search of the built site needs a browser. It lists the right page among its first three
# results for each question as it is written here, at the time of writing.


#: Question, page, heading of the section, and a part of the answer.
QUESTIONS = [
    ("how do I resume?", "docs/checkpoints.md", "Resume", "--run-dir runs/first"),
    ("where is the learning rate?", "docs/running.md", "Settings people change", "actor.adam.lr"),
    ("what does `sg/mismatch_kl` mean?", "docs/metrics.md", "Mismatch: sg/mismatch_kl and others",
     "sg/mismatch_kl_k3"),
    ("how do I use my own reward?", "docs/tutorials/3_first_domain.md", "3. Write a reward",
     "def reward_func"),
    ("does it fit on 4 x 40 GB?", "docs/gpu.md", "Does it fit?", "| 4x40gb |"),
    ("how is p computed?", "docs/method.md", "How p is computed", "under the current policy"),
    ("what differs from the paper?", "docs/method.md", "What differs from the paper", "Eq. 19"),
    ("how do I add a domain?", "docs/architecture.md", "Add a domain", "registry.py"),
    ("how do I compare two checkpoints?", "docs/evaluation.md", "Comparing two checkpoints",
     "--compare"),
    ("what runs on a GPU?", "docs/gpu.md", "What runs on a GPU", "Six of the eight stages"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "page", "heading", "answer"), QUESTIONS)
def test_the_page_answers(question: str, page: str, heading: str, answer: str) -> None:
    assert f"({page}" in (ROOT / "README.md").read_text(), f"README does not link {page}"
    sections = re.split(r"^#+ (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    (section,) = [
        text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name == heading
    ]
    assert answer in section, question
