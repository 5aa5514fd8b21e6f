"""Every blob store passes the public conformance suite and some additional tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.plug_ins.sqlite_blobs import SqliteBlobStore
from statemgr.blobs import names, open_blob_store
from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.config import JobConfig
from statemgr.errors import InvalidError
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobStore, list_blobs
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
