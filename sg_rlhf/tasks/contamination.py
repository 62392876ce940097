"""Which models may have seen a benchmark's questions before: published studies, and dates.

What is said here is what somebody measured or dated; nothing is concluded from a model's scores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelFamily:
    """Models that share their pretraining data, known by a `pattern` of their names.

    Attributes:
        report: arXiv id of the technical report; its first version (of `month`) is newer.
    """

    name: str
    pattern: str
    report: str
    month: str


FAMILIES = (
    ModelFamily("Qwen2.5", r"qwen-?2\.5", "2412.15115", "2024-12"),
    ModelFamily("Qwen3", r"qwen-?3(?![.\d])", "2505.09388", "2025-05"),
    ModelFamily("Llama 3.1", r"llama-?3\.1", "2407.21783", "2024-07"),
)


def family_of(names: Iterable[str]) -> ModelFamily | None:
    """The family that one of a model's names is from, the first names first; None: unknown."""
    for name in names:
        for family in FAMILIES:
            if re.search(family.pattern, name.lower()):
                return family
    return None


@dataclass(frozen=True)
class Finding:
    """What a publication (`arxiv`) found of a family ("": models in general) and a set."""

    family: str
    found: bool
    finding: str
    arxiv: str

    def __str__(self) -> str:
        verdict = "signs of it" if self.found else "no sign of it"
        return f"{verdict} in {self.family or 'models'}: {self.finding} (arXiv {self.arxiv})"


@dataclass(frozen=True)
class ContaminationRecord:
    """Since when (YYYY-MM) a set's questions are public, and what was found about them."""

    published: str
    studies: tuple[Finding, ...] = ()
    note: str = ""

    def assess(self, family: ModelFamily | None) -> dict[str, Any]:
        """What `results.json` says of a model of this family.

        `verdict`: reported (a study found signs), newer (the set is newer than the model's
        report), not found (a study found none), not studied, model unknown.
        """
        told = [s for s in self.studies if family is None or s.family in ("", family.name)]
        of_family = [s for s in told if family is not None and s.family == family.name]
        if family is None:
            verdict = "model unknown"
        elif any(study.found for study in told):
            verdict = "reported"
        elif self.published > family.month:
            verdict = "newer"
        else:
            verdict = "not found" if of_family else "not studied"
        lines = [str(study) for study in told]
        if verdict == "newer" and family is not None:
            lines.append(
                f"public since {self.published}, after {family.name}'s report of {family.month} "
                f"(arXiv {family.report})"
            )
        else:
            lines.append(f"public since {self.published}")
        if self.note:
            lines.append(self.note)
        return {
            "verdict": verdict,
            "family": None if family is None else family.name,
            "published": self.published,
            "reported_for": list(dict.fromkeys(s.family or "models" for s in told if s.found)),
            "evidence": lines,
        }
