"""Which blob store a URI stands for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.plug_ins import sqlite_blobs
from statemgr.blobs import open_blob_store, open_raw_blob_store
from statemgr.blobs.file import FileBlobStore
from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, ConfigError, CorruptBlob, PrerequisiteMissing
from statemgr.ports import list_blobs
from tests.blob_faults import ManualClock
from tests.plug_ins import install


def config(uri: str | None) -> JobConfig:
    """Return the configuration of a job with this URI."""
    return JobConfig.from_mapping({"job.name": "orders"} | ({"blob.store.uri": uri} if uri else {}))


def test_without_a_uri() -> None:
    """A job without a URI has no blob store, and the error names the key to set."""
    with pytest.raises(ConfigError, match=r"blob\.store\.uri"):
        open_blob_store(config(None), ManualClock())


def test_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boto3 an s3 URI raises an error that names the extra to install. Other stores do not need boto3."""
    for name in [name for name in sys.modules if name.startswith("statemgr.blobs.s3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(PrerequisiteMissing, match=r"s3:// URIs needs boto3") as caught:
        open_blob_store(config("s3://bucket/prefix"), ManualClock())
    assert "statemgr[s3]" in str(caught.value.hint)
    open_blob_store(config("memory://x"), ManualClock()).close()


@pytest.mark.parametrize(
    ("uri", "hint"),
    [("b2://bucket/x", "install a package with the entry point 'b2'"), ("fiel:///x", "did you mean file://")],
)
def test_a_scheme_without_a_store_says_what_to_install(uri: str, hint: str) -> None:
    """Loading the configuration refuses a scheme for which no package has a store."""
    with pytest.raises(ConfigError, match="none has the scheme") as caught:
        config(uri)
    assert hint in str(caught.value.hint)
    assert "abfss, az, file, gs, memory, s3" in str(caught.value.hint)


def test_a_store_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme's entry point opens the store. The error for a missing dependency names it and the package."""
    entries = "[statemgr.blob_stores]\nsqlite = sqlite_blobs:open_store\nlacking = nothing_at_all:open_store\n"
    install(Path(sqlite_blobs.__file__), entries, tmp_path / "site", monkeypatch)
    store = open_raw_blob_store(config(f"sqlite://{tmp_path}/blobs.db?mode=x"), ManualClock())
    store.put("a/b", b"x", ttl_days=None)
    assert (tmp_path / "blobs.db").exists()
    store.close()
    with pytest.raises(PrerequisiteMissing, match="needs nothing_at_all") as caught:
        open_raw_blob_store(config("lacking://x"), ManualClock())
    assert caught.value.hint == "pip install sqlite_blobs"


def test_memory_is_shared_by_name() -> None:
    """Two stores with the same name in one process share their blobs. Another name has its own."""
    open_blob_store(config("memory://shared"), ManualClock()).put("a", b"x", ttl_days=None)
    assert open_blob_store(config("memory://shared"), ManualClock()).stat("a").size == 1
    assert list(list_blobs(open_blob_store(config("memory://other"), ManualClock()), "")) == []


def test_a_directory_with_unusual_characters(tmp_path: Path) -> None:
    """A file URI is percent-decoded."""
    directory = tmp_path / "späß & co"
    store = open_raw_blob_store(config(directory.as_uri()), ManualClock())
    store.put("a/b", b"x", ttl_days=None)
    assert (directory / "a" / "b").read_bytes() == b"x"


def test_links_below_the_root_are_never_followed(tmp_path: Path) -> None:
    """FAULTS 28: no operation follows a link planted in the blob directory."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "blobs"
    root.mkdir()
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = FileBlobStore(root, ManualClock())
    with pytest.raises(CorruptBlob):
        store.put("dir/new", b"x", ttl_days=None)
    for name in ("dir/secret", "file"):
        with pytest.raises(CorruptBlob), store.get(name):
            pass
        with pytest.raises(CorruptBlob):
            store.stat(name)
    with pytest.raises(CorruptBlob):
        store.delete("dir/secret")
    assert list(list_blobs(store, "")) == []
    assert {path.name for path in outside.iterdir()} == {"secret"}


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    """A root that is a file raises a typed error, and the probe reports it."""
    (tmp_path / "blobs").write_bytes(b"")
    store = FileBlobStore(tmp_path / "blobs", ManualClock())
    with pytest.raises((CorruptBlob, AccessDenied)):
        store.put("a", b"x", ttl_days=None)
    assert store.administration.probe()


def test_a_killed_put_leaves_no_blob(tmp_path: Path) -> None:
    """FAULTS 2: temporary files and expiry records of a dead writer are not taken for blobs."""
    store = FileBlobStore(tmp_path, ManualClock())
    store.put("a/b", b"x", ttl_days=30)
    (tmp_path / "a" / ".0123.tmp").write_bytes(b"half")
    (tmp_path / "a" / ".gone.expires").write_bytes(b"123")
    assert [info.blob_id for info in list_blobs(store, "")] == ["a/b"]
    store.put("a/gone", b"y", ttl_days=None)
    assert store.stat("a/gone").expires_ms is None
    store.put("a/again", b"z", ttl_days=30)
    assert store.stat("a/again").expires_ms is not None
