"""Counts requests to any blob store, and the bytes of their bodies. Each attempt of a retried request counts.

A GET counts when it is opened. If its body breaks off, it also counts as a failed ``read``.

A count has a name and labels: ``("requests", operation, outcome)``, ``("bytes", direction)``, ``("retries",
operation)`` or ``("hedges", operation)``. ``statemgr/telemetry/metric_declarations.py`` says what they mean.
``("restored", backend)`` counts the bytes of a restore that arrive after its store is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from statemgr.blobs.body import body_size
from statemgr.blobs.names import BlobExists
from statemgr.errors import AccessDenied, DiskFull, MissingBlob, StatemgrError, UnavailableError
from statemgr.ports import (
    BlobAdministration,
    BlobInfo,
    BlobPage,
    BlobReader,
    BlobStore,
    Body,
    CopyingBlobStore,
    UnfinishedUpload,
)

T = TypeVar("T")
#: What a request can end with. The first one that fits an error.
OUTCOMES: Mapping[str, type[BaseException]] = {
    "missing": MissingBlob,
    "unavailable": UnavailableError,
    "denied": AccessDenied,
    "full": DiskFull,
    "error": BaseException,
}
#: Operations of requests.
OPERATIONS = ("put", "get", "read", "stat", "list", "copy", "delete", "remove-ttl")
Counted = Mapping[tuple[str, ...], int]


class BlobCounts:
    """Counts since the process began. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}
        self._taken: dict[tuple[str, ...], int] = {}

    def add(self, *name: str, by: int = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def request(self, operation: str, error: BaseException | None = None) -> None:
        """Count one request by its outcome."""
        outcome = "ok" if error is None else next(name for name, kind in OUTCOMES.items() if isinstance(error, kind))
        self.add("requests", operation, outcome)

    def merge(self, counted: Counted) -> None:
        """Add the counts of another process."""
        for name, number in counted.items():
            self.add(*name, by=number)

    def read(self) -> Counted:
        """All counts."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> Counted:
        """What was counted since the last call, for a process that reports to another one."""
        with self._lock:
            new = {name: number - self._taken.get(name, 0) for name, number in self._counts.items()}
            self._taken = dict(self._counts)
        return {name: number for name, number in new.items() if number}


_of_jobs: dict[str, BlobCounts] = {}
_lock = threading.Lock()


def counts_of(job: str) -> BlobCounts:
    """The counts of a job (``<name>/<ID>``) in this process. All its clients of the blob store share them."""
    with _lock:
        return _of_jobs.setdefault(job, BlobCounts())


class CountingBlobStore:
    """A blob store whose requests are counted in ``counts``."""

    def __init__(self, inner: BlobStore, counts: BlobCounts) -> None:
        self.inner = inner
        self._counts = counts

    @property
    def checks_uploads(self) -> bool:
        return self.inner.checks_uploads

    @property
    def administration(self) -> CountingAdministration:
        return CountingAdministration(self.inner.administration, self._count)

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        self._count("put", lambda: self.inner.put(blob_id, body, ttl_days=ttl_days))
        self._counts.add("bytes", "upload", by=body_size(body))

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        inner = self.inner
        if not isinstance(inner, CopyingBlobStore):
            return False
        return self._count("copy", lambda: inner.copy_from(source, wanted, blob_id, ttl_days=ttl_days))

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        opened = self.inner.get(blob_id, offset, length)
        reader = _Counted(self._count("get", opened.__enter__))
        try:
            yield reader
        except BaseException as error:
            if reader.error is not None:
                self._counts.request("read", reader.error)
            if not opened.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            if reader.error is not None:
                self._counts.request("read", reader.error)
            opened.__exit__(None, None, None)
        finally:
            if reader.size:
                self._counts.add("bytes", "download", by=reader.size)

    def stat(self, blob_id: str) -> BlobInfo:
        return self._count("stat", lambda: self.inner.stat(blob_id))

    def remove_ttl(self, blob_id: str) -> None:
        self._count("remove-ttl", lambda: self.inner.remove_ttl(blob_id))

    def delete(self, blob_id: str) -> None:
        self._count("delete", lambda: self.inner.delete(blob_id))

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        failed = self._count("delete", lambda: self.inner.delete_many(blob_ids))
        for error in failed.values():
            self._counts.request("delete", error)
        return failed

    def close(self) -> None:
        self.inner.close()

    def _count(self, operation: str, request: Callable[[], T]) -> T:
        try:
            result = request()
        except BlobExists:  # an answer, which a repeated PUT expects
            self._counts.request(operation)
            raise
        except BaseException as error:
            self._counts.request(operation, error)
            raise
        self._counts.request(operation)
        return result


class CountingAdministration:
    """The administration of a store. Counts pages of listings; the rest is rare."""

    def __init__(self, inner: BlobAdministration, count: Callable[[str, Callable[[], BlobPage]], BlobPage]) -> None:
        self._inner = inner
        self._count = count

    @property
    def listing_tells_ttl(self) -> bool:
        return self._inner.listing_tells_ttl

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        return self._count("list", lambda: self._inner.list(prefix, token))

    def time_ms(self) -> int:
        return self._inner.time_ms()

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        return self._inner.unfinished(prefix)

    def abandon(self, upload: UnfinishedUpload) -> None:
        self._inner.abandon(upload)

    def probe(self) -> Sequence[str]:
        return self._inner.probe()

    def fix(self) -> Sequence[str]:
        return self._inner.fix()


class _Counted:
    """An open GET, with the bytes that arrived and the error that broke it off."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self.size = 0
        self.error: BaseException | None = None

    def readinto(self, buffer: memoryview) -> int:
        try:
            size = self._reader.readinto(buffer)
        except BaseException as error:
            self.error = error
            raise
        self.size += size
        return size

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        copied = self._reader.copy_to(fd, offset, size)
        self.size += copied or 0
        return copied
