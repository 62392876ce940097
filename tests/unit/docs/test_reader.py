"""Ten questions of a new user: README links the page, and its section has the answer.

The search of the built site needs a browser. It lists the right page among its first three results
for each question as it is written here, at the time of writing.
"""

from __future__ import annotations

import re

import pytest

from tests.unit.docs.page import ROOT

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
    ("what runs on a GPU?", "docs/gpu.md", "What runs on a GPU", "Seven of the eight stages"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "page", "heading", "answer"), QUESTIONS)
def test_the_page_answers(question: str, page: str, heading: str, answer: str) -> None:
    assert f"({page}" in (ROOT / "README.md").read_text(), f"README does not link {page}"
    sections = re.split(r"^#+ (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    (section,) = [
        text for name, text in zip(sections[1::2], sections[2::2], strict=True) if name == heading
    ]
    assert answer in section, question
