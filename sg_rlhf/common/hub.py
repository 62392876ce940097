"""Files of data sets on the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from sg_rlhf.common.rows import DataError, one_line


def download_from_hub(repository: str, file: str, revision: str) -> Path:
    """A file of a data set on the Hugging Face hub at one commit, from the hub's cache if there.

    Args:
        revision: the full commit hash; a branch or a tag can move and is refused.

    Raises:
        DataError: not a commit hash, or the hub does not give the file.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise DataError(
            f"--revision {revision}: expected the 40 hex digits of a commit "
            f"(https://huggingface.co/datasets/{repository}/commits/main)"
        )
    # Takes a second to import, and only this source needs it.
    from huggingface_hub import hf_hub_download

    # Its retries come as warnings of two lines each; what failed in the end is our one line.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        path = hf_hub_download(repository, file, repo_type="dataset", revision=revision)
    except (OSError, ValueError) as error:
        raise DataError(
            f"hub:{repository}:{file} at {revision}: {one_line(error)}; "
            "or get the file by hand and give its path as --source"
        ) from None
    return Path(path)
