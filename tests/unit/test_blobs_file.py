"""What of a directory of blobs is durable when a call returns or says that it is done already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.names import BlobExists
from statemgr.local.clock import SystemClock


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that were synced since the test looked."""
    found: list[Path] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}")) if os.path.isdir("/proc/self/fd") else Path()
        if path.is_dir():
            found.append(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name a descriptor")
def test_what_another_has_done_is_synced_too(tmp_path: Path, synced: list[Path]) -> None:
    """Invariant 1: a writer may have died between its act and its sync; who relies on the act syncs it himself."""
    store = FileBlobStore(tmp_path, SystemClock())
    store.put("a/b/blob", b"x", ttl_days=1)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)

    def again() -> None:
        with pytest.raises(BlobExists):
            store.put("a/b/blob", b"x", ttl_days=1)

    calls: list[Callable[[], None]] = [
        again,
        lambda: store.remove_ttl("a/b/blob"),
        lambda: store.remove_ttl("a/b/blob"),
    ]
    for call in calls:
        synced.clear()
        call()
        assert tmp_path / "a" / "b" in synced
    synced.clear()
    store.put("a/b/other", b"x", ttl_days=None)
    assert tmp_path / "a" in synced, "the directory may have been made by a writer that died"
