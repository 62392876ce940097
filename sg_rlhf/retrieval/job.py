"""What an index is built of: the flags of `python -m sg_rlhf.retrieval.index`.

And the files of an unfinished build of vectors, in `DIR.partial`:

    plan.json       what is built: another corpus, encoder or precision is refused
    vectors.faiss   the vectors, chunk by chunk; done: a byte for each chunk, 1 if it is there
    spec.json       the index that is made of them; another kind may be made of the same vectors
    index.faiss     that index, when it is whole; trained.faiss, lists.i32, graph.faiss: its parts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sg_rlhf.common.index_sizes import Precision
from sg_rlhf.retrieval import manifest

PLAN, SPEC, VECTORS, DONE = "plan.json", "spec.json", "vectors.faiss", "done"
TRAINED, LISTS, GRAPH = "trained.faiss", "lists.i32", "graph.faiss"
PARTS = (TRAINED, LISTS, GRAPH)
#: What a killed build leaves for the next.
KEPT = (PLAN, SPEC, VECTORS, DONE, manifest.OFFSETS, manifest.FAISS, *PARTS)


@dataclass(frozen=True)
class Build:
    """What to build; the fields are the command's flags."""

    corpus: Path
    encoder: str
    out: Path
    type: str | None = None
    analysis: str | None = None
    vectors: Precision | None = None
    build: Mapping[str, int] = field(default_factory=dict)
    search: Mapping[str, int] = field(default_factory=dict)
    revision: str | None = None
    max_length: int = 256
    encoder_dtype: str = "auto"
    batch_size: int | None = None
    shard_rows: int = 16_384
    device: str | None = None
    workers: int | None = None
    dry_run: bool = False
    skip_room_check: bool = False
    force: bool = False
    restart: bool = False
    progress: bool = True

    @property
    def partial(self) -> Path:
        """The folder of the unfinished index."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def has_vectors(self) -> bool:
        """Whether an unfinished build has vectors that another start can use."""
        done = self.partial / DONE
        return done.exists() and b"\1" in done.read_bytes()
