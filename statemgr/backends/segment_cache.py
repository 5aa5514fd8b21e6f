"""Segments on this machine: those that this task stored itself, kept for a restart, and those fetched for a restore.

Touches the store's own directory of segments and the scratch directory. All of it is a cache: what is used is verified
by its hash, and what is not here is fetched.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from statemgr.backends.context import BackendContext
from statemgr.backends.files import disk_errors
from statemgr.backends.transfer_plan import Fetch
from statemgr.errors import StatemgrError
from statemgr.local import hash_file
from statemgr.model.chain import ChainSegment
from statemgr.model.snapshot import FileIndex
from statemgr.ports import StoreIdentity

log = logging.getLogger(__name__)
#: Segments, and bytes of segments, that are fetched at a time: the next ones while these are applied.
_AT_ONCE = 32
_BYTES_AT_ONCE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A segment that is here, whole. ``fetched`` bytes came from the blob store for it."""

    segment: ChainSegment
    fetched: int
    open: Callable[[], BinaryIO]


class SegmentCache:
    """The segments of one store of one task."""

    def __init__(self, context: BackendContext, identity: StoreIdentity) -> None:
        self._context = context
        self._directory = context.task_directory(identity.task) / identity.store / "segments"

    def keep(self, segment: ChainSegment, data: bytes | memoryview) -> None:
        """Keep the bytes of a segment that was stored. Failing is no error."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path(segment).write_bytes(data)
        except OSError as error:
            log.warning("a segment is not kept on this machine: %s", error)

    def keep_only(self, segments: Collection[ChainSegment]) -> None:
        """Forget all others. Failing is no error."""
        names = {self._path(segment).name for segment in segments if segment.blob is not None}
        with suppress(OSError):
            for name in os.listdir(self._directory):
                if name not in names:
                    (self._directory / name).unlink()

    def bring(self, segments: Sequence[ChainSegment]) -> Iterator[LocalSegment]:
        """Bring segments here, in order; each is verified, and of use until the next is asked for.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied, DiskFull.
        """
        groups = list(_grouped(segments))
        with ExitStack() as undo:
            pool = undo.enter_context(ThreadPoolExecutor(1, thread_name_prefix="statemgr-segments"))
            coming = pool.submit(self._fetch, groups[0]) if groups else None
            for number in range(len(groups)):
                assert coming is not None
                here = coming.result()
                if number + 1 < len(groups):
                    coming = pool.submit(self._fetch, groups[number + 1])
                for local, scratch in here:
                    yield local
                    if scratch is not None:
                        scratch.unlink(missing_ok=True)

    def _fetch(self, segments: Sequence[ChainSegment]) -> list[tuple[LocalSegment, Path | None]]:
        """Returns the segments, each with the scratch file that goes after its use, if one."""
        found: list[tuple[LocalSegment, Path | None]] = []
        fetches = []
        for segment in segments:
            if segment.blob is None:
                found.append((LocalSegment(segment, 0, _in_memory(segment.inline or b"")), None))
                continue
            path, scratch = self._path(segment), None
            if not self._is_here(segment, path):
                path = scratch = self._context.scratch() / f"segment-{self._context.ids.token()}"
                ref = segment.blob
                fetches.append(Fetch(FileIndex(path.name, ref.size, ref.hash, parts=(ref,)), path))
            found.append((LocalSegment(segment, segment.size if scratch else 0, _from_file(path)), scratch))
        self._context.transfer().fetch_files(fetches)
        return found

    def _is_here(self, segment: ChainSegment, path: Path) -> bool:
        assert segment.blob is not None
        try:
            return hash_file(path) == (segment.blob.size, segment.blob.hash)
        except (OSError, StatemgrError):
            return False

    def _path(self, segment: ChainSegment) -> Path:
        assert segment.blob is not None
        return self._directory / f"{segment.blob.hash.hex()}.segment"


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
            return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=1 << 20)

    return opened
