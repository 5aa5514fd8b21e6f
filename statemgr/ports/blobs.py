"""The ports of blob stores: what adapters implement, and engines and flows use. No I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from statemgr.errors import StatemgrError


@dataclass(frozen=True, slots=True)
class FileSlice:
    """``length`` bytes of a local file from ``offset`` on, as the body of a PUT."""

    path: Path
    offset: int
    length: int


Body = bytes | FileSlice


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What a LIST or HEAD says: name, size in bytes, time of its writing and of its expiry (epoch milliseconds;
    ``expires_ms`` None when it has no TTL; ``-1`` when it has one whose end the store does not tell)."""

    blob_id: str
    size: int
    modified_ms: int
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that was begun and never ended: what it would have become, the store's own ``token`` for it, and when
    it was begun (epoch milliseconds by the store's time)."""

    blob_id: str
    token: str
    started_ms: int


class BlobReader(Protocol):
    """An open GET: ``readinto`` fills a buffer and returns how many bytes it got, 0 at the end."""

    def readinto(self, buffer: memoryview) -> int: ...

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """Write up to ``size`` bytes to ``offset`` of an open file, without passing them through this process.

        Returns: how many, 0 at the end; None where that cannot be done, and ``readinto`` can.
        """


class BlobStore(Protocol):
    """A flat store of immutable blobs under names with ``/``. Safe to call from many threads.

    Errors of every method: UnavailableError (try again), AccessDenied, and DiskFull where it is a disk.
    """

    @property
    def checks_uploads(self) -> bool:
        """True when a PUT whose content does not match the checksum sent with it is known to be refused."""

    @property
    def listing_tells_ttl(self) -> bool:
        """True when ``expires_ms`` of what :meth:`list` gives can be relied on; otherwise only :meth:`stat` knows."""

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """Write a new blob, whole or not at all, durable when it returns; expires after ``ttl_days`` if given."""

    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[BlobReader]:
        """Open a blob for reading, from ``offset`` on. Raises: MissingBlob."""

    def delete(self, blob_id: str) -> None:
        """Delete a blob; one that does not exist is no error."""

    @property
    def most_deletes(self) -> int:
        """How many blobs one request can delete."""

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Delete up to ``most_deletes`` blobs at once. Returns: those it failed for, and why."""

    def remove_ttl(self, blob_id: str) -> None:
        """Keep a blob for ever; repeating it is no error. Raises: MissingBlob."""

    def stat(self, blob_id: str) -> BlobInfo:
        """Raises: MissingBlob."""

    def list(self, prefix: str, after: str | None = None) -> Iterator[BlobInfo]:
        """Every blob whose name starts with ``prefix``, page by page, always in the same order; with ``after`` only
        those that come later than this name in it. Never used by a restore."""

    def time_ms(self) -> int:
        """What the store's own clock says, the one that ``modified_ms`` comes from (epoch milliseconds).

        Raises: InvalidError where it does not tell.
        """

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Uploads below ``prefix`` that were begun and not ended. Raises: InvalidError where it cannot tell."""

    def abandon(self, upload: UnfinishedUpload) -> None:
        """Free what an unfinished upload holds; one that has ended meanwhile is no error."""

    def probe(self) -> Sequence[str]:
        """Problems that ``doctor`` should show (no lifecycle rule, tags refused…); empty when all is well."""

    def close(self) -> None: ...
