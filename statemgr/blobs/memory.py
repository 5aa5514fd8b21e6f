"""Blobs in this process's memory, for tests and experiments. Touches nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from statemgr.blobs.body import BytesReader, open_body
from statemgr.blobs.names import BlobExists, check_blob_id, delete_each, page_of
from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS
from statemgr.errors import MissingBlob, StatemgrError
from statemgr.ports import BlobAdministration, BlobInfo, BlobPage, BlobReader, Body, Clock, UnfinishedUpload


@dataclass
class _Space:
    """The blobs that all stores of one name share."""

    blobs: dict[str, tuple[bytes, BlobInfo]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


def forget(name: str) -> None:
    """Drop the blobs that stores of this name share."""
    with _spaces_lock:
        _spaces.pop(name, None)


class MemoryBlobStore:
    """A blob store in memory, and its administration.

    Stores of the same non-empty name in one process see the same blobs.
    """

    checks_uploads = True
    listing_tells_ttl = True

    def __init__(self, clock: Clock, name: str = "") -> None:
        self._clock = clock
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space()) if name else _Space()

    @property
    def administration(self) -> BlobAdministration:
        return self

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        check_blob_id(blob_id)
        with open_body(body) as stream:
            data = stream.read()
        now = self._clock.time_ns() // 1_000_000
        expires = None if ttl_days is None else now + ttl_days * DAY_MS
        with self._space.lock:
            if blob_id in self._space.blobs:
                raise BlobExists("a blob of this name exists already", blob=blob_id)
            self._space.blobs[blob_id] = data, BlobInfo(blob_id, len(data), now, expires)

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        data, _ = self._find(blob_id)
        yield BytesReader(memoryview(data)[offset : None if length is None else offset + length])

    def delete(self, blob_id: str) -> None:
        check_blob_id(blob_id)
        with self._space.lock:
            self._space.blobs.pop(blob_id, None)

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        return delete_each(blob_ids, self.delete)

    def remove_ttl(self, blob_id: str) -> None:
        data, info = self._find(blob_id)
        with self._space.lock:
            if blob_id in self._space.blobs:
                self._space.blobs[blob_id] = data, replace(info, expires_ms=None)

    def stat(self, blob_id: str) -> BlobInfo:
        return self._find(blob_id)[1]

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        """Pages in the order of names; the token is the last name."""
        with self._space.lock:
            found = [info for blob_id, (_, info) in self._space.blobs.items() if blob_id.startswith(prefix)]
        return page_of(iter(sorted((i for i in found if i.blob_id > (token or "")), key=lambda i: i.blob_id)))

    def time_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """There are none, because a PUT ends at once."""
        return iter(())

    def abandon(self, upload: UnfinishedUpload) -> None:
        """Nothing to do."""

    def probe(self) -> Sequence[str]:
        return ()

    def fix(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """The blobs stay for other stores of the same name."""

    def _find(self, blob_id: str) -> tuple[bytes, BlobInfo]:
        check_blob_id(blob_id)
        with self._space.lock:
            found = self._space.blobs.get(blob_id)
        if found is None:
            raise MissingBlob("the blob does not exist", blob=blob_id)
        return found


def open_store(uri: str, config: JobConfig, clock: Clock) -> MemoryBlobStore:
    """The store of ``memory://<name>``."""
    parts = urlsplit(uri)
    return MemoryBlobStore(clock, parts.netloc + parts.path or "default")
