"""Copies blobs of one job under names of another, for ``statemgr copy``. Every copy has a TTL.

Steps of :meth:`BlobCopies.run`:

1. list what is below the new job's prefix: a blob without a TTL shows that the job had state
2. leave out the blobs that an earlier run has copied whole and recently; delete what it left otherwise
3. copy each of the others inside the store, or stream it through this machine if the store cannot copy it. The size
   of each is checked. What was streamed is read back and verified; what the store copied is not read
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from statemgr.backends.blobs.branches import Part
from statemgr.errors import CorruptBlob, MissingBlob, StatemgrError
from statemgr.flows.committing.limits import SHORTEST_GRACE_MS
from statemgr.os_errors import disk_errors
from statemgr.phases import Phase, announce
from statemgr.ports import BlobInfo, CopyingBlobStore, FileSlice, Progress, list_blobs
from statemgr.services import Services
from statemgr.transfer.pool import Counter

_PIECE = 1024 * 1024
#: Blobs that are asked for before the next ones are listed.
_CHUNK = 256


def published_blob(services: Services) -> BlobInfo | None:
    """A blob below the job's prefix that has no TTL, so that some checkpoint references it or has done so."""
    if services.config.blob_uri is None:
        return None
    store, found = services.blobs(), list[BlobInfo]()
    listed = list_blobs(store, _prefix(services))
    if store.administration.listing_tells_ttl:
        return next((blob for blob in listed if blob.expires_ms is None), None)

    def look(blob: BlobInfo) -> None:
        if store.stat(blob.blob_id).expires_ms is None:
            found.append(blob)

    while not found and (some := list(islice(listed, _CHUNK))):
        for error in services.transfer().for_each(some, look).values():
            if not isinstance(error, MissingBlob):
                raise error
    return found[0] if found else None


def _prefix(services: Services) -> str:
    return f"{services.config.job_key}/"


@dataclass
class Moved:
    """How many blobs were copied inside the store, streamed, and found from an earlier run; bytes of the first two.
    ``names``: the new names of all."""

    names: Collection[str] = ()
    inside: int = 0
    streamed: int = 0
    found: int = 0
    size: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)


@dataclass(frozen=True)
class BlobCopies:
    """``blobs``: new name → old name. ``parts``: new name → what a restore reads from it."""

    source: Services
    target: Services
    blobs: Mapping[str, str]
    parts: Mapping[str, Sequence[Part]]

    def run(self, others: Sequence[str], progress: Progress) -> tuple[Moved, Mapping[str, StatemgrError]]:
        """Copy the blobs.

        Args:
            others: names of blobs that the caller is about to write itself. Old ones of an earlier run are deleted.

        Returns: what was done, and the blobs that are missing or corrupt at the source.
        Raises: RetryableError, AccessDenied, DiskFull.
        """
        if not self.blobs and not others:
            return Moved(), {}
        moved, done = Moved(self.blobs.keys()), Counter()
        there = self._left_by_earlier_run({*self.blobs, *others})
        copied = self.target.transfer().for_each(
            list(self.blobs), partial(self._copy_one, there, moved, done, progress)
        )
        missing = {blob: error for blob, error in copied.items() if error.exit_status == MissingBlob.exit_status}
        for blob, error in copied.items():
            if blob not in missing:
                raise error
        return moved, missing

    def _left_by_earlier_run(self, wanted: set[str]) -> dict[str, BlobInfo]:
        """Steps 1 and 2. Returns: the copies that may be used again."""
        store = self.target.blobs()
        found = {blob.blob_id: blob for blob in list_blobs(store, _prefix(self.target)) if blob.blob_id in wanted}
        if not found:
            return {}  # the target's directory may not exist yet, so it has no clock
        now_ms, limit_ms = store.administration.time_ms(), SHORTEST_GRACE_MS // 4
        old = {name for name, blob in found.items() if now_ms - blob.modified_ms > limit_ms}
        for error in self.target.transfer().delete_all(old).values():
            raise error
        return {name: blob for name, blob in found.items() if name not in old}

    def _copy_one(
        self, there: Mapping[str, BlobInfo], moved: Moved, done: Counter, progress: Progress, name: str
    ) -> None:
        """Step 3 for one blob. Raises: MissingBlob, CorruptBlob, RetryableError, AccessDenied, DiskFull."""
        source, target = self.source.blobs(), self.target.blobs()
        wanted = source.stat(self.blobs[name])
        for ref, stored in self.parts[name]:
            if problem := ref.size_problem(stored, wanted.size):
                raise CorruptBlob(problem, blob=wanted.blob_id)
        if name in there and there[name].size == wanted.size:
            with moved.lock:
                moved.found += 1
        else:
            if name in there:
                target.delete(name)
            announce(Phase.COPY_BLOB, name, self.target.config.job_key)
            ttl_days = self.target.config.ttl_days
            inside = isinstance(target, CopyingBlobStore) and target.copy_from(source, wanted, name, ttl_days=ttl_days)
            if not inside:
                self._stream(wanted, name, ttl_days)
            with moved.lock:
                moved.inside += inside
                moved.streamed += not inside
                moved.size += wanted.size
        done.add(1)
        progress("copy blobs", done.value, len(self.blobs))

    def _stream(self, wanted: BlobInfo, name: str, ttl_days: int) -> None:
        path = self.target.scratch_file("copied")
        try:
            with disk_errors(path), path.open("xb") as file, self.source.blobs().get(wanted.blob_id) as reader:
                buffer = memoryview(bytearray(min(_PIECE, wanted.size + 1)))
                while size := reader.readinto(buffer):
                    file.write(buffer[:size])
            self.target.blobs().put(name, FileSlice(path, 0, wanted.size), ttl_days=ttl_days)
        finally:
            path.unlink(missing_ok=True)
        for ref, stored in self.parts[name]:
            self.target.transfer().read_back(ref, stored)
