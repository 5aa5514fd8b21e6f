"""A directory of blobs: what is durable when a call returns, and writes that run at the same time as deletes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.blobs import file_tree
from statemgr.blobs.file import FileBlobStore
from statemgr.blobs.names import BlobExists
from statemgr.engine.host import _host
from statemgr.errors import AccessDenied, DiskFull, MissingBlob, RetryableError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.ports import BlobInfo, FileSlice
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import attempt


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that were synced since the test last cleared the list."""
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
    """Invariant 1: a writer may die between a change and its sync, so a caller that relies on it syncs again."""
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


@pytest.fixture
def servers() -> Iterator[MemoryServers]:
    """Return servers for a job whose state is only in the blob store."""
    settings = {
        "job.name": "orders",
        "task.inputs": ["orders"],
        "task.backup.factories": ["blob-store"],
        "stores.totals.value.serde": "bytes",
        "blob.store.retry.policy.max.retries": 0,
    }
    opened = MemoryServers(settings)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many of the next new directories are deleted before the writer can open them."""
    left = [0]
    mkdir = os.mkdir

    def lose(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if dir_fd is not None and left[0]:
            left[0] -= 1
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", lose)
    return left


@pytest.mark.parametrize("call", ["put", "copy"])
def test_a_write_whose_new_directory_is_removed_begins_again(tmp_path: Path, removals: list[int], call: str) -> None:
    """Invariant 6: a write succeeds even if a delete removes its new, still empty directory."""
    store, source = (FileBlobStore(tmp_path / name, SystemClock()) for name in ("target", "source"))
    source.put("blob", b"x", ttl_days=1)

    def write(name: str) -> None:
        if call == "put":
            store.put(name, b"x", ttl_days=1)
        else:
            assert store.copy_from(source, BlobInfo("blob", 1, 0, None), name, ttl_days=1)

    removals[0] = 5
    write("a/b/blob")
    assert removals == [0]
    assert store.stat("a/b/blob").size == 1

    removals[0] = 1_000
    with pytest.raises(UnavailableError, match="deletes removed the directory") as error:
        write("c/blob")
    assert "try again" in str(error.value)


@pytest.mark.parametrize("step", ["write", "link"])
@pytest.mark.parametrize("call", ["put", "copy"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, step: str
) -> None:
    """FAULT 24: the disk is full after the body was written. No listing would find an expiry record that is left."""
    store, source = (FileBlobStore(tmp_path / name, SystemClock()) for name in ("target", "source"))
    source.put("blob", b"x", ttl_days=1)
    real = getattr(os, step)

    def full(what: object, data: bytes, *more: object, **options: object) -> object:
        if data == b"x":
            return real(what, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wanted = source.stat("blob")
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("a/blob", b"x", ttl_days=1),
        "copy": lambda: store.copy_from(source, wanted, "a/blob", ttl_days=1),
    }
    monkeypatch.setattr(os, step, full)
    with pytest.raises(DiskFull):
        calls[call]()
    assert [path for path in (tmp_path / "target").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("problem", ["exists", "full"])
@pytest.mark.parametrize("call", ["put", "copy"])
def test_a_late_write_takes_nothing_from_a_published_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, problem: str
) -> None:
    """A request stands still after it has seen that the name is free. Its repetition writes the blob, which is
    published. The first one goes on, and finds the name taken or the disk full: the blob keeps no TTL, and stays."""
    store, source = (FileBlobStore(tmp_path / name, SystemClock()) for name in ("target", "source"))
    source.put("blob", b"x", ttl_days=None)
    wanted = source.stat("blob")

    def write() -> None:
        if call == "put":
            store.put("a/blob", b"x", ttl_days=1)
        else:
            store.copy_from(source, wanted, "a/blob", ttl_days=1)

    exists = file_tree.exists

    def stands_still(directory: int, name: str) -> bool:
        found = exists(directory, name)
        monkeypatch.setattr(file_tree, "exists", exists)
        write()
        store.remove_ttl("a/blob")
        if problem == "full":
            monkeypatch.setattr(os, "link", full)
        return found

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_tree, "exists", stands_still)
    with pytest.raises(BlobExists if problem == "exists" else DiskFull):
        write()
    assert store.stat("a/blob") == BlobInfo("a/blob", 1, store.stat("a/blob").modified_ms, None)


def test_a_link_whose_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client sends it again, and meets the name that it has made itself. The blob keeps its TTL. A blob of
    another writer still exists already."""
    store, link = FileBlobStore(tmp_path, SystemClock()), os.link

    def repeated(*names: str, **where: Any) -> None:
        link(*names, **where)
        link(*names, **where)

    monkeypatch.setattr(os, "link", repeated)
    store.put("a/b", b"x", ttl_days=1)
    assert store.stat("a/b").expires_ms is not None
    monkeypatch.setattr(file_tree, "exists", lambda *_: False)  # somebody is faster
    with pytest.raises(BlobExists):
        store.put("a/b", b"y", ttl_days=1)


def test_a_blob_that_cannot_be_deleted_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has made a file immutable. Its neighbours are deleted, and the error is that of the file."""
    store = FileBlobStore(tmp_path, SystemClock())
    names = [f"a/b/{number}" for number in range(5)]
    for name in names:
        store.put(name, b"x", ttl_days=1)
    unlink = os.unlink

    def refuse(entry: str, **where: Any) -> None:
        if entry == "1":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(entry, **where)

    monkeypatch.setattr(os, "unlink", refuse)
    for call in (lambda: store.delete_many(names), lambda: store.delete_many(names[1:2])):
        failed = call()
        assert failed.keys() == {"a/b/1"}
        assert isinstance(failed["a/b/1"], AccessDenied)
        assert failed["a/b/1"].where["blob"] == "a/b/1"
        assert sorted(os.listdir(tmp_path / "a" / "b")) == [".1.expires", "1"]
    with pytest.raises(AccessDenied):
        store.delete("a/b/1")


def test_what_a_killed_delete_leaves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed between a blob and its expiry record, and leaves only one of those."""
    store = FileBlobStore(tmp_path, SystemClock())
    names = [f"a/b/{number}" for number in range(3)]
    for name in names:
        store.put(name, b"x", ttl_days=1)
    unlink, calls = os.unlink, list[str]()

    def killed(entry: str, **where: Any) -> None:
        calls.append(entry)
        if len(calls) == 4:
            raise SystemExit
        unlink(entry, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        with pytest.raises(SystemExit):
            store.delete_many(names)
    assert [info.blob_id for info in store.list("").blobs] == ["a/b/2"]
    assert store.stat("a/b/2").expires_ms is not None
    (left,) = store.unfinished("")
    store.abandon(left)
    assert not list(store.unfinished(""))
    store.delete("a/b/2")
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_disk_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is of the local file, and not of the blob store."""
    path = tmp_path / "file"
    path.write_bytes(b"x")

    def unreadable(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", unreadable)
    with pytest.raises(RetryableError, match="a file to upload cannot be read") as caught:
        FileBlobStore(tmp_path / "blobs", SystemClock()).put("a/blob", FileSlice(path, 0, 1), ttl_days=None)
    assert type(caught.value) is RetryableError
    assert caught.value.where["path"] == path


def test_a_copy_of_a_blob_that_is_gone_is_refused(tmp_path: Path) -> None:
    """The error names the missing blob, and the target stays empty."""
    store, source = (FileBlobStore(tmp_path / name, SystemClock()) for name in ("target", "source"))
    source.put("blob", b"x", ttl_days=1)
    with pytest.raises(MissingBlob) as error:
        store.copy_from(source, BlobInfo("other", 1, 0, None), "copied", ttl_days=1)
    assert "other" in str(error.value)
    assert os.listdir(tmp_path / "target") == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to know what was synced")
def test_a_new_root_survives_a_power_loss(tmp_path: Path, synced: list[Path]) -> None:
    """The entries of the root and of directories above it that the first blob makes are synced, also if another writer
    has just made them."""
    root = tmp_path / "new" / "blobs"
    FileBlobStore(root, SystemClock()).put("a", b"x", ttl_days=None)
    assert {tmp_path, root.parent} <= set(synced)
    synced.clear()
    FileBlobStore(root, SystemClock()).put("b", b"x", ttl_days=None)
    assert root.parent in synced


def _calls(store: FileBlobStore) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: store.put("job/new", b"x", ttl_days=None),
        "get": lambda: store.get("job/blob").__enter__(),
        "stat": lambda: store.stat("job/blob"),
        "remove_ttl": lambda: store.remove_ttl("job/blob"),
        "delete": lambda: store.delete("job/blob"),
        "list": lambda: store.list("job/"),
        "time": store.time_ms,
    }


@pytest.mark.parametrize("call", ["put", "get", "stat", "remove_ttl", "delete", "list", "time"])
@pytest.mark.parametrize("there", [False, True])
def test_a_root_whose_disk_is_no_longer_mounted_takes_nothing(tmp_path: Path, call: str, there: bool) -> None:
    """Invariant 1: the directory below the mount point is missing or empty, and nothing is written to it or read from
    it. When the disk is mounted again, everything continues."""
    root, disk = tmp_path / "mount", tmp_path / "disk"
    store = FileBlobStore(root, SystemClock())
    store.put("job/blob", b"x", ttl_days=1)
    root.rename(disk)
    if there:
        root.mkdir()
    with pytest.raises(UnavailableError, match="another one than before" if there else "does not exist") as caught:
        _calls(store)[call]()
    assert "mounted" in str(caught.value.hint)
    assert root.exists() == there
    assert not there or not list(root.iterdir())
    if there:
        root.rmdir()
    disk.rename(root)
    _calls(store)[call]()


def test_first_writes_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes the root after the other has seen that it is missing: no disk is gone."""
    root, real, others = tmp_path / "blobs", Path.exists, list[str]()
    store = FileBlobStore(root, SystemClock())

    def exists(path: Path) -> bool:
        found = real(path)
        if path == root and not others:
            others.append("job/other")
            store.put("job/other", b"x", ttl_days=1)
        return found

    monkeypatch.setattr(Path, "exists", exists)
    store.put("job/blob", b"x", ttl_days=1)
    assert {blob.blob_id for blob in store.list("job/").blobs} == {"job/blob", *others}


def test_a_disk_that_is_mounted_again_may_have_other_numbers(tmp_path: Path) -> None:
    """A network file system gets a new device number, so a root with the job's directory is the same one."""
    root = tmp_path / "mount"
    store = FileBlobStore(root, SystemClock())
    store.put("job/blob", b"x", ttl_days=1)
    root.rename(tmp_path / "disk")
    shutil.copytree(tmp_path / "disk", root)
    assert store.stat("job/blob").size == 1
    store.put("job/new", b"x", ttl_days=1)


@pytest.mark.parametrize("there", [False, True])
def test_a_process_that_starts_without_the_disk_finds_no_blob_missing(tmp_path: Path, there: bool) -> None:
    """Whoever knows a blob's name gets an error that can pass. For a new job, a listing is empty, and the first write
    makes the root."""
    root = tmp_path / "new" / "blobs"
    if there:
        root.mkdir(parents=True)
    store = FileBlobStore(root, SystemClock())
    assert list(store.list("job/").blobs) == list(store.unfinished("")) == []
    for call in ("get", "stat", "remove_ttl", "delete"):
        with pytest.raises(UnavailableError, match="is empty" if there else "does not exist"):
            _calls(store)[call]()
    problem = () if there else (f"{root} cannot be written to: the directory of blob.store.uri does not exist",)
    assert store.probe() == problem
    assert root.exists() == there, "a look makes nothing"
    _calls(store)["put"]()
    assert store.stat("job/new").size == 1


@pytest.mark.parametrize("there", [False, True])
def test_a_job_that_starts_without_the_disk_commits_nothing(
    servers: MemoryServers, tmp_path: Path, there: bool
) -> None:
    """Invariant 1: its state is on this machine, and its checkpoint adds no blob, so nothing else asks for one before
    the first segment is written."""
    root, disk = tmp_path / "mount", tmp_path / "disk"
    config = JobConfig.from_mapping(
        servers.on_disk(servers.config, "one").to_mapping(), {"blob.store.uri": root.as_uri()}
    )

    def commit(*counts: int) -> None:
        with servers.manager(config, "kafka-partition") as manager:
            task = manager.open_task("Partition 0")
            for count in counts:
                for number in range(count):
                    task.store("totals").put(b"%d" % number, b"%d" % count * 20)
                task.commit({"orders-0": count})

    commit(1, 2)
    root.rename(disk)
    if there:
        root.mkdir()
    with pytest.raises(UnavailableError, match=r"blob\.store\.uri"):
        commit(3_000)
    assert not [path for path in root.rglob("*") if path.is_file()]
    if there:
        root.rmdir()
    disk.rename(root)
    commit(3_000)
    servers.lose_disk()
    with servers.manager(config, "kafka-partition") as manager:
        assert manager.open_task("Partition 0").store("totals").get(b"2999") == b"3000" * 20


def test_a_new_task_and_an_attachment_are_not_written_to_a_disk_that_is_not_mounted(
    servers: MemoryServers, tmp_path: Path
) -> None:
    """Invariant 1: they are the first blobs of a new process, and no task has asked for one of its checkpoint's. A file
    of another job does not make the directory the right one."""
    root, disk = tmp_path / "mount", tmp_path / "disk"
    config = JobConfig.from_mapping(
        servers.on_disk(servers.config, "one").to_mapping(), {"blob.store.uri": root.as_uri(), "job.tasks": 2}
    )
    with servers.manager(config, "kafka-partition") as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-0": 1})
    root.rename(disk)
    (root / "another-job").mkdir(parents=True)
    with servers.manager(config, "kafka-partition") as manager, manager.open_task("Partition 1") as new:
        new.store("totals").put(b"b", b"1")
        with pytest.raises(UnavailableError, match="has no orders"):
            new.commit({"orders-1": 1})
    with servers.manager(config, "kafka-partition") as manager:
        epoch = manager.acquire()
        for known in (epoch.checkpoints, dict.fromkeys(epoch.checkpoints)):
            _host.cache_clear()  # another process
            with pytest.raises(UnavailableError, match="has no orders"):
                attempt(config, epoch, "Partition 0", {b"a": b"2"}, 2, {"out": b"x" * 100_000}, known)
    assert [path.name for path in root.iterdir()] == ["another-job"]


def test_the_directory_of_a_job_whose_last_blob_was_deleted_is_not_expected(tmp_path: Path) -> None:
    """A disk that is mounted again with other numbers lacks it. A blob that was deleted is missing, not unavailable."""
    root = tmp_path / "mount"
    store = FileBlobStore(root, SystemClock())
    store.put("job/blob", b"x", ttl_days=1)
    store.delete("job/blob")
    with pytest.raises(MissingBlob):
        store.stat("job/blob")
    root.rename(tmp_path / "disk")
    (root / "lost+found").mkdir(parents=True)
    assert not store.list("job/").blobs
    store.put("job/new", b"x", ttl_days=1)
