"""The ports of blob stores: what adapters implement, and engines and flows use. No I/O here.

:class:`BlobStore` moves blobs; :class:`BlobAdministration` looks at the store as a whole, for ``gc`` and ``doctor``. A
package adds a store by an entry point ``statemgr.blob_stores``, named like the URI's scheme, that refers to an
:data:`OpenBlobStore`. :mod:`statemgr.testing.conformance` has the tests that every store passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from statemgr.config import JobConfig
from statemgr.errors import StatemgrError
from statemgr.ports.clock import Clock


@dataclass(frozen=True, slots=True)
class FileSlice:
    """``length`` bytes of a local file from ``offset`` on, as the body of a PUT."""

    path: Path
    offset: int
    length: int


Body = bytes | FileSlice


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's name, its size in bytes, and when it was written and expires (epoch milliseconds).

    ``expires_ms`` is None without a TTL, and ``-1`` when the store does not know the end of the TTL.
    """

    blob_id: str
    size: int
    modified_ms: int
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class BlobPage:
    """Some blobs of a listing, and the token that asks for the next page; None at the end."""

    blobs: Sequence[BlobInfo]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that was begun and never ended: the blob that it would have become, the store's own ``token`` for the
    upload, and when it was begun (epoch milliseconds by the store's clock)."""

    blob_id: str
    token: str
    started_ms: int


class BlobReader(Protocol):
    """An open GET: ``readinto`` fills a buffer and returns how many bytes it got, 0 at the end."""

    def readinto(self, buffer: memoryview) -> int: ...

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """Let the system copy up to ``size`` bytes to ``offset`` of an open file.

        Returns: how many bytes were copied, 0 at the end; None where only ``readinto`` works.
        """


class BlobStore(Protocol):
    """A flat store of immutable blobs under names with ``/``. Safe to call from many threads.

    Every method may raise UnavailableError (a retry may help), AccessDenied, and DiskFull where the store has a disk.
    InvalidError refuses a name that :func:`statemgr.blobs.check_blob_id` does not accept.
    """

    @property
    def checks_uploads(self) -> bool:
        """True when the store is known to refuse a PUT whose content does not match the checksum sent with it."""

    @property
    def administration(self) -> BlobAdministration:
        """The store as a whole."""

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """Write a new blob, whole or not at all, durable on return. It expires after ``ttl_days`` if given.

        Raises: :class:`statemgr.blobs.BlobExists`.
        """

    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[BlobReader]:
        """Open a blob for reading from ``offset`` on. Raises: MissingBlob."""

    def stat(self, blob_id: str) -> BlobInfo:
        """Raises: MissingBlob."""

    def remove_ttl(self, blob_id: str) -> None:
        """Keep a blob for ever; a second call changes nothing. Raises: MissingBlob."""

    def delete(self, blob_id: str) -> None:
        """Delete a blob; one that does not exist is no error."""

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Delete blobs with as few requests as possible. Returns: the blobs that it failed for, and why."""

    def close(self) -> None:
        """Close connections; requests in progress may end with UnavailableError."""


class BlobAdministration(Protocol):
    """What ``gc``, ``doctor`` and first starts ask of a store. Raises as :class:`BlobStore`."""

    @property
    def listing_tells_ttl(self) -> bool:
        """True when :meth:`list` fills ``expires_ms`` in; otherwise only :meth:`BlobStore.stat` does."""

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        """A page of the blobs whose names start with ``prefix``, in any order. No restore calls it.

        Args:
            token: of the page before; None asks for the first page.
        """

    def time_ms(self) -> int:
        """The store's own clock, the one behind ``modified_ms`` (epoch milliseconds).

        Raises: InvalidError where the store does not tell.
        """

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Uploads below ``prefix`` that were begun and not ended. Raises: InvalidError where the store cannot tell."""

    def abandon(self, upload: UnfinishedUpload) -> None:
        """Free what an unfinished upload holds; one that has ended meanwhile is no error."""

    def probe(self) -> Sequence[str]:
        """Problems that ``doctor`` shows; empty when all is well. A text that starts with ``note:`` needs no action."""

    def fix(self) -> Sequence[str]:
        """Set up what :meth:`probe` misses, as far as the store can. Returns: what is set up now, for people."""


#: Opens the store of a ``blob.store.uri``; the job's retries and verification are added around it.
OpenBlobStore = Callable[[str, JobConfig, Clock], BlobStore]


def list_blobs(store: BlobStore, prefix: str) -> Iterator[BlobInfo]:
    """Every blob whose name starts with ``prefix``, page by page, in the store's order."""
    token = None
    while True:
        page = store.administration.list(prefix, token)
        yield from page.blobs
        if (token := page.next_token) is None:
            return
