"""The transfer engine: files and bytes to and from a blob store, in parallel parts, hashed on the way.

Every upload bears the job's TTL: only an acknowledged publish takes it away. Memory is one buffer per thread,
whatever the files' sizes. A file is in parts ``<prefix>.0``, ``<prefix>.1``, … each a blob of its own with
its own hash. The blob store retries and verifies uploads by itself; what is fetched is verified here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from statemgr.blobs.body import body_size
from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptFile, StatemgrError
from statemgr.local.transfer_files import NewFile, SourceFile, write_new
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash, hasher, read_buffer
from statemgr.model.snapshot import FileIndex
from statemgr.ports import BlobReader, BlobStore, Body, Clock, Executors, FileSlice, Progress, no_progress
from statemgr.transfer.compression import DamagedFrame, FrameReader, compressed
from statemgr.transfer.destinations import IntoFile, IntoMemory, Nowhere, Sink
from statemgr.transfer.hedging import Hedger
from statemgr.transfer.plan import Fetch, Run, Upload, cut, runs
from statemgr.transfer.pool import Batch, Counter, Pool, Room

T = TypeVar("T")
#: Bytes that are read, hashed and written at once, or copied by the system and then looked at.
_BUFFER = 1024 * 1024
#: Hedged uploads at a time, extra ones included. They wait for the store most of the time.
_HEDGED_PUTS = 64
#: Their bytes at a time.
_HEDGED_BYTES = 64 * 1024 * 1024
#: Blobs that are deleted in one call of the store.
_TOGETHER = 100


class Transfer:
    """Moves files and bytes; safe to call from many threads.

    Args:
        blobs: retrying and verifying.
        parallelism: parts in flight at a time, over all calls.
        part_size: bytes of one part of a file.
        ttl_days: how long what was uploaded lives unless its TTL is removed.
        most_bytes: bytes of the parts in flight at a time, over all calls.
        hedge_by: measures latencies for hedging against a far store's slow moments; None hedges nothing.
        compress_in: makes a directory for parts of files that are compressed before they are sent; None sends them as
            they are.
        patience_s: seconds that a hedged upload waits for others to arrive.
        executors: where the threads come from, if not from this machine.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        parallelism: int,
        part_size: int,
        ttl_days: int,
        most_bytes: int = 1 << 30,
        hedge_by: Clock | None = None,
        compress_in: Callable[[], Path] | None = None,
        patience_s: float | None = None,
        executors: Executors | None = None,
    ) -> None:
        self._blobs = blobs
        self.part_size = part_size
        self._ttl_days = ttl_days
        self._compress_in = compress_in
        self._pool = Pool(parallelism, most_bytes, executors)
        self._local = threading.local()
        self.hedged_gets = Hedger(hedge_by, threads=2 * parallelism, executors=executors) if hedge_by else None
        self.hedged_puts = Hedger(hedge_by, threads=_HEDGED_PUTS, executors=executors) if hedge_by else None
        self.hedged_bytes = Room(_HEDGED_BYTES, patience_s)

    def batch(self) -> Batch:
        """Jobs of a caller's own, on the same threads and in turn with all others."""
        return self._pool.batch()

    # --- files --------------------

    def upload_files(self, uploads: Sequence[Upload], progress: Progress = no_progress) -> list[FileIndex]:
        """Upload files in parts; returns them in order, named by their path's last part.

        One pass over each file hashes the parts and the whole, and checks that against what is known of it.
        Raises: UnavailableError, AccessDenied, DiskFull, CorruptError (a local file is not what it was).
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
                body = FileSlice(upload.path, offset, length)
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

    def fetch_files(self, fetches: Sequence[Fetch], progress: Progress = no_progress) -> int:
        """Write files, part by part in parallel, verified; the smallest first. Nothing existing is written to.

        Nothing is synced: who takes the files over makes them durable, or does not need them to be.

        Returns: bytes that were there already, of files that are continued.

        Raises: MissingBlob, CorruptBlob (twice the wrong bytes), UnavailableError, AccessDenied, DiskFull.
        """
        done, kept, total = Counter(), Counter(), sum(fetch.file.size for fetch in fetches)
        with self._pool.batch(lambda: progress("fetch", done.value, total)) as batch:
            together, others = runs(fetches)
            for run in together:
                batch.submit(partial(self._fetch_run, batch, run, done), run.size)
            for fetch in sorted(others, key=lambda fetch: fetch.file.size):
                self._fetch(batch, fetch, done, kept)
        return kept.value

    def _fetch_run(self, batch: Batch, run: Run, done: Counter) -> None:
        batch.check()
        data = read_buffer(run.size)
        got = 0
        with self._opened(run.blob_id, run.offset, run.size) as reader:
            while got < run.size and (size := reader.readinto(data[got:])):
                got += size
        offset = 0
        for fetch in run.fetches:
            content = data[offset : offset + fetch.file.size]
            offset += fetch.file.size
            part = fetch.file.parts[0]
            if content_hash(content) == part.hash == fetch.file.hash:
                write_new(fetch.target, content)
                done.add(len(content))
            else:  # once more by itself, which tells what is wrong
                self._fetch_part(batch, fetch, NewFile(fetch.target, fetch.file.size, 1), 0, 0, done, Counter())

    def _fetch(self, batch: Batch, fetch: Fetch, done: Counter, kept: Counter) -> None:
        if not fetch.file.parts:
            write_new(fetch.target, b"")
        target = NewFile(fetch.target, fetch.file.size, len(fetch.file.parts), exists=fetch.continued)
        offset = 0
        for number, part in enumerate(fetch.file.parts):
            batch.submit(partial(self._fetch_part, batch, fetch, target, number, offset, done, kept), part.size)
            offset += part.size

    def _fetch_part(
        self,
        batch: Batch,
        fetch: Fetch,
        target: NewFile,
        number: int,
        offset: int,
        done: Counter,
        kept: Counter,
    ) -> None:
        file, part = fetch.file, fetch.file.parts[number]
        if fetch.continued and self.hash_of(fetch.target, offset, part.size) == part.hash:
            kept.add(part.size)
            done.add(part.size)
        else:
            with target.part() as fd:
                sink = IntoFile(target, fd, offset, self._buffer(), batch, done)
                self._read_verified(part, sink, file.frame_of(number))
        # the only part of a file has been hashed already
        if target.part_done() and (len(file.parts) > 1 or part.hash != file.hash):
            self._verify_whole(file, target.path)

    def _verify_whole(self, file: FileIndex, path: Path) -> None:
        if self.hash_of(path, 0, file.size) != file.hash:
            raise CorruptBlob(
                "each part of a file is right, but together they are not the file",
                blob=file.parts[0].blob_id,
                file=file.name,
                hint=ANOTHER_COPY,
            )

    def hash_of(self, path: Path, offset: int, length: int) -> bytes:
        """XXH3-128 of a part of a local file. Raises: CorruptError: it is shorter."""
        there = hasher()
        with SourceFile(path) as source:
            for piece in source.pieces(offset, length, self._buffer()):
                there.update(piece)
        return there.digest()

    # --- single blobs --------------------

    def put(self, blob_id: str, body: Body) -> BlobRef:
        """Write one blob, on the caller's thread. Raises: UnavailableError, AccessDenied, DiskFull."""
        if isinstance(body, bytes):
            ref = BlobRef(blob_id, len(body), content_hash(body))
        else:
            ref = BlobRef(blob_id, body.length, self.hash_of(body.path, body.offset, body.length))
        self._blobs.put(blob_id, body, ttl_days=self._ttl_days)
        return ref

    def put_hedged(self, blob_id: str, body: Body) -> str:
        """Write one blob for which a commit waits, on the caller's thread, when few enough bytes are on their way.

        Where the store is slow, further attempts write to ``<blob_id>-1`` and ``-2``: each has a name of its own, so
        that a late one never touches the first one's blob. Raises: as :meth:`put`; RetryableError without room in time.

        Returns: the name of the attempt that was first.
        """

        def attempt(number: int) -> str:
            name = f"{blob_id}-{number}" if number else blob_id
            self._blobs.put(name, body, ttl_days=self._ttl_days)
            return name

        with self.hedged_bytes.taken(body_size(body)):
            if self.hedged_puts is None:
                return attempt(0)
            return self.hedged_puts.call(attempt, lost=self._blobs.delete)

    def get_bytes(self, ref: BlobRef, limit: int) -> bytes:
        """Read one blob of at most ``limit`` bytes, verified.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
        """
        if ref.size > limit:
            raise CorruptBlob(f"a blob of {ref.size} bytes is refused: the limit is {limit}", blob=ref.blob_id)
        sink = IntoMemory()
        self._read_verified(ref, sink)
        return bytes(sink.data)

    def read_back(self, ref: BlobRef, stored: int) -> None:
        """Read every byte of a blob, or of its part that ``ref`` names, which takes ``stored`` bytes there.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
        """
        self._read_verified(ref, Nowhere(), stored if stored != ref.size else 0)

    def fetch_blob(self, ref: BlobRef, target: Path) -> None:
        """Write one blob to a new file, verified. Raises: as :meth:`fetch_files`."""
        self.fetch_files([Fetch(FileIndex(target.name, ref.size, ref.hash, parts=(ref,)), target)])

    def _read_verified(self, ref: BlobRef, sink: Sink, frame: int = 0) -> None:
        """``frame``: the bytes of the zstandard frame that the blob holds instead; 0: it holds the bytes themselves."""
        # of a whole blob, bytes that are too many are noticed, too
        length = frame or (None if ref.offset is None else ref.size)
        for last in (False, True):
            with self._opened(ref.blob_id, ref.offset or 0, length) as reader:
                written, problem = self._read_once(FrameReader(reader) if frame else reader, ref, sink)
            if problem is None:
                return
            sink.restart(written)
            if last:
                raise CorruptBlob(
                    f"the blob has {problem}, but {ref.size} bytes with a known hash were written",
                    blob=ref.blob_id,
                    hint=ANOTHER_COPY,
                )

    def _read_once(self, reader: BlobReader, ref: BlobRef, sink: Sink) -> tuple[int, str | None]:
        """Returns: how many bytes the sink was given, and what is wrong with them."""
        buffer, hashed, written = self._buffer(), hasher(), 0
        while True:
            wanted = ref.size - written
            piece = sink.move(reader, written, wanted) if wanted else None
            if piece is None:
                try:
                    piece = buffer[: reader.readinto(buffer)]
                except DamagedFrame:
                    return written, "a damaged frame"
                if len(piece) > wanted:
                    return written, "more bytes"
                sink.write(written, piece)
            if not piece:
                break
            hashed.update(piece)
            written += len(piece)
        if written < ref.size:
            return written, f"{written} bytes"
        return written, None if hashed.digest() == ref.hash else "other content"

    @contextmanager
    def _opened(self, blob_id: str, offset: int, length: int | None) -> Iterator[BlobReader]:
        """A GET; of two that were opened, the one that answered first."""

        def attempt(number: int) -> tuple[ExitStack, BlobReader]:
            stack = ExitStack()
            return stack, stack.enter_context(self._blobs.get(blob_id, offset, length))

        hedger = self.hedged_gets
        stack, reader = hedger.call(attempt, lost=lambda late: late[0].close()) if hedger else attempt(0)
        with stack:
            yield reader

    # --- many blobs --------------------

    def absent(self, blob_ids: Iterable[str]) -> Mapping[str, StatemgrError]:
        """Ask for blobs, in parallel. Returns those that could not be seen, and why (MissingBlob: gone)."""

        def look(blob_id: str) -> None:
            self._blobs.stat(blob_id)

        return self.for_each(blob_ids, look)

    def remove_ttl_all(self, blob_ids: Iterable[str]) -> Mapping[str, StatemgrError]:
        """Keep blobs for ever, in parallel. Returns those it failed for, and why (MissingBlob: gone)."""
        return self.for_each(blob_ids, self._blobs.remove_ttl)

    def delete_all(self, blob_ids: Iterable[str]) -> Mapping[str, StatemgrError]:
        """Delete blobs, in parallel and with few requests. Returns those it failed for, and why."""
        wanted = list(dict.fromkeys(blob_ids))
        failed: dict[str, StatemgrError] = {}

        def delete(some: Sequence[str]) -> None:
            failed.update(self._blobs.delete_many(some))

        chunks = [tuple(wanted[start : start + _TOGETHER]) for start in range(0, len(wanted), _TOGETHER)]
        for chunk, error in self.for_each(chunks, delete).items():
            failed |= dict.fromkeys(chunk, error)
        return failed

    def for_each(self, items: Iterable[T], action: Callable[[T], None]) -> Mapping[T, StatemgrError]:
        """Do something with each of different items, in parallel. Returns those it failed for, and why."""
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
        """Wait for what runs and stop the threads. The blob store stays open."""
        self._pool.close()
        for hedger in (self.hedged_gets, self.hedged_puts):
            if hedger:
                hedger.close()

    def _buffer(self) -> memoryview:
        """This thread's own buffer."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = read_buffer(_BUFFER)
        buffer: memoryview = self._local.buffer
        return buffer
