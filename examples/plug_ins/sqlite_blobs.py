"""A blob store of another package: blobs as rows of an SQLite database, for ``sqlite:///path/of.db``.

Uses only what statemgr offers to plug-ins.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from statemgr import JobConfig
from statemgr.blobs import BlobExists, check_blob_id, open_body
from statemgr.errors import MissingBlob, StatemgrError, UnavailableError
from statemgr.ports import BlobInfo, BlobPage, BlobReader, Body, Clock, UnfinishedUpload

DAY_MS = 24 * 3600 * 1000
_INFO = "name, length(data), modified, expires"


class SqliteBlobStore:
    """A blob store, and its administration."""

    checks_uploads = False
    listing_tells_ttl = True

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._run("CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, data BLOB, modified INT, expires INT)")

    @property
    def administration(self) -> SqliteBlobStore:
        return self

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        check_blob_id(blob_id)
        now = self.time_ms()
        expires = None if ttl_days is None else now + ttl_days * DAY_MS
        try:
            self._run("INSERT INTO blobs VALUES (?, ?, ?, ?)", blob_id, _content(body), now, expires)
        except sqlite3.IntegrityError:
            raise BlobExists("a blob of this name exists already", blob=blob_id) from None

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        (data,) = self._one("SELECT data FROM blobs WHERE name = ?", blob_id)
        yield _Reader(data[offset : None if length is None else offset + length])

    def stat(self, blob_id: str) -> BlobInfo:
        return BlobInfo(*self._one(f"SELECT {_INFO} FROM blobs WHERE name = ?", blob_id))

    def remove_ttl(self, blob_id: str) -> None:
        self._one("UPDATE blobs SET expires = NULL WHERE name = ? RETURNING name", blob_id)

    def delete(self, blob_id: str) -> None:
        check_blob_id(blob_id)
        self._run("DELETE FROM blobs WHERE name = ?", blob_id)

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        for blob_id in blob_ids:
            self.delete(blob_id)
        return {}

    def close(self) -> None:
        self._database.close()

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        matching = "substr(name, 1, ?) = ? AND name > ? ORDER BY name LIMIT 100"
        rows = self._run(f"SELECT {_INFO} FROM blobs WHERE {matching}", len(prefix), prefix, token or "")
        found = [BlobInfo(*row) for row in rows]
        return BlobPage(found, found[-1].blob_id if len(found) == 100 else None)

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        return iter(())

    def abandon(self, upload: UnfinishedUpload) -> None:
        """There is none."""

    def probe(self) -> Sequence[str]:
        return ()

    def fix(self) -> Sequence[str]:
        return ()

    def _run(self, statement: str, *values: object) -> Sequence[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise UnavailableError(f"the database does not answer: {error}") from error

    def _one(self, statement: str, blob_id: str) -> tuple[Any, ...]:
        check_blob_id(blob_id)
        rows = self._run(statement, blob_id)
        if not rows:
            raise MissingBlob("the blob does not exist", blob=blob_id)
        return rows[0]


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        return None

    def readinto(self, buffer: memoryview) -> int:
        piece, self._data = self._data[: len(buffer)], self._data[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


def _content(body: Body) -> bytes:
    with open_body(body) as stream:
        return b"".join(iter(partial(stream.read, 1 << 20), b""))


def open_store(uri: str, config: JobConfig, clock: Clock) -> SqliteBlobStore:
    """The entry point."""
    return SqliteBlobStore(Path(unquote(urlsplit(uri).path)))
