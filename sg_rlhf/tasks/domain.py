"""A domain: what training, data, evaluation and the tiny models need of one kind of problem.

`sg_rlhf.tasks.registry` names it. docs/tutorials/3_first_domain.md writes one.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sg_rlhf.common.text import single_line
from sg_rlhf.tasks.grade import Grader

if TYPE_CHECKING:
    from sg_rlhf.tasks.data_source import DataSource
    from sg_rlhf.tasks.rollout import Environment
    from sg_rlhf.tasks.settings import DomainSettings
    from sg_rlhf.tasks.suite import Suite
    from sg_rlhf.tasks.tiny import TinyModel

Part = TypeVar("Part")


@dataclass(frozen=True)
class Domain:
    """One kind of problem.

    A part is the object itself, or "package.module:NAME" of it where importing it takes time:
    listing domains then costs nothing. `load` gives it either way.

    Attributes:
        name: of its data command, its tiny model and its section of a recipe.
        title: one line for people.
        grade: the reward's grader; light to import, for it is loaded in every rollout engine. A
            recipe names it as `reward.remote_url: domain:NAME`.
        graders: other graders by name: `domain:NAME/GRADER`.
        data: `sg-rlhf data NAME`.
        settings: of the recipe's section `sg.NAME`, for a domain that has one.
        check: called with these settings before Ray starts; a `ValueError` says in one line what a
            run needs and does not find.
        suite: `sg-rlhf eval --suite ...`.
        tiny: what `sg-rlhf tiny --domain NAME` trains on.
        environment: of a domain of several turns; a class, made with the domain's settings. A
            recipe names it as `train.agent_func_path: domain:NAME`. None: one response per prompt.
        source_titles: pattern of a row's `datasource` -> its name in figures, with the pattern's
            groups as \\1, \\2 and so on.
    """

    name: str
    title: str
    grade: Grader
    data: DataSource[Any] | str | None = None
    settings: type[DomainSettings] | str | None = None
    check: Callable[[Any], None] | str | None = None
    suite: Suite | str | None = None
    tiny: TinyModel[Any] | str | None = None
    environment: type[Environment] | str | None = None
    source_titles: Mapping[str, str] = field(default_factory=dict)
    graders: Mapping[str, Grader] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # It is part of recipe keys and of a variable's name.
        if not self.name.isidentifier():
            raise ValueError(f"domain {self.name!r}: expected a name of letters, digits and _")


def load(part: Part | str) -> Part:
    """A part of a domain, imported if it is given by name; else a `ValueError`."""
    if not isinstance(part, str):
        return part
    module, colon, name = part.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{part!r}: expected package.module:NAME")
    try:
        found = vars(importlib.import_module(module)).get(name)
    except ModuleNotFoundError as error:
        # Another module that is missing inside of it is not a wrong name.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{part}: no module {error.name}") from None
    except Exception as error:  # a user's module raises anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"
        reason = single_line(error)
        raise ValueError(f"{part}: {type(error).__name__}: {reason}{place}") from error
    if found is None:
        raise ValueError(f"{part}: no {name} in {module}")
    return cast(Part, found)
