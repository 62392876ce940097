"""All rules of the grader, in the order of their use. Imports sympy: not for trainers.

| table | a rule takes | and returns |
|---|---|---|
| `normalize.REWRITES`, `VALUES` | an answer or a reference answer | the same, in one spelling |
| `normalize.CANONICAL` | a normalised text | a text, for comparing texts |
| `normalize.EXACT` | answer, reference | a verdict, another pair, or None: undecided |
| `guards.GUARDS` | a normalised answer | the reason for rejecting it, or None |
| `lists.PARTS`, `ELEMENTS`, `GROUPS` | parts of a list | parts, elements |
| `lists.UNIONS`, `COMPARISONS` | two texts, two lists | a verdict or None |
| `symbols.SYMBOLS` | a single value | the same, with plain symbols |
| `symbolic.ALONE`, `TOGETHER` | sympy objects | a verdict or None |
"""

from __future__ import annotations

from sg_rlhf.tasks.math.answers import guards, lists, normalize, symbolic, symbols
from sg_rlhf.tasks.math.answers.rules import Rule

TABLES = (
    *((normalize, name) for name in ("REWRITES", "VALUES", "CANONICAL", "EXACT")),
    (guards, "GUARDS"),
    *((lists, name) for name in ("PARTS", "ELEMENTS", "GROUPS", "UNIONS", "COMPARISONS")),
    (symbols, "SYMBOLS"),
    (symbolic, "ALONE"),
    (symbolic, "TOGETHER"),
)
RULES: tuple[Rule, ...] = tuple(rule for module, name in TABLES for rule in getattr(module, name))
