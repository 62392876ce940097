"""Other people's rules for the same question, so that a number of theirs can be compared.

| name | rule | from |
|---|---|---|
| `math_verify` | `verify(parse(gold), parse(response))`, as its README has it | the package |
| `hendrycks` | `is_equiv`: equal as normalised strings | hendrycks/math |
| `deepscaler` | `grade_answer_mathd` or `grade_answer_sympy` | zhyang2226/AR-Lopti |
| `qwen` | `math_equal` over `strip_string`, tolerance 1e-4 | QwenLM/Qwen2.5-Math |
| `verl` | `math_reward.compute_score`, verl's reward for MATH | volcengine/verl |

Where there is no package the rule's own file is loaded, at one commit and checked by SHA-256; it is
not part of this project. `hendrycks` and `qwen` compare answers and read no responses: they get the
last box, as ours does. `qwen` parses with latex2sympy2, which needs an old antlr;
latex2sympy2_extended, its successor, stands in for it, so a formula that only one of the two reads
may be judged otherwise than in a Qwen table.

These rules evaluate text that a model wrote, so they run in confined processes (`sandbox`) with
a limit of time. No verdict is given (None) for what runs out of time or memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from pebble import ProcessPool

from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.tasks.math.answers import sandbox
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.questions import cache_folder, check_online

#: Processor seconds for one response and all its golds; math-verify's own limit is 5 s.
LIMIT_S = 5.0
WALL_FACTOR = 10.0
WORKERS = 2

#: (response, gold) -> whether it is right.
Judge: TypeAlias = Callable[[str, str], bool]

_HENDRYCKS = Origin(
    "hendrycks/math",
    "985bdc1696e88e8643f081a0ff4719da39f2ae2a",
    "modeling/math_equivalence.py",
    sha256="c4101b1f51a2bb65665194aecd9f761d668c0c248a0350f196c2950e87488527",
)
_DEEPSCALER = Origin(
    "zhyang2226/AR-Lopti",
    "cbeb333376decdfe571fa8613bdebcfcc526628d",
    "verl/utils/reward_score/rewards/math_utils/utils.py",
    sha256="9bdc85ecb9c9255c387c04df5ae2d9a858a44d169418f05c262b78d2c33c963b",
)
_QWEN_GRADER = Origin(
    "QwenLM/Qwen2.5-Math",
    "a45202bd16f1ec06f433442dc1152d0074773465",
    "evaluation/grader.py",
    sha256="ed9494a388e7117735fccf2985de6c444d5bdba4d493b425e92a91e9ab97742a",
)
_QWEN_PARSER = Origin(
    "QwenLM/Qwen2.5-Math",
    "a45202bd16f1ec06f433442dc1152d0074773465",
    "evaluation/parser.py",
    sha256="2bee38c8721c3c0ce120edd73de6ad5bf2e4aa7bf14b988f96aa1d590153e8fe",
)
_VERL = Origin(
    "volcengine/verl",
    "b178a3cd56f58b2d502255daba591e92833930a7",
    "verl/utils/reward_score/math_reward.py",
    sha256="085eb67055c6976fea529d5ed9c8f0c63a989e85295d532db0d41fde8db50974",
)


@dataclass(frozen=True)
class Rule:
    """One grader: its files, the packages that these import, and how they are called.

    Attributes:
        load: modules of the files, in order -> the judge; called in a worker.
    """

    name: str
    files: tuple[Origin, ...]
    needs: tuple[str, ...]
    load: Callable[[Sequence[Any]], Judge]

    def identity(self) -> str:
        """What must be the same for the same verdicts: the package's version or the commit."""
        if not self.files:
            return f"math-verify {metadata.version('math-verify')}"
        return f"{self.files[0].repository}@{self.files[0].commit}"


def _load_math_verify(modules: Sequence[Any]) -> Judge:
    from math_verify import parse, verify  # type: ignore[import-untyped]

    return lambda response, gold: bool(
        verify(parse(f"${gold.strip().strip('$')}$"), parse(response))
    )


def _of_boxes(equal: Callable[[str, str], Any]) -> Judge:
    def judge(response: str, gold: str) -> bool:
        answer = last_box(response)
        return answer is not None and bool(equal(answer, gold.strip().strip("$")))

    return judge


def _load_hendrycks(modules: Sequence[Any]) -> Judge:
    return _of_boxes(modules[0].is_equiv)


def _load_deepscaler(modules: Sequence[Any]) -> Judge:
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


def _load_qwen(modules: Sequence[Any]) -> Judge:
    grader, parser = modules

    def equal(answer: str, gold: str) -> bool:
        tidied = (parser.strip_string(text, skip_unit=False) for text in (answer, gold))
        return bool(grader.math_equal(*tidied))

    return _of_boxes(equal)


def _load_verl(modules: Sequence[Any]) -> Judge:
    return lambda response, gold: bool(modules[0].compute_score(response, gold))


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("math_verify", (), ("math_verify",), _load_math_verify),
        Rule("hendrycks", (_HENDRYCKS,), (), _load_hendrycks),
        Rule("deepscaler", (_DEEPSCALER,), ("pylatexenc", "sympy"), _load_deepscaler),
        Rule(
            "qwen",
            (_QWEN_GRADER, _QWEN_PARSER),
            ("regex", "sympy", "word2number", "latex2sympy2_extended"),
            _load_qwen,
        ),
        Rule("verl", (_VERL,), (), _load_verl),
    )
}


def find_sources(names: Sequence[str], folder: Path | None) -> dict[str, list[Path]]:
    """Each rule's files.

    Args:
        names: of `RULES`.
        folder: holds the files as OWNER/REPOSITORY/PATH; None: they are downloaded.

    Raises:
        ValueError: a file is missing, another one than pinned, or cannot be downloaded; or a
            package that a rule imports is not installed.
    """
    found: dict[str, list[Path]] = {}
    for name in names:
        rule = RULES[name]
        for module in rule.needs:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"--grader {name} needs the package {module}")
        found[name] = [_find(origin, folder) for origin in rule.files]
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


class OtherGraders:
    """Verdicts of some rules, by a pool of confined processes.

    Args:
        sources: as `find_sources` gives them.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Path]],
        workers: int = WORKERS,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.names = tuple(sources)
        self._limit_s = limit_s
        self._pool = ProcessPool(
            max_workers=workers,
            initializer=_start_worker,
            initargs=({name: list(paths) for name, paths in sources.items()},),
            context=multiprocessing.get_context("spawn"),
        )

    def judge(
        self, pairs: Sequence[tuple[str, str | Sequence[str]]]
    ) -> list[dict[str, bool | None]]:
        """For each (response, golds) each rule's verdict; None where it gave none in time."""
        waiting = [
            {
                name: self._pool.schedule(
                    _judge,
                    args=(name, response, [golds] if isinstance(golds, str) else list(golds)),
                    kwargs={"limit_s": self._limit_s},
                    timeout=WALL_FACTOR * self._limit_s,
                )
                for name in self.names
            }
            for response, golds in pairs
        ]
        return [{name: _verdict(f) for name, f in futures.items()} for futures in waiting]

    def close(self) -> None:
        """Stop the workers."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _verdict(future: Any) -> bool | None:
    # It ran out of time, or its process was ended; what else goes wrong `_judge` answers.
    return None if future.exception() is not None else future.result()


_judges: dict[str, Judge] = {}


def _start_worker(sources: Mapping[str, Sequence[Path]]) -> None:
    """Load the rules, and give up what they do not need."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    if "qwen" in sources:
        sys.modules["latex2sympy2"] = importlib.import_module("latex2sympy2_extended.latex2sympy2")
        # parser.py imports everything of its neighbour; strip_string uses nothing of it.
        sys.modules["utils"] = types.ModuleType("utils")
    for name, paths in sources.items():
        modules = [_load_file(f"sg_rlhf_other_{name}_{path.stem}", path) for path in paths]
        _judges[name] = RULES[name].load(modules)
        # Parsers build their tables at the first formula.
        _judge(name, r"\boxed{\frac{x}{2}+1}", [r"\frac{x+2}{2}"], limit_s=60.0)
    sandbox.enter_sandbox()


def _load_file(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


def _judge(name: str, response: str, golds: Sequence[str], limit_s: float) -> bool | None:
    """Whether any gold is met; a rule that raises says no, as its own harness has it."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return any(_met(_judges[name], response, gold) for gold in golds)
    except MemoryError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _met(judge: Judge, response: str, gold: str) -> bool:
    try:
        return judge(response, gold)
    except MemoryError:
        raise
    except Exception:
        return False
