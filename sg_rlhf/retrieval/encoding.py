"""A corpus to a file of vectors: by this process, or by several, each with a device or some cores.

The rows are cut into chunks. A chunk's vectors are on the disk before it counts as done (a byte
each in a file), so that whatever is killed, the next start goes on after the last whole chunk, and
the vectors are those of an undisturbed build. A worker that dies leaves its chunks to the others.

    parent -> worker   one line of JSON, what to encode; then a chunk's number a line
    worker -> parent   a chunk's number a line when it is on the disk; or {"error": "..."}

A worker ends when its parent has gone: its input ends. The lock on the folder is open in the
workers too, so that no other build starts while one of them may still write.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from sg_rlhf.common import resources
from sg_rlhf.common.index_sizes import Precision
from sg_rlhf.retrieval.corpus import Corpus, load_offsets
from sg_rlhf.retrieval.encoder import Encoder, Tokens
from sg_rlhf.retrieval.vectors import VectorFile


@dataclass(frozen=True)
class Task:
    """What all workers of a build share; paths are absolute."""

    corpus: str
    offsets: str
    vectors: str
    precision: Precision
    rows: int
    dimension: int
    chunk_rows: int
    encoder: str
    revision: str | None
    max_length: int
    dtype: str
    batch_size: int | None

    def file(self) -> VectorFile:
        """The file of vectors, opened."""
        return VectorFile(Path(self.vectors), self.precision, self.rows, self.dimension)

    def load_encoder(self, device: str) -> Encoder:
        """The encoder, on a device."""
        return Encoder(self.encoder, self.revision, self.max_length, device, self.dtype)


@dataclass(frozen=True)
class Place:
    """Where one worker computes."""

    device: str
    #: Cores of a worker on a CPU; None: torch's own choice.
    threads: int | None = None


class Done:
    """Which chunks are on the disk: a file with a byte for each, 1 if it is."""

    def __init__(self, path: Path, chunks: int) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(chunks))
        found = path.read_bytes()
        if len(found) != chunks:
            raise ValueError(f"{path}: {len(found)} bytes, expected {chunks}; --restart drops it")
        self.left = [number for number, byte in enumerate(found) if byte != 1]
        self.count = chunks - len(self.left)

    def add(self, number: int) -> None:
        """A chunk is done; its vectors are on the disk already."""
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), b"\1", number)
            os.fsync(file.fileno())
        self.count += 1


def places(devices: Sequence[str], workers: int | None) -> list[Place]:
    """One place a GPU, or `workers` on a CPU that share its cores; several on each GPU if asked."""
    if devices[0] == "cpu":
        cores = resources.cores()
        count = workers or max(1, cores // 8)
        return [Place("cpu", max(1, cores // count))] * count if count > 1 else [Place("cpu")]
    return [Place(device) for device in devices for _ in range(workers or 1)]


def encode(
    task: Task,
    where: Sequence[Place],
    done: Done,
    encoder: Encoder,
    on_rows: Callable[[int], object],
    lock: IO[Any],
    logs: Path,
) -> None:
    """Encode what is left; `on_rows` gets the rows of each chunk that is done.

    Args:
        encoder: of this process, which does it alone if there is one place.
        lock: an open file whose lock the workers hold as well.
        logs: a folder for what workers say.

    Raises:
        ValueError, OSError: the reason of the first worker that failed, or that none is left.
    """

    def finished(number: int) -> None:
        done.add(number)
        on_rows(_rows(task, number).stop - _rows(task, number).start)

    where = where[: max(1, len(done.left))]
    if len(where) == 1:
        reader = _Reader(task, encoder)
        begun = ((number, reader.begin(number)) for number in done.left)
        for number in _work(task, encoder, _one_ahead(begun)):
            finished(number)
        return
    _Company(task, where, done.left, finished, lock, logs).run()


def _rows(task: Task, number: int) -> range:
    start = number * task.chunk_rows
    return range(start, min(start + task.chunk_rows, task.rows))


class _Reader:
    """Reads and tokenizes chunks in a thread, while the model computes others."""

    def __init__(self, task: Task, encoder: Encoder) -> None:
        self._task, self._encoder = task, encoder
        self._corpus = Corpus(Path(task.corpus), load_offsets(Path(task.offsets), task.rows))
        self._thread = ThreadPoolExecutor(1)

    def begin(self, number: int) -> Future[Tokens]:
        """The tokens of a chunk, to come."""
        return self._thread.submit(self._read, number)

    def _read(self, number: int) -> Tokens:
        return self._encoder.tokens(self._corpus.contents(_rows(self._task, number)), "passage")


def _work(
    task: Task, encoder: Encoder, chunks: Iterable[tuple[int, Future[Tokens]]]
) -> Iterator[int]:
    """Encode chunks; gives each number when its vectors are on the disk."""
    with contextlib.closing(task.file()) as file:
        for number, tokens in chunks:
            first = _rows(task, number).start
            vectors = encoder.forward(tokens.result(), task.batch_size)
            _check_finite(vectors, first, task)
            file.write(first, vectors)
            yield number


def _check_finite(vectors_ND: np.ndarray, first: int, task: Task) -> None:
    """Refuse what is not a number, which no search finds and lists cannot learn from.

    Raises:
        ValueError: naming the passage, from row `first` on.
    """
    bad = np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{task.corpus}: the encoder {task.encoder} gives NaN or infinity for the passage in "
            f"line {first + int(bad[0]) + 1}; its weights are damaged, or too large for "
            f"{task.dtype}: --encoder-dtype fp32"
        )


def _one_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The items, each given when the one after it has been taken."""
    for last in items:
        for item in items:
            yield last
            last = item
        yield last


# -------------------------------------------------------------------------------- several processes


class _Company:
    """Workers, and the chunks that are left for them."""

    #: Chunks that a worker knows of: what it computes, and what it reads meanwhile.
    AHEAD = 2

    def __init__(
        self,
        task: Task,
        where: Sequence[Place],
        left: Sequence[int],
        on_done: Callable[[int], None],
        lock: IO[Any],
        logs: Path,
    ) -> None:
        self._on_done = on_done
        self._left = deque(left)
        #: Not done, and given to nobody or to a worker that may still fail.
        self._open = len(self._left)
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._dead: list[str] = []
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        self._workers = [
            _Worker(number, task, place, lock, logs / f"{number}.log")
            for number, place in enumerate(where)
        ]

    def run(self) -> None:
        """Until every chunk is done.

        Raises:
            ValueError: the reason why one is not.
        """
        threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for worker in self._workers:
                worker.end()
        if self._failure is not None:
            raise ValueError(self._failure)
        if self._open:
            raise ValueError(
                f"no worker is left ({'; '.join(self._dead)}); {self._open} shards are not made; "
                "the same command goes on with them"
            )

    def _serve(self, worker: _Worker) -> None:
        """Give a worker chunks and take its answers, until nothing is left or it dies."""
        has: deque[int] = deque()
        while self._give(worker, has):
            answer = worker.answer()
            with self._changed:
                if isinstance(answer, int):
                    has.remove(answer)
                    self._open -= 1
                    try:
                        self._on_done(answer)
                    except OSError as error:
                        self._failure = str(error)
                elif answer:
                    self._failure = answer
                else:
                    self._left.extendleft(reversed(has))
                    self._dead.append(worker.ended())
                    if len(self._dead) < len(self._workers):
                        print(f"{self._dead[-1]}; the others go on", file=sys.stderr, flush=True)
                self._changed.notify_all()
            if not isinstance(answer, int):
                return

    def _give(self, worker: _Worker, has: deque[int]) -> bool:
        """Fill up what a worker has; False when there is nothing to wait for any more."""
        with self._changed:
            # A chunk of a worker that dies comes back, so those that are idle wait for it.
            self._changed.wait_for(
                lambda: has or self._left or not self._open or self._failure is not None
            )
            if self._failure is not None or not self._open:
                return False
            while self._left and len(has) < self.AHEAD:
                has.append(self._left.popleft())
                worker.give(has[-1])
        return True


class _Worker:
    """A process that encodes."""

    def __init__(self, number: int, task: Task, place: Place, lock: IO[Any], log: Path) -> None:
        self._name = f"worker {number} ({place.device})"
        self._log = log
        environment = dict(os.environ)
        if place.threads is not None:
            environment["OMP_NUM_THREADS"] = str(place.threads)
            environment["RAYON_NUM_THREADS"] = str(place.threads)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1,
                env=environment, pass_fds=(lock.fileno(),),
                # Ctrl-C ends the parent, which ends them.
                start_new_session=True,
            )  # fmt: skip
        self._send(json.dumps({"task": asdict(task), "device": place.device}))

    def give(self, chunk: int) -> None:
        """A chunk to encode after those that it has."""
        self._send(str(chunk))

    def answer(self) -> int | str:
        """The next chunk that is done; or why it cannot go on; or "" if it says no more."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            return ""
        said = json.loads(line)
        return said if isinstance(said, int) else str(said["error"])

    def ended(self) -> str:
        """How a worker that says no more has ended."""
        status = self._process.wait()
        if status < 0:
            return f"{self._name} was ended by {signal.Signals(-status).name}"
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"{self._name} ended with status {status}: {lines[-1][:300]}"

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # One that has died is noticed by its silence.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")


def main() -> int:
    """A worker's own process."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    job = json.loads(sys.stdin.readline())
    chunks: queue.SimpleQueue[tuple[int, Future[Tokens]] | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[_Reader] = queue.SimpleQueue()

    def listen() -> None:
        reader = None
        for line in sys.stdin:
            reader = reader or ready.get()
            chunks.put((int(line), reader.begin(int(line))))
        os._exit(1)  # the parent has gone, or needs no more

    threading.Thread(target=listen, daemon=True).start()
    task = Task(**job["task"])
    try:
        encoder = task.load_encoder(job["device"])
        ready.put(_Reader(task, encoder))
        for number in _work(task, encoder, iter(chunks.get, None)):
            answers.write(f"{number}\n")
    except (ValueError, OSError) as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
