"""Reading the cases out of other graders' test files: as syntax, so that none of it is run.

Where a file tests the same thing with another function, the case is what it says about equality:

| form in the file | the case |
|---|---|
| `parametrize("gold, pred, expected", [...])` over a test | each tuple |
| `parametrize("given,gt", [...])` over `assert grade_answer(given, gt) is True` | each tuple |
| `assert grade_answer("...", "...") is True` | the pair |
| unittest: `test_in = ...; test_out = ...; self.assertTrue(is_equiv(...))` | the pair |
| a list of objects with `output`, `target`, `expected` | each object |
| Qwen2.5-Math: commented `pred = ..., gt = ...` | the pair; it states no expectation |
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sg_rlhf.tasks.math.answers.boxed import last_box

GOLD_NAMES = ("gold", "gt")
ANSWER_NAMES = ("pred", "given")
VERDICT_NAMES = ("expected", "result")
#: Functions that say whether an answer is right, by the order of their arguments.
ANSWER_FIRST = ("grade_answer", "grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl")
_MATH = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$((?:\\.|[^$])+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL
)


@dataclass(frozen=True)
class Case:
    """Whether an answer is right, in a suite's opinion.

    Attributes:
        expected: None where the suite states none.
    """

    suite: str
    where: str
    gold: str
    answer: str
    expected: bool | None

    @property
    def key(self) -> str:
        """Ten hex digits that name the texts, for the table of verdicts."""
        return hashlib.sha256(f"{self.gold}\0{self.answer}".encode()).hexdigest()[:10]

    @property
    def response(self) -> str:
        """As our grader takes it: the one formula of an answer without a box stands in a box.

        Prose with no formula or several stays as it is: where in it a grader should look is
        another question than whether two answers are equal.
        """
        if "\\boxed" in self.answer:
            return self.answer
        inner = the_formula(self.answer)
        return self.answer if inner is None else rf"\boxed{{{inner}}}"

    @property
    def truth(self) -> str:
        """The gold as our data have it: no dollar signs, box or words around it."""
        if self.gold.count("\\boxed") == 1:
            return last_box(self.gold) or self.gold
        return the_formula(self.gold) or self.gold


def the_formula(text: str) -> str | None:
    """The only formula of a text; the text itself where it is one; None for prose."""
    formulas = [match for match in _MATH.finditer(text) if any(match.groups())]
    if len(formulas) == 1:
        return next(part for part in formulas[0].groups() if part)
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\text\{[^}]*\}", "", text))
    return None if formulas or len(words) > 2 else text


def read(suite: str, paths: list[Path]) -> list[Case]:
    """Every case of a suite, each pair of texts once."""
    found: dict[tuple[str, str], Case] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            cases = _json_cases(suite, path.name, text)
        elif suite == "qwen":
            cases = _commented(suite, path.name, text)
        else:
            cases = _syntax(suite, path.name, ast.parse(text))
        for case in cases:
            found.setdefault((case.gold, case.answer), case)
    return list(found.values())


def _json_cases(suite: str, name: str, text: str) -> Iterator[Case]:
    for number, row in enumerate(json.loads(text)):
        yield Case(suite, f"{name} {number}", row["target"], row["output"], row["expected"] == "C")


def _commented(suite: str, name: str, text: str) -> Iterator[Case]:
    """`_test_math_equal`: what is tried stands there as assignments, most of them in comments."""
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines.append((token.start[0], token.string.lstrip("# ")))
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == "_test_math_equal":
            lines += [(child.lineno, ast.unparse(child)) for child in node.body]
    held: dict[str, str] = {}
    for number, line in lines:
        try:
            # Two of them stand on one line with a comma between.
            body = ast.parse(line.replace("', gt =", "'; gt =")).body
        except SyntaxError:
            continue
        for node in body:
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and _name(call) == "print" and call.args:
                call = call.args[0]
            if isinstance(call, ast.Call) and _name(call) == "math_equal":
                texts = [a.value for a in call.args if isinstance(a, ast.Constant)]
                if len(texts) == 2:
                    yield Case(suite, f"{name}:{number}", str(texts[1]), str(texts[0]), None)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                held[ast.unparse(node.targets[0])] = str(node.value.value)
                if {"pred", "gt"} <= held.keys():
                    yield Case(suite, f"{name}:{number}", held.pop("gt"), held.pop("pred"), None)


def _syntax(suite: str, name: str, tree: ast.Module) -> Iterator[Case]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            place = f"{name}:{node.lineno}"
            verdict = _asserted(node)
            for names, rows in _parameters(node):
                for values in rows:
                    row = dict(zip(names, values, strict=True))
                    gold = next((row[n] for n in GOLD_NAMES if n in row), None)
                    answer = next((row[n] for n in ANSWER_NAMES if n in row), None)
                    due = next((row[n] for n in VERDICT_NAMES if n in row), verdict)
                    texts = isinstance(gold, str) and isinstance(answer, str)
                    if texts and due in (0, 1):
                        yield Case(suite, place, str(gold), str(answer), bool(due))
            yield from _direct(suite, place, node)


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[list[str], list[tuple[object, ...]]]]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and _name(decorator) == "parametrize":
            named, table = decorator.args[:2]
            names = [part.strip() for part in str(ast.literal_eval(named)).split(",")]
            rows = []
            for element in getattr(table, "elts", []):
                try:
                    row = ast.literal_eval(element)
                except ValueError:  # objects of theirs
                    continue
                if isinstance(row, tuple) and len(row) == len(names):
                    rows.append(row)
            yield names, rows


def _asserted(function: ast.FunctionDef) -> bool | None:
    """True for a function whose only assertion is `... is True`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            right = node.test.comparators[0]
            if isinstance(node.test.ops[0], ast.Is) and isinstance(right, ast.Constant):
                return bool(right.value)
    return None


def _direct(suite: str, place: str, function: ast.FunctionDef) -> Iterator[Case]:
    local: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            local[ast.unparse(node.targets[0])] = str(node.value.value)
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            call, right = node.test.left, node.test.comparators[0]
            known = isinstance(call, ast.Call) and _name(call) in ANSWER_FIRST
            if known and isinstance(call, ast.Call) and isinstance(right, ast.Constant):
                texts = [a.value for a in call.args if isinstance(a, ast.Constant)]
                if len(texts) == 2 and all(isinstance(t, str) and t for t in texts):
                    yield Case(suite, place, str(texts[1]), str(texts[0]), bool(right.value))
        asserts = isinstance(node, ast.Call) and _name(node) in ("assertTrue", "assertFalse")
        if asserts and isinstance(node, ast.Call) and {"test_in", "test_out"} <= local.keys():
            due = _name(node) == "assertTrue"
            yield Case(suite, place, local["test_out"], local["test_in"], due)


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
