"""Code that a model brings with it: only of the models that the recipe names.

Upstream loads every configuration, tokenizer, model and engine with ``trust_remote_code=True``, so
that a file of a downloaded model runs with all that its user may do. Each of them gets it through
one function of transformers, which is where it is refused.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

from sg_rlhf.overlay.reporting.errors import ModelCodeError

#: The models whose code may run, as JSON, in the driver's and every worker's environment.
VARIABLE = "SG_TRUST_REMOTE_CODE"

#: A model's own `generate`, which no trainer calls.
GENERATE = "custom_generate/"


def trusted() -> list[str]:
    """The models whose code may run."""
    names: list[str] = json.loads(os.environ.get(VARIABLE) or "[]")
    return names


def trust_named_repos_only(original: Callable[..., str]) -> Callable[..., str]:
    """``get_cached_module_file``, through which transformers gets any code of a model.

    Raises:
        FileNotFoundError: it is the model's own ``generate``, as if there were none.
        ModelCodeError: nobody asked for that model's code; one line with the remedy.
    """

    @functools.wraps(original)
    def get_cached_module_file(
        pretrained_model_name_or_path: Any, module_file: str, *args: Any, **kwargs: Any
    ) -> str:
        name = str(pretrained_model_name_or_path)
        if name not in trusted() and module_file.startswith(GENERATE):
            # Asked for of every model, most of which have none.
            raise FileNotFoundError(f"{name}: {module_file} is not asked for by name")
        if name not in trusted():
            raise ModelCodeError(
                f"{name}: the model brings code of its own ({module_file}), which runs only for a "
                f"model that is asked for by name: sg.trust_remote_code="
                f"[{','.join([*trusted(), name])}]"
            )
        return original(pretrained_model_name_or_path, module_file, *args, **kwargs)

    return get_cached_module_file
