"""The transfer engine: files and bytes to and from a blob store, in parallel parts, hashed in the same pass.

Every upload has the job's TTL, which only an acknowledged publish removes. Memory is one buffer per thread, whatever
the size of the files. A file consists of parts ``<prefix>.0``, ``<prefix>.1``, …, each a blob with its own hash. The
blob store itself retries and verifies uploads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from statemgr.blobs.body import body_size
from statemgr.blobs.counting import BlobCounts
from statemgr.errors import CorruptFile, MissingBlob, StatemgrError, UnavailableError
from statemgr.local.transfer_files import SourceFile
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash, hasher
from statemgr.model.snapshot import FileIndex
from statemgr.ports import BlobStore, Body, Clock, Executors, FileSlice, Progress, no_progress
from statemgr.transfer.compression import compressed
from statemgr.transfer.downloads import Downloads
from statemgr.transfer.hedging import Hedger
from statemgr.transfer.pool import Batch, Counter, Pace, Pool, Room

T = TypeVar("T")
#: Hedged uploads at a time, extra attempts included. Their threads mostly wait for the store.
_HEDGED_PUTS = 64
#: Bytes of hedged uploads at a time.
_HEDGED_BYTES = 64 * 1024 * 1024
#: Blobs that are deleted in one call of the store.
_TOGETHER = 100
#: Deleted blobs that are remembered.
_MOST_DELETED = 100_000


@dataclass(frozen=True, slots=True)
class Upload:
    """A local file to upload: its path, its size and XXH3-128, and the name before its parts' numbers.

    Without a hash, any content is accepted, and the upload computes its hash.
    """

    path: Path
    size: int
    hash: bytes | None
    blob_prefix: str


class Transfer(Downloads):
    """Moves files and bytes. Safe to call from many threads.

    Args:
        blobs: retries and verifies.
        parallelism: parts in flight at a time, over all calls.
        part_size: bytes of one part of a file.
        ttl_days: TTL of uploaded blobs.
        most_bytes: bytes of the parts in flight at a time, over all calls.
        hedged: start extra requests when the store is slow. This does not help with a store on this machine.
        compress_in: returns the path of a new file, for a part that is compressed before it is sent; None sends parts
            as they are.
        patience_s: seconds that a hedged upload waits until others have ended.
        counts: where extra requests are counted.

    Attributes:
        deleted: blobs that were deleted after their TTL could not be removed, so that nobody has to remove it.
    """

    def __init__(
        self,
        blobs: BlobStore,
        clock: Clock,
        executors: Executors,
        *,
        parallelism: int,
        part_size: int,
        ttl_days: int,
        most_bytes: int = 1 << 30,
        hedged: bool = False,
        compress_in: Callable[[], Path] | None = None,
        patience_s: float | None = None,
        counts: BlobCounts | None = None,
    ) -> None:
        counts = counts or BlobCounts()
        count_get, count_put = (partial(counts.add, "hedges", operation) for operation in ("get", "put"))
        gets = Hedger(clock, executors, threads=2 * parallelism, count=count_get) if hedged else None
        super().__init__(blobs, Pool(clock, executors, parallelism, most_bytes), gets)
        self.part_size = part_size
        self._ttl_days = ttl_days
        self._compress_in = compress_in
        self.hedged_puts = Hedger(clock, executors, threads=_HEDGED_PUTS, count=count_put) if hedged else None
        self.hedged_bytes = Room(clock, _HEDGED_BYTES, patience_s)
        self._noting = threading.Lock()
        self.deleted: dict[str, None] = {}
        #: blobs whose TTL could not be removed
        self._expiring: set[str] = set()

    def batch(self, report: Callable[[], None] = lambda: None) -> Batch:
        """Jobs of a caller's own, on the same threads and in turn with all others. ``report``: as of
        :meth:`Pool.batch`."""
        return self._pool.batch(report)

    def pace(self) -> Pace:
        """The pace of a batch in the background."""
        return Pace(self._pool.clock, self._pool.threads)

    # --- uploads -------------------------------------------------------------------------------------------------

    def upload_files(self, uploads: Sequence[Upload], progress: Progress = no_progress) -> list[FileIndex]:
        """Upload files in parts; returns them in order, named by their path's last part.

        One pass over each file hashes the parts and the whole, and compares that with the known hash.
        Raises: UnavailableError, AccessDenied, DiskFull, CorruptError (a local file has changed).
        """
        done, total = Counter(), sum(upload.size for upload in uploads)
        with self._pool.batch(lambda: progress("upload", done.value, total)) as batch:
            sent = [self._upload(batch, upload, done) for upload in uploads]
        return [
            FileIndex(upload.path.name, upload.size, digest, None, parts, tuple(frames) if any(frames) else ())
            for upload, (digest, parts, frames) in zip(uploads, sent, strict=True)
        ]

    def _upload(self, batch: Batch, upload: Upload, done: Counter) -> tuple[bytes, tuple[BlobRef, ...], list[int]]:
        """Returns: the file's hash, its parts, and the sizes of their frames, known when the batch is done."""
        parts: list[BlobRef] = []
        whole = hasher()
        pieces = list(cut(upload.size, self.part_size))
        frames = [0] * len(pieces)
        with SourceFile(upload.path) as source:
            for number, (offset, length) in enumerate(pieces):
                part = hasher() if length < upload.size else whole
                for piece in source.pieces(offset, length, self._buffer()):
                    part.update(piece)
                    if part is not whole:
                        whole.update(piece)
                ref = BlobRef(f"{upload.blob_prefix}.{number}", length, part.digest())
                parts.append(ref)
                body = FileSlice(upload.path, offset, length, ref.hash)
                batch.submit(partial(self._put_part, batch, ref.blob_id, body, frames, number, done), length)
            size = source.size
        digest = whole.digest()
        if size != upload.size or upload.hash not in (None, digest):
            raise CorruptFile(
                "a local file has changed since it was committed",
                hint="delete the local state directory and open the task again",
                path=upload.path,
            )
        return digest, tuple(parts), frames

    def _put_part(
        self, batch: Batch, blob_id: str, body: FileSlice, frames: list[int], number: int, done: Counter
    ) -> None:
        with ExitStack() as stack:
            frame = None
            if self._compress_in is not None:
                frame = stack.enter_context(compressed(body, self._compress_in(), self._buffer(), batch.check))
            self._blobs.put(blob_id, frame or body, ttl_days=self._ttl_days)
            frames[number] = frame.length if frame else 0
        done.add(body.length)

    def put(self, blob_id: str, body: Body) -> BlobRef:
        """Write one blob, on the caller's thread. Raises: UnavailableError, AccessDenied, DiskFull."""
        if isinstance(body, bytes):
            ref = BlobRef(blob_id, len(body), content_hash(body))
        else:
            ref = BlobRef(blob_id, body.length, self.hash_of(body.path, body.offset, body.length))
            body = replace(body, digest=ref.hash)
        self._blobs.put(blob_id, body, ttl_days=self._ttl_days)
        return ref

    def put_hedged(self, blob_id: str, body: Body) -> str:
        """Write one blob that a commit waits for, on the caller's thread, as soon as there is room in the bytes in
        flight.

        When the store is slow, extra attempts write to ``<blob_id>-1`` and ``-2``. Each has its own name, so a late
        one never touches the blob of the first one.

        Returns: the name that the fastest attempt wrote to.
        Raises: as :meth:`put`; RetryableError without room in time.
        """

        def attempt(number: int) -> str:
            name = f"{blob_id}-{number}" if number else blob_id
            self._blobs.put(name, body, ttl_days=self._ttl_days)
            return name

        with self.hedged_bytes.taken(body_size(body)):
            return self.hedged_puts.call(attempt, lost=self._blobs.delete) if self.hedged_puts else attempt(0)

    # --- many blobs: each method returns the blobs that it failed for, and why (MissingBlob: it does not exist) ------

    def absent(self, blob_ids: Iterable[str]) -> Mapping[str, StatemgrError]:
        """Check in parallel that blobs exist, with one request for each: on S3 a ``stat`` also asks for the tags."""

        def look(blob_id: str) -> None:
            with self._blobs.get(blob_id, length=0):
                pass

        return self.for_each(blob_ids, look)

    def remove_ttl_all(self, blob_ids: Iterable[str]) -> Mapping[str, StatemgrError]:
        """Remove the TTL of blobs in parallel, except of those that :attr:`deleted` has.

        A published blob whose TTL nobody removes expires. So a second request checks that one is really missing.
        """
        wanted = [blob for blob in blob_ids if blob not in self.deleted]
        failed = dict(self.for_each(wanted, self._blobs.remove_ttl))
        missing = [blob for blob, error in failed.items() if isinstance(error, MissingBlob)]
        there = UnavailableError("the blob store does not find a blob that it has")
        failed |= {**dict.fromkeys(missing, there), **self.absent(missing)}
        with self._noting:
            self._expiring.difference_update(wanted)
            self._expiring.update(blob for blob, error in failed.items() if not isinstance(error, MissingBlob))
        return failed

    def delete_all(self, blob_ids: Iterable[str]) -> Mapping[str, StatemgrError]:
        """Delete blobs, in parallel and with few requests."""
        wanted = list(dict.fromkeys(blob_ids))
        failed: dict[str, StatemgrError] = {}

        def delete(some: Sequence[str]) -> None:
            failed.update(self._blobs.delete_many(some))

        chunks = [tuple(wanted[start : start + _TOGETHER]) for start in range(0, len(wanted), _TOGETHER)]
        for chunk, error in self.for_each(chunks, delete).items():
            failed |= dict.fromkeys(chunk, error)
        with self._noting:
            done = self._expiring.intersection(wanted).difference(failed)
            self._expiring -= done
            self.deleted |= dict.fromkeys(done)
            while len(self.deleted) > _MOST_DELETED:
                del self.deleted[next(iter(self.deleted))]
        return failed

    def for_each(self, items: Iterable[T], action: Callable[[T], None]) -> Mapping[T, StatemgrError]:
        """Do something with each item once, in parallel."""
        failed: dict[T, StatemgrError] = {}

        def job(item: T) -> None:
            try:
                action(item)
            except StatemgrError as error:
                failed[item] = error

        with self._pool.batch() as batch:
            for item in dict.fromkeys(items):
                batch.submit(partial(job, item))
        return failed

    def close(self) -> None:
        """Wait for running jobs and stop the threads. The blob store stays open."""
        self._pool.close()
        for hedger in (self.hedged_gets, self.hedged_puts):
            if hedger:
                hedger.close()


def cut(size: int, part_size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of a file's parts; a small rest (up to a quarter) goes with the last one."""
    offset = 0
    while offset < size:
        left = size - offset
        length = left if left <= part_size + part_size // 4 else part_size
        yield offset, length
        offset += length
