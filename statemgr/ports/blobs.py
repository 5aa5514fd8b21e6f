"""The ports of blob stores: what adapters implement, and engines and flows use. No I/O here.

:class:`BlobStore` moves blobs. :class:`BlobAdministration` is for work on the whole store, such as ``gc`` and
``doctor``. A package adds a store with an entry point of the group ``statemgr.blob_stores``. The entry point has the
name of the URI's scheme and refers to an :data:`OpenBlobStore`. :mod:`statemgr.testing.conformance` has the tests that
every store passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from statemgr.config import JobConfig
from statemgr.errors import StatemgrError
from statemgr.ports.local import Clock


@dataclass(frozen=True, slots=True)
class FileSlice:
    """``length`` bytes of a local file from ``offset`` on, as the body of a PUT. A PUT of bytes with another hash than
    ``digest`` (XXH3-128, if it is known) fails."""

    path: Path
    offset: int
    length: int
    digest: bytes | None = None


Body = bytes | FileSlice


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's name, its size in bytes, and when it was written and expires (epoch milliseconds).

    ``expires_ms`` is None without a TTL, and ``-1`` if the store does not know the end of the TTL.
    """

    blob_id: str
    size: int
    modified_ms: int
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class BlobPage:
    """Some blobs of a listing, and the token of the next page. None at the end."""

    blobs: Sequence[BlobInfo]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload that began and never ended: the blob that it was for, the store's ``token`` for the upload, and when it
    began (epoch milliseconds by the store's clock)."""

    blob_id: str
    token: str
    started_ms: int


class BlobReader(Protocol):
    """An open GET. ``readinto`` fills a buffer and returns the number of bytes, 0 at the end."""

    def readinto(self, buffer: memoryview) -> int: ...

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        """Let the system copy up to ``size`` bytes to ``offset`` of an open file.

        Returns: the number of bytes, 0 at the end. None if only ``readinto`` works.
        """


class BlobStore(Protocol):
    """Immutable blobs whose names are parts joined by ``/``. Safe to call from many threads.

    Every method may raise UnavailableError (a retry may help), AccessDenied, and DiskFull if the store has a disk.
    InvalidError refuses a name that :func:`statemgr.blobs.check_blob_id` does not accept.
    """

    @property
    def checks_uploads(self) -> bool:
        """Whether the store refuses a PUT whose content does not match its checksum."""

    @property
    def administration(self) -> BlobAdministration:
        """What :class:`BlobAdministration` offers."""

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        """Write a new blob, whole or not at all. It is durable on return. It expires after ``ttl_days``, if given.

        Raises: :class:`statemgr.blobs.BlobExists`.
        """

    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> AbstractContextManager[BlobReader]:
        """Open a blob for reading from ``offset`` on. Raises: MissingBlob."""

    def stat(self, blob_id: str) -> BlobInfo:
        """Raises: MissingBlob."""

    def remove_ttl(self, blob_id: str) -> None:
        """Keep a blob for ever. Idempotent. Raises: MissingBlob."""

    def delete(self, blob_id: str) -> None:
        """Delete a blob. One that does not exist is no error."""

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Delete blobs with as few requests as possible. Returns: the blobs that could not be deleted, and why."""

    def close(self) -> None:
        """Close connections. Idempotent. Requests in progress may end with UnavailableError."""


@runtime_checkable
class CopyingBlobStore(Protocol):
    """A blob store that can copy blobs by itself, so that their bytes do not pass through this process."""

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """Write a new blob with the bytes of ``wanted``, a blob of ``source`` as its ``stat`` gives it, with a TTL.

        Returns: whether it was copied. If not, the store cannot copy from that source.
        Raises: MissingBlob; :class:`statemgr.blobs.BlobExists`; as :class:`BlobStore`.
        """


class BlobAdministration(Protocol):
    """What ``gc``, ``doctor`` and the first start of a job need from a store. Raises: as :class:`BlobStore`."""

    @property
    def listing_tells_ttl(self) -> bool:
        """Whether :meth:`list` fills in ``expires_ms``, and not only :meth:`BlobStore.stat`."""

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        """A page of the blobs whose names start with ``prefix``, in any order. No restore calls it.

        Args:
            token: the one of the page before. None asks for the first page.
        """

    def time_ms(self) -> int:
        """The time of the store's own clock (epoch milliseconds), which also gives ``modified_ms``.

        Raises: InvalidError if the store does not report it.
        """

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Uploads below ``prefix`` that began and have not ended. Raises: InvalidError if the store has no list."""

    def abandon(self, upload: UnfinishedUpload) -> None:
        """Free the storage of an unfinished upload. One that has ended meanwhile is no error."""

    def probe(self) -> Sequence[str]:
        """Problems for ``doctor`` to show, each with what to do. A text that starts with ``note:`` needs no action."""

    def fix(self) -> Sequence[str]:
        """Set up what :meth:`probe` found missing, if the store can do so. Returns: what was set up, as texts."""


#: Opens the store of a ``blob.store.uri``. statemgr adds retries and verification around it.
OpenBlobStore = Callable[[str, JobConfig, Clock], BlobStore]


def list_blobs(store: BlobStore, prefix: str) -> Iterator[BlobInfo]:
    """Every blob whose name starts with ``prefix``, page by page, in the store's order."""
    token = None
    while True:
        page = store.administration.list(prefix, token)
        yield from page.blobs
        if not (token := page.next_token):  # some services end with an empty one
            return
