"""The grader without one of its rules, for a worker of the pool."""

from contextlib import ExitStack
from unittest import mock

from sg_rlhf.tasks.math.answers import lists, normalize
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.compare import TABLES, compare_with_any
from sg_rlhf.tasks.math.answers.rules import Reason
from sg_rlhf.tasks.math.grading import decide


def reason_without(name: str, answer: str, reference: str) -> Reason:
    """The reason of the verdict on an answer in a box."""
    try:
        with ExitStack() as stack:
            for module, table in TABLES:
                rules = tuple(rule for rule in getattr(module, table) if rule.name != name)
                stack.enter_context(mock.patch.object(module, table, rules))
            _forget()
            found = decide(last_box(f"\\boxed{{{answer}}}"), (reference,))
            return found if isinstance(found, Reason) else compare_with_any(*found)
    finally:
        _forget()


def _forget() -> None:
    for module in (normalize, lists):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
