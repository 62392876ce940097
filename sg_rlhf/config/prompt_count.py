"""How many training prompts a recipe has, counted in its files."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.config.recipe import Config


def count_prompts(config: Config) -> int | None:
    """Prompts of an epoch: rows of the local files, at most ``data.max_samples``.

    Returns:
        None if a file is not here or of another format, or if ``data.prompt_probs`` repeats files.
    """
    names = str(config.value("data.prompt_dataset") or "").split(",")
    counts = [_count_rows(Path(name.strip())) for name in names]
    if None in counts or config.value("data.prompt_probs"):
        return None
    return min(int(config.value("data.max_samples")), sum(filter(None, counts)))


def _count_rows(path: Path) -> int | None:
    """Rows of a local JSONL or Parquet file; None for any other name."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    if path.suffix == ".parquet" and path.is_file():
        from pyarrow import parquet

        return int(parquet.read_metadata(path).num_rows)
    return None
