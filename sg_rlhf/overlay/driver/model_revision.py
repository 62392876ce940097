"""``sg.model_revision``: the commit of the hub from which a run's model is loaded.

Upstream, transformers and vLLM load a model by its id, without a revision, at more than ten places.
So the driver downloads the revision once, and all of them get its folder in the hub's cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sg_rlhf.common.text import single_line
from sg_rlhf.data_io import model_folder
from sg_rlhf.overlay.driver.arguments import UsageError

KEY = "sg.model_revision"
#: Formats that neither transformers nor vLLM loads here.
UNUSED = ["original/*", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]


def pin(args: argparse.Namespace) -> None:
    """Replace the model's id by the folder of its revision; download what is not in the cache.

    Args:
        args: upstream's nested namespace with ``sg``, changed in place.

    Raises:
        UsageError: the model is a folder, or the hub does not answer or know the revision.
    """
    revision, name = args.sg.model_revision, args.actor.model_name_or_path
    if not revision:
        return
    if Path(name).is_dir() or not model_folder.is_hub_id(name):
        raise UsageError(
            f"{KEY}={revision}: actor.model_name_or_path={name} is a folder, which has no "
            "revisions; give an id of the hub"
        )
    # Imported here: it takes a second, and only this setting needs it.
    from huggingface_hub import constants, snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            ignore_patterns=UNUSED,
            local_files_only=constants.HF_HUB_OFFLINE,
        )
        model_folder.check(Path(folder), trusted=name in args.sg.trust_remote_code)
    except (OSError, ValueError, model_folder.ModelError) as error:
        raise UsageError(
            f"{KEY}={revision}: {name}: {single_line(error)}; "
            f"https://huggingface.co/{name}/commits/main has its commits"
        ) from None
    if name in args.sg.trust_remote_code:
        args.sg.trust_remote_code.append(folder)
    args.actor.model_name_or_path = folder
