"""Downloads: blobs become verified files or bytes, in parallel parts.

Each part is hashed as it arrives. A blob that has the wrong bytes is read once more, because a network may have altered
them. Touches the files that it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from statemgr.errors import ANOTHER_COPY, CorruptBlob, RetryableError
from statemgr.local.machine import processors
from statemgr.local.sparse_file import has_hole
from statemgr.local.transfer_files import NewFile, SourceFile, write_new
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash, hasher, read_buffer
from statemgr.model.snapshot import FileIndex
from statemgr.os_errors import limit_behind
from statemgr.ports import BlobReader, BlobStore, Progress, no_progress
from statemgr.transfer.compression import DamagedFrame, FrameReader
from statemgr.transfer.hedging import Hedger
from statemgr.transfer.pool import Batch, Counter, Mover, Movers, Pool

#: Most bytes that are read, hashed and written at once, or copied by the system and then read back and hashed.
PIECE = 1024 * 1024
#: Most bytes of neighbouring files in one blob that are fetched together: they are in memory meanwhile.
RUN_SIZE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetch:
    """A file of an index and the path to write it to, which must not exist yet.

    ``continued``: an earlier try left the file at its full size; correct parts of it are kept.
    """

    file: FileIndex
    target: Path
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Files that follow each other in one blob, from ``offset`` on: ``size`` bytes for one request."""

    blob_id: str
    offset: int
    size: int
    fetches: tuple[Fetch, ...]


class Downloads:
    """Fetches files and bytes from ``blobs``. Safe to call from many threads.

    Args:
        hedged_gets: opens a second GET when the first one is slow; None opens one.
    """

    def __init__(self, blobs: BlobStore, pool: Pool, hedged_gets: Hedger | None) -> None:
        self._blobs = blobs
        self._pool = pool
        self._local = threading.local()
        self._movers = Movers(pool.clock, processors())
        self.hedged_gets = hedged_gets

    def fetch_files(self, fetches: Sequence[Fetch], progress: Progress = no_progress) -> int:
        """Write files, part by part in parallel, verified; the smallest first. Writes to no existing file, and syncs
        none.

        Returns: the bytes that were already there, in files that are continued.
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

    def fetch_blob(self, ref: BlobRef, target: Path) -> None:
        """Write one blob to a new file, verified. Raises: as :meth:`fetch_files`."""
        self.fetch_files([Fetch(FileIndex(target.name, ref.size, ref.hash, parts=(ref,)), target)])

    def get_bytes(self, ref: BlobRef, limit: int, frame: int = 0) -> bytes:
        """Read one blob of at most ``limit`` bytes, verified. ``frame``: the size of the frame that it is stored in.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
        """
        if ref.size > limit:
            raise CorruptBlob(f"a blob of {ref.size} bytes is refused: the limit is {limit}", blob=ref.blob_id)
        destination = _IntoMemory()
        self._read_verified(ref, destination, frame)
        return bytes(destination.data)

    def get_range(self, ref: BlobRef, offset: int, size: int) -> memoryview:
        """Read ``size`` bytes of what ``ref`` names, from ``offset`` on. The caller has to verify them.

        Raises: MissingBlob, CorruptBlob (it ends before), UnavailableError, AccessDenied.
        """
        data, got = self._read_range(ref.blob_id, (ref.offset or 0) + offset, size)
        if got < size:
            raise CorruptBlob(f"the blob ends {size - got} bytes too early", blob=ref.blob_id, hint=ANOTHER_COPY)
        return data

    def read_back(self, ref: BlobRef, stored: int) -> None:
        """Verify every byte of a blob, or of its part that ``ref`` names, which takes ``stored`` bytes there.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
        """
        self._read_verified(ref, _Nowhere(), stored if stored != ref.size else 0)

    def hash_of(self, path: Path, offset: int, length: int) -> bytes:
        """XXH3-128 of a part of a local file. Raises: CorruptError if the file is shorter."""
        digest = hasher()
        with SourceFile(path) as source:
            for piece in source.pieces(offset, length, self._buffer()):
                digest.update(piece)
        return digest.digest()

    # --- files ---------------------------------------------------------------------------------------------------

    def _fetch_run(self, batch: Batch, run: Run, done: Counter) -> None:
        batch.check()
        data, _ = self._read_range(run.blob_id, run.offset, run.size)
        offset = 0
        for fetch in run.fetches:
            content = data[offset : offset + fetch.file.size]
            offset += fetch.file.size
            part = fetch.file.parts[0]
            if content_hash(content) == part.hash == fetch.file.hash:
                write_new(fetch.target, content)
                done.add(len(content))
            else:  # read it once more by itself, which tells what is wrong
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
        if fetch.continued and self.is_there(target.path, offset, part.size, part.hash):
            kept.add(part.size)
            done.add(part.size)
        else:
            self.fetch_part(file, number, target, offset, done, batch.check)
        # the only part of a file has been hashed already
        whole_is_known = len(file.parts) == 1 and part.hash == file.hash
        if target.part_done() and not whole_is_known and self.hash_of(target.path, 0, file.size) != file.hash:
            raise CorruptBlob(
                "each part of a file is right, but together they are not the file",
                blob=file.parts[0].blob_id,
                file=file.name,
                hint=ANOTHER_COPY,
            )

    def is_there(self, path: Path, offset: int, size: int, digest: bytes) -> bool:
        """Whether a file has bytes with this hash at ``offset``. Raises: CorruptFile if the file is shorter."""
        try:
            return not has_hole(path, offset, size) and self.hash_of(path, offset, size) == digest
        except RetryableError as error:
            if limit_behind(error):
                raise
            return False  # the disk cannot read them

    def fetch_part(
        self, file: FileIndex, number: int, target: NewFile, offset: int, done: Counter, check: Callable[[], None]
    ) -> None:
        """Write a part of a file, verified, from its beginning on. ``check`` is called before each piece, and ``done``
        grows after it. Raises: as :meth:`fetch_files`, and what ``check`` raises."""
        with target.part() as fd:
            destination = _IntoFile(target, fd, offset, self._buffer(), check, done)
            self._read_verified(file.parts[number], destination, file.frame_of(number))

    # --- one blob ------------------------------------------------------------------------------------------------

    def _read_range(self, blob_id: str, offset: int, size: int) -> tuple[memoryview, int]:
        """A buffer of ``size`` bytes with a part of a blob, and how many bytes arrived. Verifies nothing."""
        data, got = read_buffer(size), 0
        with self._opened(blob_id, offset, size) as reader:
            while got < size and (more := reader.readinto(data[got:])):
                got += more
        return data, got

    def _read_verified(self, ref: BlobRef, destination: _Nowhere, frame: int = 0) -> None:
        """``frame``: the size of the zstandard frame that the blob holds; 0 if it holds the bytes themselves."""
        # a GET of a whole blob has no length, so that bytes beyond its size are noticed
        length = frame or (None if ref.offset is None else ref.size)
        for last in (False, True):
            with self._opened(ref.blob_id, ref.offset or 0, length) as reader:
                written, problem = self._read_once(FrameReader(reader) if frame else reader, ref, destination)
            if problem is None:
                return
            destination.restart(written)
            if last:
                raise CorruptBlob(
                    f"the blob has {problem}, but {ref.size} bytes with a known hash were written",
                    blob=ref.blob_id,
                    hint=ANOTHER_COPY,
                )

    def _read_once(self, reader: BlobReader, ref: BlobRef, destination: _Nowhere) -> tuple[int, str | None]:
        """Returns: how many bytes the destination got, and what is wrong with them."""
        buffer, hashed, written, mover = self._buffer(), hasher(), 0, Mover(self._movers)
        while True:
            wanted = ref.size - written
            piece = destination.move(reader, written, wanted) if wanted else None
            if piece is not None:
                hashed.update(piece)
            else:
                with mover:
                    try:
                        piece = buffer[: reader.readinto(buffer)]
                    except DamagedFrame:
                        return written, "a damaged frame"
                    if len(piece) > wanted:
                        return written, "more bytes"
                    destination.write(written, piece)
                    hashed.update(piece)
            if not piece:
                break
            written += len(piece)
        if written < ref.size:
            return written, f"{written} bytes"
        return written, None if hashed.digest() == ref.hash else "other content"

    @contextmanager
    def _opened(self, blob_id: str, offset: int, length: int | None) -> Iterator[BlobReader]:
        """A GET; if two were opened, the one that answered first."""

        def attempt(number: int) -> tuple[ExitStack, BlobReader]:
            stack = ExitStack()
            return stack, stack.enter_context(self._blobs.get(blob_id, offset, length))

        hedger = self.hedged_gets
        stack, reader = hedger.call(attempt, lost=lambda late: late[0].close()) if hedger else attempt(0)
        with stack:
            yield reader

    def _buffer(self) -> memoryview:
        """This thread's own buffer."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = read_buffer(PIECE)
        buffer: memoryview = self._local.buffer
        return buffer


# --- where a verified GET writes to ------------------------------------------------------------------------------


class _Nowhere:
    """Drops the bytes, which are only verified. Positions are counted from 0."""

    def write(self, position: int, piece: memoryview) -> None:
        """Take a piece that was read."""

    def move(self, reader: BlobReader, position: int, wanted: int) -> memoryview | None:
        """Copy up to ``wanted`` bytes directly from the reader. Returns: those bytes; None if that is impossible."""
        return None

    def restart(self, written: int) -> None:
        """Forget the ``written`` bytes so far: they were wrong and are read again."""


class _IntoMemory(_Nowhere):
    """Keeps the bytes in ``data``."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, position: int, piece: memoryview) -> None:
        self.data.extend(piece)

    def restart(self, written: int) -> None:
        self.data.clear()


class _IntoFile(_Nowhere):
    """Writes to a part of a file, from ``offset`` on. Raises what ``check`` raises."""

    def __init__(
        self, target: NewFile, fd: int, offset: int, buffer: memoryview, check: Callable[[], None], done: Counter
    ) -> None:
        self._target = target
        self._fd = fd
        self._offset = offset
        self._buffer = buffer
        self._check = check
        self._done = done

    def write(self, position: int, piece: memoryview) -> None:
        self._check()
        self._target.write(self._fd, self._offset + position, piece)
        self._done.add(len(piece))

    def move(self, reader: BlobReader, position: int, wanted: int) -> memoryview | None:
        """The system copies from file to file, and the copied bytes are read back."""
        self._check()
        offset = self._offset + position
        size = reader.copy_to(self._fd, offset, min(wanted, len(self._buffer)))
        if size is None:
            return None
        piece = self._buffer[:size]
        self._target.read(self._fd, offset, piece)
        self._done.add(size)
        return piece

    def restart(self, written: int) -> None:
        self._done.add(-written)


def runs(fetches: Iterable[Fetch]) -> tuple[list[Run], list[Fetch]]:
    """Combine files that one request can fetch. Returns: the runs of two files or more, and all other files."""
    slices: list[tuple[str, int, Fetch]] = []
    others: list[Fetch] = []
    for fetch in fetches:
        parts = fetch.file.parts
        packed = len(parts) == 1 and parts[0].offset is not None and 0 < parts[0].size <= RUN_SIZE
        if packed and not fetch.continued:
            assert parts[0].offset is not None
            slices.append((parts[0].blob_id, parts[0].offset, fetch))
        else:
            others.append(fetch)
    found: list[Run] = []
    for blob_id, offset, fetch in sorted(slices, key=lambda piece: piece[:2]):
        last = found[-1] if found else None
        size = fetch.file.size
        if last and last.blob_id == blob_id and last.offset + last.size == offset and last.size + size <= RUN_SIZE:
            found[-1] = Run(blob_id, last.offset, last.size + size, (*last.fetches, fetch))
        else:
            found.append(Run(blob_id, offset, size, (fetch,)))
    others += (run.fetches[0] for run in found if len(run.fetches) == 1)
    return [run for run in found if len(run.fetches) > 1], others
