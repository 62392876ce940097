"""Commands that make the data of the shipped recipes."""

from __future__ import annotations

import shlex
from pathlib import Path

from sg_rlhf.config import Config

PUZZLES = "--generate people=3-7 per_size=900 test_per_size=100 seed=0"
_MISTRAL, _LLAMA = "mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct"
_PUBLISHED = "--eval-dir data/math_eval --download-eval"
_DATA_FILES = {".json", ".jsonl", ".parquet", ".csv"}

#: Folder of ``data.prompt_dataset`` -> arguments of the data command. The questions and the corpus
#: of the search recipes for GPUs are left to the user.
COMMANDS = {
    folder: f"{words.split()[0]} --out {folder} {words.split(maxsplit=1)[1]}"
    for folder, words in {
        "data/kk": f"kk {PUZZLES}",
        "data/kk_mistral-7b-instruct-v0.3": f"kk {PUZZLES} --chat-template {_MISTRAL}",
        "data/kk_llama-3.1-8b-instruct": f"kk {PUZZLES} --chat-template {_LLAMA}",
        "data/kk_tiny": "kk --generate people=2-3 per_size=160 test_per_size=100 seed=0"
        " distinct=names",
        "data/math_dsr": f"math --source dsr_uniform {_PUBLISHED}",
        "data/math_orz": f"math --source orz57k {_PUBLISHED}",
        "data/arithmetic": "arithmetic --generate count=160",
        "data/search_tiny": "search --source encyclopedia --generate people=200 towns=48 seed=0",
        "data/math_tiny": "math --source arithmetic --generate count=320 test_count=200 seed=0",
    }.items()
}


def command_for(config: Config) -> str:
    """Shell command that makes missing training data; "" if none is known."""
    files = local_data(config)
    made = COMMANDS.get(str(Path(files[0]).parent)) if files else None
    if made is None:
        return ""
    return f"[ -e {shlex.quote(files[0])} ] || sg-rlhf data {made}"


def local_data(config: Config) -> tuple[str, ...]:
    """Local data files of a recipe, training prompts first; other names are ids of the hub."""
    named = [config.value("data.prompt_dataset"), config.value("eval.dataset")]
    named += [one.dataset for one in config.sg.eval_sets]
    names = [name.strip() for given in named for name in str(given or "").split(",")]
    return tuple(dict.fromkeys(name for name in names if Path(name).suffix in _DATA_FILES))
