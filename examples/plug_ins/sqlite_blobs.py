"""A blob store of another package: blobs as rows of an SQLite database, for ``sqlite:///path/of.db``.

Uses only what statemgr offers to plug-ins.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from statemgr import JobConfig
from statemgr.blobs import BlobExists, check_blob_id
from statemgr.errors import CorruptFile, MissingBlob, StatemgrError
from statemgr.ports import BlobInfo, BlobPage, BlobReader, Body, Clock, UnfinishedUpload

DAY_MS = 24 * 3600 * 1000


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
        rows = self._run("SELECT data FROM blobs WHERE name = ?", self._found(blob_id))
        yield _Reader(rows[0][0][offset : None if length is None else offset + length])

    def stat(self, blob_id: str) -> BlobInfo:
        return self._infos("name = ?", self._found(blob_id))[0]

    def remove_ttl(self, blob_id: str) -> None:
        self._run("UPDATE blobs SET expires = NULL WHERE name = ?", self._found(blob_id))

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
        found = self._infos(
            "substr(name, 1, ?) = ? AND name > ? ORDER BY name LIMIT 100", len(prefix), prefix, token or ""
        )
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

    def _run(self, statement: str, *values: object) -> Sequence[tuple[object, ...]]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def _infos(self, condition: str, *values: object) -> Sequence[BlobInfo]:
        rows = self._run(f"SELECT name, length(data), modified, expires FROM blobs WHERE {condition}", *values)
        return [BlobInfo(*row) for row in rows]

    def _found(self, blob_id: str) -> str:
        check_blob_id(blob_id)
        if not self._infos("name = ?", blob_id):
            raise MissingBlob("the blob does not exist", blob=blob_id)
        return blob_id


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
    if isinstance(body, bytes):
        return body
    with body.path.open("rb") as file:
        file.seek(body.offset)
        data = file.read(body.length)
    if len(data) < body.length:
        raise CorruptFile("the file is shorter than it was", path=body.path)
    return data


def open_store(uri: str, config: JobConfig, clock: Clock) -> SqliteBlobStore:
    """The entry point."""
    return SqliteBlobStore(Path(unquote(urlsplit(uri).path)))
