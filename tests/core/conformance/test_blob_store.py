"""Every blob store passes the public conformance suite and some additional tests."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.plug_ins.sqlite_blobs import SqliteBlobStore
from statemgr.blobs import names, open_blob_store
from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.config import JobConfig
from statemgr.errors import InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobInfo, BlobPage, BlobReader, BlobStore, Body, UnfinishedUpload, list_blobs
from statemgr.testing.conformance import BlobStoreSuite
from statemgr.testing.conformance.blob_store import read


class TestBlobStores(BlobStoreSuite):
    """Memory, files and S3, each as the bare adapter and with the decorators that a job uses."""

    @pytest.fixture
    def blobs(self, opened_blobs: BlobStore) -> BlobStore:
        """Return the store that conftest opened."""
        return opened_blobs


class TestAStoreOfAnotherPackage(BlobStoreSuite):
    """The suite needs only the port."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Iterator[BlobStore]:
        """Open a store that keeps blobs in rows of a database."""
        store = SqliteBlobStore(tmp_path / "blobs.db")
        yield store
        store.close()


class Reticent(MemoryBlobStore):
    """Knows neither when a TTL ends nor the time, and has no list of unfinished uploads. Its last page has an empty
    token."""

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        page = super().list(prefix, token)
        return replace(page, next_token=page.next_token or "")

    def stat(self, blob_id: str) -> BlobInfo:
        info = super().stat(blob_id)
        return info if info.expires_ms is None else replace(info, expires_ms=-1)

    def time_ms(self) -> int:
        raise InvalidError("the store does not tell its time")

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        raise InvalidError("the store has no list of uploads")


class TestAReticentStore(BlobStoreSuite):
    """What the port leaves open is no fault."""

    @pytest.fixture
    def blobs(self) -> BlobStore:
        """Return a store in memory."""
        return Reticent(SystemClock())


class OnlyReadinto(MemoryBlobStore):
    """Its readers have one method."""

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        with super().get(blob_id, offset, length) as reader:
            yield SimpleNamespace(readinto=reader.readinto)  # type: ignore[misc]


class CopiesElsewhere(MemoryBlobStore):
    """Its readers copy to the beginning of the file, whatever the offset."""

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        with super().get(blob_id, offset, length) as reader:
            buffer = memoryview(bytearray(5))

            def copy_to(fd: int, offset: int, size: int) -> int:
                return os.pwrite(fd, buffer[: reader.readinto(buffer)], 0)

            yield SimpleNamespace(readinto=reader.readinto, copy_to=copy_to)  # type: ignore[misc]


class FewAtOnce(MemoryBlobStore):
    """Deletes at most 25 blobs with a request."""

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        if len(blob_ids) > 25:
            raise UnavailableError("too many names")
        return super().delete_many(blob_ids)


class Trusting(MemoryBlobStore):
    """Checks no name when it deletes many."""

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        return {}


class LikeSql(MemoryBlobStore):
    """Lists with SQL's LIKE, in which case is the same and ``_`` and ``%`` are wildcards."""

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        pattern = f"{re.escape(prefix).replace('_', '.').replace('%', '.*')}.*"
        found = [info for info in super().list("", token).blobs if re.fullmatch(pattern, info.blob_id, re.IGNORECASE)]
        return BlobPage(found, None)


class FirstPage(MemoryBlobStore):
    """Lists one page."""

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        return BlobPage(super().list(prefix, token).blobs, None)


class ReadsTheFile(MemoryBlobStore):
    """Says that it checks uploads, and knows nothing of the hash of a body."""

    checks_uploads = True

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        super().put(blob_id, body if isinstance(body, bytes) else replace(body, digest=None), ttl_days=ttl_days)


class TakesTheSameBytes(MemoryBlobStore):
    """A PUT of what is there already succeeds, with its TTL."""

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        with suppress(MissingBlob):
            if read(self, blob_id) == body:
                self.delete(blob_id)
        super().put(blob_id, body, ttl_days=ttl_days)


class WithoutFix(MemoryBlobStore):
    """Lacks a method that only ``doctor`` calls."""

    fix = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (OnlyReadinto, lambda suite, store: suite.test_what_was_put_is_got(store, 7)),
        (CopiesElsewhere, lambda suite, store: suite.test_what_was_put_is_got(store, 7)),
        (FewAtOnce, lambda suite, store: suite.test_many_are_deleted_at_once(store)),
        (Trusting, lambda suite, store: suite.test_hostile_names_are_refused(store, "a/../b")),
        (LikeSql, lambda suite, store: suite.test_names_that_look_like_patterns(store)),
        (FirstPage, lambda suite, store: suite.test_listing_more_than_a_page(store)),
        (TakesTheSameBytes, lambda suite, store: suite.test_a_repeated_put_sets_no_ttl(store)),
        (WithoutFix, lambda suite, store: suite.test_all_of_the_port_is_there(store)),
    ],
)
def test_the_suite_rejects_wrong_stores(
    wrong: type[MemoryBlobStore], test: Callable[[BlobStoreSuite, BlobStore], None]
) -> None:
    """A store with which restores or ``gc`` would fail does not pass."""
    with pytest.raises((AssertionError, AttributeError, KeyError, UnavailableError)):
        test(BlobStoreSuite(), wrong(SystemClock()))


def test_the_suite_rejects_a_store_that_keeps_a_changed_file(tmp_path: Path) -> None:
    """Nothing would read it back, and a checkpoint would name it."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        BlobStoreSuite().test_a_file_that_has_changed_is_refused(ReadsTheFile(SystemClock()), tmp_path)


def test_a_repeated_put_of_the_same_bytes_is_done(blob_config: JobConfig) -> None:
    """FAULTS 8: a PUT whose answer was lost may have succeeded, so repeating it is no error."""
    store = open_blob_store(blob_config, SystemClock())
    store.put("a/b", b"same", ttl_days=30)
    store.put("a/b", b"same", ttl_days=30)
    assert read(store, "a/b") == b"same"
    store.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_listing_goes_on_from_page_to_page(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages with one name each add up to the complete listing without duplicates, including directories and dashes."""
    store = MemoryBlobStore(SystemClock()) if kind == "memory" else FileBlobStore(tmp_path, SystemClock())
    for name in ("j/a/x", "j/a-b", "j/a.c/y", "j/b", "j/a/y/z", "k/a"):
        store.put(name, b"", ttl_days=None)
    whole = [info.blob_id for info in list_blobs(store, "j/")]
    assert len(whole) == 5
    monkeypatch.setattr(names, "_PAGE", 1)
    assert [info.blob_id for info in list_blobs(store, "j/")] == whole


@pytest.mark.parametrize("name", ["../a", "a/../b", ".hidden", "a//b"])
def test_a_hostile_name_makes_no_directory(tmp_path: Path, name: str) -> None:
    """Invariant 15: a file blob store rejects an invalid name before it creates any directory."""
    store = FileBlobStore(tmp_path / "blobs", SystemClock())
    with pytest.raises(InvalidError):
        store.put(name, b"x", ttl_days=None)
    assert not (tmp_path / "blobs").exists()


@pytest.mark.parametrize("call", ["get", "stat"])
def test_the_example_meets_a_delete_in_between(tmp_path: Path, call: str) -> None:
    """A blob that another process deletes after the first statement of a call is there or missing, and no other error
    comes."""
    store = SqliteBlobStore(tmp_path / "blobs.db")
    store.put("a/b", b"x", ttl_days=3)
    statements: list[str] = []

    def delete_before_the_second(statement: str) -> None:
        statements.append(statement)
        if len(statements) == 2:
            with sqlite3.connect(tmp_path / "blobs.db") as other:
                other.execute("DELETE FROM blobs")

    store._database.set_trace_callback(delete_before_the_second)
    calls: dict[str, Callable[[], object]] = {"get": lambda: read(store, "a/b"), "stat": lambda: store.stat("a/b")}
    with suppress(MissingBlob):
        calls[call]()
    store.close()


def test_a_locked_database_of_the_example_is_unavailable(tmp_path: Path) -> None:
    """No error of SQLite leaves the store."""
    store = SqliteBlobStore(tmp_path / "blobs.db")
    store._database.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / "blobs.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UnavailableError, match="locked"):
            store.put("a/b", b"x", ttl_days=None)
    store.close()
