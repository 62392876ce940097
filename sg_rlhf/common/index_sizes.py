"""Sizes of vector indexes on disk and in memory, computed from faiss's formats.

Here and not in `retrieval`, because the data command of search estimates an index, too.

    kind     bytes of a vector's code   beside the codes
    flat     4 d (fp32), 2 d (fp16)
    sq8      d
    hnsw     as flat                    graph: 4 (2 M + M / (M - 1)) + 12 a vector
    ivf      as flat                    8 a vector, 4 d + 8 a list
    ivfsq8   d                          as ivf
    ivfpq    ceil(pq_m pq_bits / 8)     as ivf, 4 d 2^pq_bits

d is the dimension. Parameters have faiss's names, but for `pq_m` and `pq_bits` (faiss: M and
nbits), since HNSW has an M too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
KINDS = ("flat", "sq8", "hnsw", "ivf", "ivfsq8", "ivfpq")

#: Vectors per list that k-means learns from; faiss warns below 39.
TRAIN_PER_LIST = 48
_MIN_PER_LIST = 39

#: Parameters of each kind: set when it is built, and when it is searched.
BUILD = {
    "flat": (),
    "sq8": (),
    "hnsw": ("M", "efConstruction"),
    "ivf": ("nlist",),
    "ivfsq8": ("nlist",),
    "ivfpq": ("nlist", "pq_m", "pq_bits"),
}
SEARCH = {"hnsw": ("efSearch",), "ivf": ("nprobe",), "ivfsq8": ("nprobe",), "ivfpq": ("nprobe",)}

EF_SEARCH = 128
#: Most candidates of a graph search; faiss counts them in 32 bits.
MOST_EF = 2**20
#: By default a quarter of the lists is probed, at most this many.
MOST_PROBES = 256


@dataclass(frozen=True)
class Spec:
    """An index to build: its kind, the precision of its vectors, its size, its parameters.

    Vectors of sq8, ivfsq8 and ivfpq are on the disk in that precision until the index is built.
    """

    kind: str
    vectors: Precision
    rows: int
    dimension: int
    build: Mapping[str, int]
    search: Mapping[str, int]

    @property
    def vector_bytes(self) -> int:
        """Bytes of all encoded vectors."""
        return self.rows * self.dimension * (4 if self.vectors == "fp32" else 2)

    @property
    def code_bytes(self) -> int:
        """Bytes of one vector in the index."""
        if self.kind in ("sq8", "ivfsq8"):
            return self.dimension
        if self.kind == "ivfpq":
            return -(-self.build["pq_m"] * self.build["pq_bits"] // 8)
        return self.dimension * (4 if self.vectors == "fp32" else 2)

    @property
    def graph_bytes(self) -> int:
        """Expected bytes of an HNSW graph over its random levels; 0 for other kinds."""
        if self.kind != "hnsw":
            return 0
        links = self.build["M"]
        return round(self.rows * (4 * (2 * links + links / (links - 1)) + 12))

    @property
    def index_bytes(self) -> int:
        """Bytes of the finished file."""
        size = self.rows * self.code_bytes + self.graph_bytes
        if self.kind.startswith("ivf"):
            size += 8 * self.rows + self.build["nlist"] * (4 * self.dimension + 8)
        if self.kind == "ivfpq":
            size += 4 * self.dimension * 2 ** self.build["pq_bits"]
        return size

    @property
    def sample_rows(self) -> int:
        """Number of vectors that k-means learns from."""
        return min(self.rows, self.build.get("nlist", 0) * TRAIN_PER_LIST)

    @property
    def sample_bytes(self) -> int:
        """Bytes of their copy on the disk; 0 if k-means learns from all vectors."""
        all_of_them = self.sample_rows == self.rows
        return 0 if all_of_them else self.sample_rows * self.vector_bytes // self.rows


def spec(
    kind: str,
    rows: int,
    dimension: int,
    vectors: Precision | None = None,
    build: Mapping[str, int] | None = None,
    search: Mapping[str, int] | None = None,
) -> Spec:
    """The index of `rows` vectors, with defaults for parameters that are not given.

    Raises:
        ValueError: this kind has no such parameter, or the value is out of range.
    """
    build, search = dict(build or {}), dict(search or {})
    _known("--build", kind, build, BUILD.get(kind, ()))
    _known("--search", kind, search, SEARCH.get(kind, ()))
    whole = kind in ("flat", "hnsw", "ivf")
    made: dict[str, int] = {}
    if kind == "hnsw":
        made = {"M": 32, "efConstruction": 200}
        search = {"efSearch": EF_SEARCH, **search}
    elif kind.startswith("ivf"):
        made = {"nlist": max(1, min(4 * math.isqrt(rows), rows // _MIN_PER_LIST))}
        if kind == "ivfpq":
            # 8 numbers a byte; what does not divide the dimension is no product quantizer.
            made |= {"pq_m": math.gcd(dimension, max(1, dimension // 8)), "pq_bits": 8}
        nlist = build.get("nlist", made["nlist"])
        search = {"nprobe": probes(nlist), **search}
    made |= build
    _allowed(kind, made, search, rows, dimension)
    return Spec(kind, vectors or ("fp32" if whole else "fp16"), rows, dimension, made, search)


def probes(nlist: int) -> int:
    """Default number of lists that are probed."""
    return max(1, min(nlist // 4, MOST_PROBES))


def _known(flag: str, kind: str, given: Mapping[str, int], names: tuple[str, ...]) -> None:
    for name, value in given.items():
        if name not in names:
            has = f"has {', '.join(names)}" if names else "has none"
            raise ValueError(f"{flag} {name}={value}: --type {kind} {has}")


def _allowed(
    kind: str, build: Mapping[str, int], search: Mapping[str, int], rows: int, dimension: int
) -> None:
    ranges = {
        "M": (2, 512), "efConstruction": (1, MOST_EF), "pq_bits": (4, 12), "nlist": (1, rows),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        if name in build and not low <= build[name] <= high:
            raise ValueError(f"--build {name}={build[name]}: expected {low} to {high}")
    if not 1 <= search.get("efSearch", 1) <= MOST_EF:
        raise ValueError(f"--search efSearch={search['efSearch']}: expected 1 to {MOST_EF}")
    if kind == "ivfpq" and dimension % build["pq_m"]:
        raise ValueError(
            f"--build pq_m={build['pq_m']}: expected a divisor of the vectors' length {dimension}"
        )
    if (lists := build.get("nlist")) and search["nprobe"] > lists:
        raise ValueError(f"--search nprobe={search['nprobe']}: above nlist, {lists}")


def check_codes(index: Spec) -> None:
    """Refuse product-quantizer codes with more values than there are vectors to learn from.

    Raises:
        ValueError: naming the parameter.
    """
    bits = index.build.get("pq_bits", 0)
    if bits and index.rows < 2**bits:
        raise ValueError(
            f"--build pq_bits={bits}: its {2**bits} codes are learnt from as many vectors at "
            f"least, here are {index.rows}; fewer bits, or --type flat"
        )


# ------------------------------------------------------------- disk and memory of building one

#: A process with torch, transformers and faiss loaded, measured without an encoder's weights.
PROCESS_BYTES = 800 * 10**6
#: What torch and faiss take in addition when they compute: code and temporary products.
COMPUTE_BYTES = 32 * 2**20
#: Vectors that `assemble` works on at once, float32, of graphs and sq8 and of lists; and how many
#: such blocks there are with the next, their codes and those in order.
BLOCK_BYTES, LISTS_BLOCK_BYTES = 32 * 2**20, 2 * 2**20
GRAPH_BLOCKS, LISTS_BLOCKS = 3, 4
#: Vectors that codes learn from, at most: the range of each number, or 256 for each of ivfpq's 256;
#: and of ivfpq, the bytes of the columns that are learnt from, or compared, at once.
CODES_SAMPLE, CODES_BYTES = 65_536, 4 * 2**20
#: `kmeans`: vectors that one thread compares, with so many centres at a time; slices of a thread
#: that are kept until the others are there.
SLICE, TILE, ROUND = 256, 1024, 4


def build_disk(index: Spec) -> int:
    """Largest number of bytes of a build on the disk, with the passages' offsets."""
    size = index.vector_bytes + 8 * index.rows
    if index.kind == "flat":
        return size
    if index.kind.startswith("ivf"):
        # The vectors that lists and codes learn from are deleted before the index is written.
        codes = min(CODES_SAMPLE, index.rows) * 4 * index.dimension
        return size + max(index.index_bytes + 4 * index.rows, index.sample_bytes + codes)
    return size + index.index_bytes + index.graph_bytes


def finished_disk(index: Spec) -> int:
    """Bytes on the disk after the build."""
    return index.index_bytes + 8 * index.rows


def encode_memory(index: Spec, workers: int, weights: int, chunk_rows: int) -> int:
    """Bytes of memory while vectors are encoded: encoder, chunk and read-ahead of each worker."""
    processes = 1 if workers == 1 else 1 + workers
    return processes * (PROCESS_BYTES + weights) + workers * 3 * chunk_rows * index.dimension * 4


def assemble_memory(index: Spec, weights: int, cores: int = 1) -> int:
    """Bytes of memory while the index is assembled from the vectors."""
    size = PROCESS_BYTES + weights
    if index.kind == "flat":
        return size
    size += COMPUTE_BYTES
    if index.kind == "hnsw":
        # Each thread marks the vectors that it has visited.
        graph = index.vector_bytes + index.graph_bytes
        return size + GRAPH_BLOCKS * BLOCK_BYTES + graph + cores * index.rows
    vector = 4 * index.dimension
    if index.kind == "sq8":
        codes = min(CODES_SAMPLE, index.rows) * vector
        return size + max(codes + BLOCK_BYTES, GRAPH_BLOCKS * BLOCK_BYTES)
    codes = 2 * CODES_BYTES if index.kind == "ivfpq" else LISTS_BLOCK_BYTES
    if index.kind == "ivfsq8":
        codes += min(CODES_SAMPLE, index.rows) * vector
    # Centres, the sums of their nearest vectors, a copy; the lists' offsets.
    lists = index.build["nlist"] * (3 * vector + 64)
    threads = cores * SLICE * (ROUND * 2 * vector + 4 * TILE)
    return size + lists + max(threads, codes, 4 * index.rows + LISTS_BLOCKS * LISTS_BLOCK_BYTES)


def build_memory(
    index: Spec, weights: int, workers: int = 1, chunk_rows: int = 16_384, cores: int = 1
) -> int:
    """Largest number of bytes of memory of a build."""
    encoding = encode_memory(index, workers, weights, chunk_rows)
    return max(encoding, assemble_memory(index, weights, cores))
