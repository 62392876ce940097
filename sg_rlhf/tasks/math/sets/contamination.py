"""What is published about the mathematics sets and the models that have seen them.

The figures of arXiv 2507.10532 (version 3) are from its Tables 2 and 9: greedy, without a chat
template, the share of problems whose last 40 % the model writes word for word from the first 60 %.
"""

from __future__ import annotations

from collections.abc import Mapping

from sg_rlhf.tasks.contamination import ContaminationRecord, Finding

_WORD_FOR_WORD = "2507.10532"


def _completed(family: str, found: bool, **shares: float) -> Finding:
    """A study of word-for-word completion; shares in per cent by model."""
    listed = ", ".join(f"{model.replace('_', '-')} {share:g} %" for model, share in shares.items())
    finding = f"{listed} of the problems completed word for word from their first 60 %"
    return Finding(family, found, finding, _WORD_FOR_WORD)


def _findings(
    found: bool, qwen25: tuple[float, float], qwen3: tuple[float, float], llama: float
) -> tuple[Finding, ...]:
    return (
        _completed("Qwen2.5", found, **{"Qwen2.5_7B": qwen25[0], "Qwen2.5_Math_7B": qwen25[1]}),
        _completed("Qwen3", found, Qwen3_8B_Base=qwen3[0], Qwen3_14B_Base=qwen3[1]),
        _completed("Llama 3.1", False, **{"Llama3.1_8B": llama}),
    )


_AMC = _findings(True, (33.73, 42.17), (40.96, 48.19), 0)
_AIME24 = Finding(
    "", True, "scores above what the same models reach on newer competitions", "2505.23281"
)

EXPOSURE: Mapping[str, ContaminationRecord] = {
    "olympiadbench": ContaminationRecord("2024-02"),
    "minerva": ContaminationRecord("2022-06", _findings(False, (0.37, 0.37), (0, 0.37), 0)),
    "math500": ContaminationRecord("2021-03", _findings(True, (21.2, 54.6), (32, 43.6), 3.8)),
    "amc": ContaminationRecord("2023-11", _AMC),
    "aime": ContaminationRecord(
        "2024-02", (*_findings(True, (13.33, 20), (23.33, 33.33), 0), _AIME24)
    ),
    "aime25": ContaminationRecord("2025-02", _findings(False, (0, 0), (0, 0), 0)),
    "aime26": ContaminationRecord("2026-02"),
    "hmmt25": ContaminationRecord("2025-02"),
    "hmmt25_nov": ContaminationRecord("2025-11"),
    "hmmt26": ContaminationRecord("2026-02"),
    "imo_answerbench": ContaminationRecord(
        "2025-10", note="its problems are altered from olympiads that are older"
    ),
    "amc23": ContaminationRecord(
        "2023-11", _AMC, "the study is of the 83 problems, of which these 40 are a part"
    ),
}
