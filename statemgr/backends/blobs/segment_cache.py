"""Segments on this machine: those that this task stored itself, kept for a restart, and those fetched for a restore.

Touches the store's own directory of segments and the scratch directory. All of it is a cache: each segment is verified
by its hash before use, and fetched if it is missing.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from statemgr.errors import InvalidError
from statemgr.local import durable, hash_file
from statemgr.model.chain import ChainSegment
from statemgr.model.segment import is_table, read_table
from statemgr.model.snapshot import FileIndex
from statemgr.os_errors import disk_errors
from statemgr.ports import StoreIdentity
from statemgr.services import Services
from statemgr.transfer.downloads import Fetch

log = logging.getLogger(__name__)
#: Segments and bytes of one group that is fetched together, and the number of groups: while one is applied, the others
#: are fetched and unpacked.
_AT_ONCE, _GROUPS = 16, 2
#: The names of files here. Files with other names are not ours, and stay.
_OURS = re.compile(r"[0-9a-f]{32}\.segment\Z")
_BYTES_AT_ONCE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A complete segment on this machine. ``fetched`` bytes came from the blob store.

    Attributes:
        open: opens it.
        table: the table that is its body, verified, in a scratch file that nobody else has; None for records.
        deleted: the keys that the table deletes.
    """

    segment: ChainSegment
    fetched: int
    open: Callable[[], BinaryIO]
    table: Path | None = None
    deleted: Sequence[bytes] = ()


class SegmentCache:
    """The segments of one store of one task."""

    def __init__(self, services: Services, identity: StoreIdentity) -> None:
        self._services = services
        self._levels = (services.task_directory(identity.task), identity.store, "segments")
        self._directory = Path(*self._levels)

    def keep(self, segment: ChainSegment, data: bytes | memoryview) -> None:
        """Keep the bytes of a segment that was stored. A failure is no error."""
        try:
            durable.make_private(*self._levels)
            self._path(segment).unlink(missing_ok=True)
            with durable.create(self._path(segment)) as file:
                file.write(data)
        except (OSError, InvalidError) as error:
            log.warning("a segment was not cached on this machine: %s", error)

    def keep_only(self, segments: Collection[ChainSegment]) -> None:
        """Remove all others. A failure is no error."""
        names = {self._path(segment).name for segment in segments if segment.blob is not None}
        with suppress(OSError, InvalidError):
            for name in os.listdir(durable.check_private(*self._levels)):
                if name not in names and _OURS.match(name):
                    (self._directory / name).unlink()

    @contextmanager
    def brought(self, segments: Sequence[ChainSegment]) -> Iterator[Iterator[LocalSegment]]:
        """Yield local copies of segments, in order, each verified. Records are valid until the next segment is asked
        for, and tables until the block ends.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied, DiskFull; so does the iterator.
        """
        scratch = self._services.scratch_file("segments")
        with disk_errors(scratch):
            scratch.mkdir(0o700)
        try:
            with closing(self._bring(segments, scratch)) as found:
                yield found
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _bring(self, segments: Sequence[ChainSegment], scratch: Path) -> Generator[LocalSegment]:
        groups = _grouped(segments)
        with self._services.executors.pool("segments", _GROUPS) as pool:
            coming = deque(pool.submit(self._fetch, group, scratch) for group in islice(groups, _GROUPS))
            while coming:
                here = coming.popleft().result()
                coming.extend(pool.submit(self._fetch, group, scratch) for group in islice(groups, 1))
                for local in here:
                    yield local
                    _path_in(scratch, local.segment).unlink(missing_ok=True)

    def _fetch(self, segments: Sequence[ChainSegment], scratch: Path) -> list[LocalSegment]:
        found: list[LocalSegment] = []
        fetches = []
        for segment in segments:
            if segment.blob is None:
                found.append(LocalSegment(segment, 0, _in_memory(segment.inline or b"")))
                continue
            path, ref = _path_in(scratch, segment), segment.blob
            is_here = self._linked(segment, path)
            if not is_here:
                fetches.append(Fetch(FileIndex(path.name, ref.size, ref.hash, parts=(ref,)), path))
            found.append(LocalSegment(segment, 0 if is_here else ref.size, _from_file(path)))
        self._services.transfer().fetch_files(fetches)
        return [_unpacked(local, scratch) for local in found]

    def _linked(self, segment: ChainSegment, target: Path) -> bool:
        """Whether there is a complete local copy. If so, makes a hard link to it, because other processes may remove
        the copy."""
        assert segment.blob is not None
        try:
            durable.check_private(*self._levels)
            os.link(self._path(segment), target, follow_symlinks=False)
        except (OSError, InvalidError):
            return False
        try:
            if hash_file(target) == (segment.blob.size, segment.blob.hash):
                return True
        except OSError:
            pass
        target.unlink(missing_ok=True)
        return False

    def _path(self, segment: ChainSegment) -> Path:
        assert segment.blob is not None
        return self._directory / f"{segment.blob.hash.hex()}.segment"


def _unpacked(local: LocalSegment, scratch: Path) -> LocalSegment:
    """Write the table of a segment to a file of its own: ingesting a table moves the file, and may write to it."""
    segment, path = local.segment, _path_in(scratch, local.segment).with_suffix(".sst")
    with local.open() as source:
        if not is_table(source):
            return local
        with disk_errors(path), durable.create(path) as sink:
            blob_id = segment.blob.blob_id if segment.blob else None
            deleted = read_table(source, sink, segment.first, segment.end, blob_id)
    return replace(local, table=path, deleted=deleted)


def _path_in(scratch: Path, segment: ChainSegment) -> Path:
    return scratch / str(segment.end)


def _grouped(segments: Sequence[ChainSegment]) -> Iterator[list[ChainSegment]]:
    group: list[ChainSegment] = []
    for segment in segments:
        if group and (len(group) == _AT_ONCE or sum(s.size for s in group) + segment.size > _BYTES_AT_ONCE):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _in_memory(data: bytes) -> Callable[[], BinaryIO]:
    return lambda: io.BytesIO(data)


def _from_file(path: Path) -> Callable[[], BinaryIO]:
    def opened() -> BinaryIO:
        with disk_errors(path):
            return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=1 << 16)

    return opened
