"""Download files of data sets from the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from sg_rlhf.common import resources
from sg_rlhf.common.text import single_line
from sg_rlhf.data_io.records import DataError


def download_from_hub(
    repository: str,
    file: str,
    revision: str,
    *,
    skip_room_check: bool = False,
) -> Path:
    """Get a file of a data set at one commit, from the hub's cache or by download.

    Args:
        revision: the full commit hash; branches and tags can move and are refused.
        skip_room_check: do not check that the cache's disk has enough space.

    Raises:
        DataError: not a commit hash, or the hub does not give the file.
        ValueError: the cache's disk cannot hold it; nothing was downloaded.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise DataError(
            f"--revision {revision}: expected the 40 hex digits of a commit "
            f"(https://huggingface.co/datasets/{repository}/commits/main)"
        )
    # Imported here: it takes a second, and only this source needs it.
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub import try_to_load_from_cache as in_cache

    # Hides its warning about each retry; a final failure is our one line.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if isinstance(in_cache(repository, file, repo_type="dataset", revision=revision), str):
        skip_room_check = True
    try:
        if not skip_room_check:
            url = hf_hub_url(repository, file, repo_type="dataset", revision=revision)
            size = get_hf_file_metadata(url).size or 0
            cache = Path(constants.HF_HUB_CACHE)
            resources.check_disk("HF_HUB_CACHE", cache, f"the download of {file}", size)
        path = hf_hub_download(repository, file, repo_type="dataset", revision=revision)
    except resources.InsufficientSpace:
        raise
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise DataError(
            f"hub:{repository}:{file} at {revision}: {single_line(error)}; "
            "or get the file by hand and give its path as --source"
        ) from None
    return Path(path)
