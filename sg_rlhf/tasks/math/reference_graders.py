"""Graders of other projects, so that their published numbers can be compared.

| name | calls | from |
|---|---|---|
| `math_verify` | `verify(parse(gold), parse(response))`, as its README has it | the package |
| `hendrycks` | `is_equiv`: equal as normalised strings | hendrycks/math |
| `deepscaler` | `grade_answer_mathd` or `grade_answer_sympy` | zhyang2226/AR-Lopti |
| `qwen` | `math_equal` over `strip_string`, tolerance 1e-4 | QwenLM/Qwen2.5-Math |
| `verl` | `math_reward.compute_score`, verl's reward for MATH | volcengine/verl |

A grader's own file is loaded at one commit, checked by SHA-256; it is not part of this project.
`hendrycks` and `qwen` read no responses: they get the last box. latex2sympy2_extended stands in for
latex2sympy2, which `qwen` uses and needs an old antlr. All run in the confined processes of
`answers.pool`: they evaluate text that a model wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.pool import DEFAULT_WORKERS, WorkerPool
from sg_rlhf.tasks.math.answers.rules import Reason
from sg_rlhf.tasks.questions import cache_folder, check_online

#: Processor seconds for one response and all its golds; math-verify's own limit is 5 s.
LIMIT_S = 5.0

#: (response, gold) -> whether it is right.
Judge: TypeAlias = Callable[[str, str], bool]

_QWEN = ("QwenLM/Qwen2.5-Math", "a45202bd16f1ec06f433442dc1152d0074773465")


@dataclass(frozen=True)
class ReferenceGrader:
    """One grader: its files, the packages they import, and `load`, which a worker calls on them."""

    name: str
    files: tuple[Origin, ...]
    needs: tuple[str, ...]
    load: Callable[[Sequence[Any]], Judge]

    def identity(self) -> str:
        """What must be the same for the same verdicts: the package's version or the commit."""
        if not self.files:
            return f"math-verify {metadata.version('math-verify')}"
        return f"{self.files[0].repository}@{self.files[0].commit}"


def _math_verify(modules: Sequence[Any]) -> Judge:
    from math_verify import parse, verify  # type: ignore[import-untyped]

    return lambda response, gold: bool(
        verify(parse(f"${gold.strip().strip('$')}$"), parse(response))
    )


def _of_boxes(equal: Callable[[str, str], Any]) -> Judge:
    def judge(response: str, gold: str) -> bool:
        answer = last_box(response)
        return answer is not None and bool(equal(answer, gold.strip().strip("$")))

    return judge


def _deepscaler(modules: Sequence[Any]) -> Judge:
    utils = modules[0]

    def judge(response: str, gold: str) -> bool:
        # RewardMathFn.__call__, without its enum of rewards.
        parts = response.split("</think>")
        answer = utils.extract_answer(parts[1] if len(parts) > 1 else response)
        truth = utils.extract_answer(gold) if "\\boxed" in gold else gold
        if answer is None or truth is None:
            return False
        same = utils.grade_answer_mathd(answer, truth) or utils.grade_answer_sympy(answer, truth)
        return bool(same)

    return judge


def _qwen(modules: Sequence[Any]) -> Judge:
    grader, parser = modules

    def equal(answer: str, gold: str) -> bool:
        stripped = (parser.strip_string(text, skip_unit=False) for text in (answer, gold))
        return bool(grader.math_equal(*stripped))

    return _of_boxes(equal)


# fmt: off
GRADERS: Mapping[str, ReferenceGrader] = {
    grader.name: grader
    for grader in (
        ReferenceGrader("math_verify", (), ("math_verify",), _math_verify),
        ReferenceGrader("hendrycks", (Origin(
            "hendrycks/math", "985bdc1696e88e8643f081a0ff4719da39f2ae2a",
            "modeling/math_equivalence.py",
            sha256="c4101b1f51a2bb65665194aecd9f761d668c0c248a0350f196c2950e87488527",
        ),), (), lambda modules: _of_boxes(modules[0].is_equiv)),
        ReferenceGrader("deepscaler", (Origin(
            "zhyang2226/AR-Lopti", "cbeb333376decdfe571fa8613bdebcfcc526628d",
            "verl/utils/reward_score/rewards/math_utils/utils.py",
            sha256="9bdc85ecb9c9255c387c04df5ae2d9a858a44d169418f05c262b78d2c33c963b",
        ),), ("pylatexenc", "sympy"), _deepscaler),
        ReferenceGrader("qwen", (
            Origin(*_QWEN, "evaluation/grader.py",
                   sha256="ed9494a388e7117735fccf2985de6c444d5bdba4d493b425e92a91e9ab97742a"),
            Origin(*_QWEN, "evaluation/parser.py",
                   sha256="2bee38c8721c3c0ce120edd73de6ad5bf2e4aa7bf14b988f96aa1d590153e8fe"),
        ), ("regex", "sympy", "word2number", "latex2sympy2_extended"), _qwen),
        ReferenceGrader("verl", (Origin(
            "volcengine/verl", "b178a3cd56f58b2d502255daba591e92833930a7",
            "verl/utils/reward_score/math_reward.py",
            sha256="085eb67055c6976fea529d5ed9c8f0c63a989e85295d532db0d41fde8db50974",
        ),), (), lambda modules: lambda response, gold: bool(
            modules[0].compute_score(response, gold))),
    )
}
# fmt: on


def find_sources(names: Sequence[str], folder: Path | None) -> dict[str, list[Path]]:
    """The files of each named grader, under `folder` as OWNER/REPOSITORY/PATH, or downloaded.

    Raises:
        ValueError: a file is missing or not the pinned one, or a package is not installed.
    """
    found: dict[str, list[Path]] = {}
    for name in names:
        grader = GRADERS[name]
        for module in grader.needs:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"--grader {name} needs the package {module}")
        found[name] = [_find(origin, folder) for origin in grader.files]
    return found


def _find(origin: Origin, folder: Path | None) -> Path:
    path = (folder or cache_folder() / "graders") / origin.repository / origin.path
    if not path.is_file():
        if folder is not None:
            raise ValueError(f"{path}: no such file")
        check_online(path, "--grader-sources")
        download(origin, path.parent, path.name)
    origin.check(path)
    return path


class ReferenceGraders:
    """Verdicts of some graders (`find_sources`), by a pool of confined processes."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[Path]],
        workers: int = DEFAULT_WORKERS,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.names = tuple(sources)
        paths = {name: [str(path) for path in paths] for name, paths in sources.items()}
        self._pool = WorkerPool(workers, limit_s, f"{__name__}:_load", paths)

    def grade(
        self, pairs: Sequence[tuple[str, str | Sequence[str]]]
    ) -> list[dict[str, bool | None]]:
        """For each (response, references) each grader's verdict; None: none in time or memory."""
        waiting = [
            {
                name: self._pool.submit(
                    _grade, name, response, [given] if isinstance(given, str) else list(given)
                )
                for name in self.names
            }
            for response, given in pairs
        ]
        found = ({name: one.result() for name, one in row.items()} for row in waiting)
        return [
            {name: None if isinstance(v, Reason) else v for name, v in verdicts.items()}
            for verdicts in found
        ]

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()


_judges: dict[str, Judge] = {}


def _load(sources: Mapping[str, Sequence[str]]) -> None:
    """In a worker: load the graders' files."""
    if "qwen" in sources:
        sys.modules["latex2sympy2"] = importlib.import_module("latex2sympy2_extended.latex2sympy2")
        # parser.py imports everything of its neighbour; strip_string uses nothing of it.
        sys.modules["utils"] = types.ModuleType("utils")
    for name, paths in sources.items():
        modules = [_load_file(f"sg_rlhf_reference_{name}_{Path(p).stem}", p) for p in paths]
        _judges[name] = GRADERS[name].load(modules)
        # Parsers build their tables at the first formula.
        _grade(name, r"\boxed{\frac{x}{2}+1}", [r"\frac{x+2}{2}"])


def _load_file(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


def _grade(name: str, response: str, references: Sequence[str]) -> bool:
    """Whether any reference is met; a grader that raises says no, as its own harness has it."""
    return any(_is_met(_judges[name], response, reference) for reference in references)


def _is_met(judge: Judge, response: str, reference: str) -> bool:
    try:
        return judge(response, reference)
    except MemoryError:
        raise
    except Exception:
        return False
