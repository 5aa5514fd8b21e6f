"""Segments of several tasks of one process in one blob: commits that come at about the same time share a PUT.

Steps of a batch:

1. the first commit that has something to write opens it; others join while it is open, and one writes at a time
2. it is closed when no other commit has announced itself, when it is full, or after a short delay
3. it is uploaded, hedged; every commit in it gets the blob's name, or the error

A commit that fails to write does not affect the others. A batch of a single task has a name below that task's prefix.
Source: the batching uploader of Flink's changelog state backend (FLIP-158).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from statemgr.backends.blobs.names import segments_blob, shared_segments_blob
from statemgr.errors import RetryableError
from statemgr.ports import Body, StoreIdentity, wait_for
from statemgr.services import Services
from statemgr.transfer.packs import PackedBlob

#: Seconds that a batch waits for commits that have announced themselves.
LINGER_S = 0.01
#: Bytes from which a batch takes no more commits.
_FULL = 16 * 1024 * 1024
#: Batches that are uploaded at a time. Their bytes have a limit of their own.
_THREADS = 32


@dataclass(frozen=True, slots=True)
class Stored:
    """A batch that was uploaded: its name, its content, and the tasks that share it, if there are several."""

    blob_id: str
    body: Body
    tasks: frozenset[str] = frozenset()


@dataclass(eq=False)
class _Batch:
    blob: PackedBlob
    owner: StoreIdentity
    attempt: str
    tasks: set[str] = field(default_factory=set)
    writers: int = 0
    writing: threading.Lock = field(default_factory=threading.Lock)
    done: Future[Stored] = field(default_factory=Future)


class SegmentBatches:
    """Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._pool = services.executors.pool("batch", _THREADS)
        self._changed = threading.Condition()
        self._coming = 0
        self._open: _Batch | None = None

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Announce a commit that prepares its changes inside the block: an open batch waits for it a little."""
        with self._changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._coming -= 1
                self._changed.notify_all()

    @contextmanager
    def joined(self, owner: StoreIdentity, attempt: str, expected: int) -> Iterator[tuple[PackedBlob, Future[Stored]]]:
        """Write about ``expected`` bytes to the blob of a batch inside the block. Yields: the blob, and the result."""
        batch = self._join(owner, attempt, expected)
        try:
            with batch.writing:
                yield batch.blob, batch.done
        finally:
            with self._changed:
                batch.writers -= 1
                self._changed.notify_all()

    def wait(self, stored: Future[Stored]) -> Stored:
        """The result of a batch. Raises: the error of its upload; RetryableError if it takes too long."""
        try:
            return stored.result(self._services.config.commit_timeout_ms / 1000)
        except TimeoutError as error:
            if stored.done():  # it has ended since; or the upload has raised this error
                return stored.result()
            raise RetryableError(
                "the segments of the commit were not uploaded in time",
                hint="the next commit has the changes of this one",
            ) from error

    def close(self) -> None:
        """Wait for running uploads."""
        self._pool.shutdown(wait=True)

    def _join(self, owner: StoreIdentity, attempt: str, expected: int) -> _Batch:
        with self._changed:
            batch = self._open
            if batch is None or batch.blob.size + expected > _FULL:
                batch = _Batch(PackedBlob(self._services.scratch_file("segments")), owner, attempt)
                self._pool.submit(self._run, batch)
                self._open = batch
            batch.tasks.add(owner.task)
            batch.writers += 1
            self._changed.notify_all()
            return batch

    def _run(self, batch: _Batch) -> None:
        clock = self._services.clock
        try:
            with closing(batch.blob):
                with self._changed:
                    wait_for(clock, self._changed, lambda: batch.writers == 0 and self._coming == 0, LINGER_S)
                    if self._open is batch:
                        self._open = None
                    self._changed.wait_for(lambda: batch.writers == 0)
                stored = self._stored(batch)
        except BaseException as error:
            batch.done.set_exception(error)
        else:
            batch.done.set_result(stored)

    def _stored(self, batch: _Batch) -> Stored:
        body = batch.blob.body()
        if not batch.blob.size:
            return Stored("", body)
        tasks, name = frozenset[str](), segments_blob(batch.owner, batch.attempt)
        if len(batch.tasks) > 1:
            tasks, name = frozenset(batch.tasks), shared_segments_blob(batch.owner, self._services.ids.attempt_id())
        return Stored(self._services.transfer().put_hedged(name, body), body, tasks)
