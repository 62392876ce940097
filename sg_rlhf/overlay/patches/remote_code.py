"""Runs a model's own code only if the recipe names the model (``sg.trust_remote_code``).

Upstream loads everything with ``trust_remote_code=True``: a file of a downloaded model would run
with all rights of the user. All such files come through one function of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sg_rlhf.overlay.reporting.errors import ModelCodeError
from sg_rlhf.overlay.settings import worker_settings

#: Folder of a model's own ``generate``, which no trainer calls.
GENERATE = "custom_generate/"


def trust_named_repos_only(original: Callable[..., str]) -> Callable[..., str]:
    """Wrap ``get_cached_module_file``; it raises for a model that the recipe does not name:

    FileNotFoundError for the model's own ``generate``, as if it had none, else ModelCodeError.
    """

    @functools.wraps(original)
    def get_cached_module_file(
        pretrained_model_name_or_path: Any, module_file: str, *args: Any, **kwargs: Any
    ) -> str:
        name = str(pretrained_model_name_or_path)
        trusted = worker_settings.current().trusted_models
        if name in trusted:
            return original(pretrained_model_name_or_path, module_file, *args, **kwargs)
        if module_file.startswith(GENERATE):
            # transformers looks for this file in every model. Most have none.
            raise FileNotFoundError(f"{name}: {module_file} is not in sg.trust_remote_code")
        raise ModelCodeError(
            f"{name}: the model contains its own code ({module_file}), which runs only for "
            f"models that you name: sg.trust_remote_code="
            f"[{','.join([*trusted, name])}]"
        )

    return get_cached_module_file
