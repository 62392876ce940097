"""What an index is built of: the flags of `python -m sg_rlhf.retrieval.index`.

And the files of an unfinished build, in `DIR.partial`:

    plan.json       what is built: another corpus, encoder or precision is refused
    split           of bm25: the corpus as words (`postings`)
    vectors.faiss   the vectors, chunk by chunk; done: a byte for each chunk, 1 if it is there
    spec.json       the index that is made of them; another kind may be made of the same vectors
    index.faiss     that index, when it is whole
    sample.faiss    what lists learn from; centres.npz: what they have learnt; trained.faiss,
                    lists.i32, graph.faiss: parts of the index
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sg_rlhf.common.index_sizes import Precision
from sg_rlhf.retrieval import manifest

PLAN, SPLIT = "plan.json", "split"
#: In that folder: what is whole.
SHARDS = "shards.json"
SPEC, VECTORS, DONE = "spec.json", "vectors.faiss", "done"
SAMPLE, CENTRES = "sample.faiss", "centres.npz"
TRAINED, LISTS, GRAPH = "trained.faiss", "lists.i32", "graph.faiss"
PARTS = (SAMPLE, CENTRES, TRAINED, LISTS, GRAPH)
#: What a killed build leaves for the next.
KEPT = (PLAN, SPLIT, SPEC, VECTORS, DONE, manifest.OFFSETS, manifest.FAISS, *PARTS)


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
    def has_parts(self) -> bool:
        """Whether an unfinished build has what another start can use: vectors, or words."""
        done = self.partial / DONE
        split = self.partial / SPLIT
        return (done.exists() and b"\1" in done.read_bytes()) or (split / SHARDS).exists()
