"""Which responses count as garbled."""

from __future__ import annotations

import pytest

from sg_rlhf.overlay.controller.rollout_stats import mixed_script_frac


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A plain answer: 42.",
        "naïve café, 1 µs, ½, x² ≤ π·α",
        "Ответ: x = 2, see Theorem 3",
        "答案是 x = 2 (π/4), ＡＢＣ",
        "日本語のテキストとカタカナー、ﾊﾝｶｸ",
        "한국어 문장 (漢字)",
        "ㄅㄆㄇ 注音",
        "𝑥 + 𝒚 ∈ ℝ, ℓ² — 😀 \ufffd",
    ],
)
def test_one_script_beside_latin_is_no_mixture(text: str) -> None:
    assert mixed_script_frac([text]) == 0.0


@pytest.mark.parametrize("text", ["the ответ 答案", "한국어 と", "سلام שלום", "aжé한", "ไทย देव"])
def test_several_scripts_are_a_mixture(text: str) -> None:
    assert mixed_script_frac([text]) == 1.0


def test_the_share_is_of_texts() -> None:
    assert mixed_script_frac(["plain", "ж한", "ж", "한"]) == 0.25
    assert mixed_script_frac([]) == 0.0
