"""Local directories: a cache that is used only if it verifies, whatever a crash or a person left there."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest

from statemgr import JobConfig
from statemgr.errors import CorruptError, CorruptFile, DiskFull, InvalidError, MissingState, RetryableError
from statemgr.ids import IdSource
from statemgr.local import durable
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import SystemClock, system_ids
from statemgr.local.shared_directories import exclusive
from statemgr.model.hashing import content_hash
from statemgr.ports import CommittedDirectory
from statemgr.wiring import open_services

FILES = {
    "CURRENT": b"MANIFEST-000005\n",
    "000008.sst": b"table" * 1000,
    "MANIFEST-000005": b"m" * 50,
    "empty": b"",
    "sub/deep/000009.sst": b"nested",
}


class StepClock:
    """A clock that advances by one second whenever it is read."""

    def __init__(self, start: int = 1) -> None:
        self._ticks = count(start)

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return next(self._ticks) * 1_000_000_000

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return float(next(self._ticks))

    def elapsed(self) -> float:
        """Return the time in seconds."""
        return float(next(self._ticks))

    def sleep(self, seconds: float) -> None:
        """Return at once."""


_tokens = count(1)
_lock = threading.Lock()


def token() -> str:
    """Return a unique token of 32 digits."""
    with _lock:
        return f"{next(_tokens):016x}" + "0" * 16


def directories_at(root: Path, start: int = 1) -> StoreDirectories:
    """Return directories with a clock (from ``start`` seconds on) and IDs for tests."""
    clock = StepClock(start)
    return StoreDirectories(root, clock, IdSource(clock.time_ns, token))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of the store's directories."""
    return tmp_path / "state" / "store"


@pytest.fixture
def directories(root: Path) -> Iterator[StoreDirectories]:
    """Directories that do not exist yet."""
    made = directories_at(root)
    yield made
    made.close()


def fill(directory: Path, files: dict[str, bytes] = FILES) -> Path:
    """Create a directory with some files and an empty sub-directory."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (directory / "void").mkdir(parents=True, exist_ok=True)
    return directory


def commit(directories: StoreDirectories, state_id: str, files: dict[str, bytes] = FILES) -> CommittedDirectory:
    """Create a directory and adopt it."""
    return directories.adopt(fill(directories.staging(), files), state_id, None)


def expected(files: dict[str, bytes] = FILES) -> dict[str, tuple[int, bytes]]:
    """Return the size and hash of each file."""
    return {name: (len(content), content_hash(content)) for name, content in files.items()}


def names(directory: Path) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(os.listdir(directory))


def test_adopt_then_find(directories: StoreDirectories, root: Path) -> None:
    """Invariant 10: an adopted directory is found for its own state only, in this process and the next."""
    adopted = commit(directories, "s1")
    assert adopted.state_id == "s1"
    assert dict(adopted.files) == expected()
    assert directories.find("s1") == adopted
    assert directories_at(root).find("s1") == adopted
    assert directories.find("s2") is None
    assert (adopted.path / "void").is_dir()
    assert names(root / "staging") == []


def test_nothing_is_made_by_looking(directories: StoreDirectories, root: Path) -> None:
    """A search in a root that does not exist does not create it."""
    assert directories.find("s1") is None
    assert directories.reusable() == []
    directories.keep_only([])
    assert not root.exists()


def test_files_that_are_no_state_are_left_out(directories: StoreDirectories) -> None:
    """A20: locks, logs, offsets and leftovers are neither hashed nor kept."""
    extra = {
        "LOCK": b"",
        "LOG": b"x",
        "LOG.old.12": b"x",
        "000004.log": b"",
        "a.tmp": b"x",
        "OFFSET-v2": b"1",
        "000007.dbtmp": b"x",
    }
    staging = fill(directories.staging(), {**FILES, **extra})
    made = directories.finished(staging)
    assert made.files == {path: (size, None) for path, (size, _) in expected().items()}
    adopted = directories.adopt(staging, "s1", made.files)
    assert adopted.files == expected()
    assert set(names(adopted.path)) & set(extra) == set()
    assert directories.find("s1") == adopted


def test_unflushed_log_is_refused(directories: StoreDirectories) -> None:
    """A write-ahead log with content means that the table files are not the complete state, so it is refused."""
    staging = fill(directories.staging(), {**FILES, "000004.log": b"records"})
    with pytest.raises(InvalidError, match="flush"):
        directories.finished(staging)
    with pytest.raises(InvalidError, match="flush"):
        directories.adopt(staging, "s1", expected())
    assert directories.find("s1") is None


@pytest.mark.parametrize(
    "files",
    [
        {**expected(), "more.sst": (1, b"0" * 16)},
        {name: identity for name, identity in expected().items() if name != "CURRENT"},
        {**expected(), "CURRENT": (17, expected()["CURRENT"][1])},
    ],
    ids=["one is missing", "one too many", "another size"],
)
def test_adopt_refuses_what_does_not_match(directories: StoreDirectories, files: dict[str, tuple[int, bytes]]) -> None:
    """Invariant 9: a directory that differs from the announced files does not become a state."""
    staging = fill(directories.staging())
    with pytest.raises(CorruptError):
        directories.adopt(staging, "s1", files)
    assert directories.find("s1") is None


def test_adopt_of_nothing(directories: StoreDirectories) -> None:
    """A missing staging directory raises MissingState."""
    with pytest.raises(MissingState):
        directories.adopt(directories.staging(), "s1", None)


def test_adopt_keeps_a_good_directory_of_the_same_state(directories: StoreDirectories, root: Path) -> None:
    """Invariant 12: two attempts that restore the same state leave one directory, the first one."""
    first = commit(directories, "s1")
    inode = os.stat(first.path).st_ino
    second = directories_at(root)
    assert commit(second, "s1") == first
    assert os.stat(first.path).st_ino == inode
    assert names(root / "staging") == []


def test_adopt_replaces_a_bad_directory_of_the_same_state(directories: StoreDirectories) -> None:
    """A25: a directory that does not verify is replaced and never merged with the new one."""
    first = commit(directories, "s1")
    (first.path / "stray").write_bytes(b"x")
    again = commit(directories, "s1")
    assert "stray" not in names(again.path)
    assert directories.find("s1") == again


@pytest.mark.parametrize("state_id", ["", ".", "..", "../x", "a/b", "a\0b", ".hidden", "x.manifest", "x" * 201])
def test_state_ids_are_checked(directories: StoreDirectories, state_id: str) -> None:
    """Invariant 15: a state ID that could lead elsewhere is refused."""
    with pytest.raises(InvalidError):
        directories.find(state_id)
    with pytest.raises(InvalidError):
        directories.adopt(Path("/nowhere"), state_id, None)


def _same_size(path: Path) -> None:
    before = os.stat(path)
    path.write_bytes(b"T" + path.read_bytes()[1:])
    assert os.stat(path).st_size == before.st_size
    # the time must differ from the recorded one even if the file system's clock is coarse
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def _same_size_and_time(path: Path) -> None:
    before = os.stat(path)
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _link_to(target: str) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return plant


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest missing": lambda d: d.with_name("s1.manifest").unlink(),
    "manifest truncated": lambda d: os.truncate(d.with_name("s1.manifest"), 40),
    "manifest empty": lambda d: os.truncate(d.with_name("s1.manifest"), 0),
    "manifest altered": lambda d: d.with_name("s1.manifest").write_bytes(
        d.with_name("s1.manifest").read_bytes().replace(b"5000", b"5001")
    ),
    "manifest of another state": lambda d: os.rename(_other_manifest(d), d.with_name("s1.manifest")),
    "manifest is a link": lambda d: _manifest_link(d.with_name("s1.manifest")),
    "directory missing": lambda d: durable.remove(d),
    "directory is a file": lambda d: (durable.remove(d), d.write_bytes(b"x")),
    "directory is a link": lambda d: (os.rename(d, d.parent.parent / "moved"), d.symlink_to(d.parent.parent / "moved")),
    "file missing": lambda d: (d / "CURRENT").unlink(),
    "file truncated": lambda d: os.truncate(d / "000008.sst", 100),
    "file grown": lambda d: os.truncate(d / "empty", 1),
    "file altered, same size": lambda d: _same_size(d / "000008.sst"),
    "small file lost its content in a power failure": lambda d: _same_size_and_time(d / "CURRENT"),
    "nested file altered, same size": lambda d: _same_size(d / "sub/deep/000009.sst"),
    "extra file": lambda d: (d / "extra").write_bytes(b""),
    "extra directory": lambda d: (d / "another").mkdir(),
    "empty directory missing": lambda d: (d / "void").rmdir(),
    "file is a link": lambda d: _link_to("/etc/hostname")(d / "CURRENT"),
    "file is a FIFO": lambda d: ((d / "CURRENT").unlink(), os.mkfifo(d / "CURRENT")),
    "file is a directory": lambda d: ((d / "CURRENT").unlink(), (d / "CURRENT").mkdir()),
    "directory inside is a file": lambda d: ((d / "void").rmdir(), (d / "void").write_bytes(b"")),
    "manifest is a directory": lambda d: (d.with_name("s1.manifest").unlink(), d.with_name("s1.manifest").mkdir()),
}


def _other_manifest(directory: Path) -> Path:
    root = directory.parent.parent
    commit(directories_at(root), "other")
    return directory.with_name("other.manifest")


def _manifest_link(path: Path) -> None:
    os.rename(path, path.parent.parent / "manifest.copy")
    path.symlink_to(path.parent.parent / "manifest.copy")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_does_not_verify_is_removed(
    damage: Callable[[Path], object], directories: StoreDirectories, root: Path
) -> None:
    """Invariant 10, faults 1, 7 and 28: a directory damaged by a crash or by hand is not used, and is removed."""
    adopted = commit(directories, "s1")
    damage(adopted.path)
    assert directories.find("s1") is None
    assert not os.path.lexists(adopted.path)
    assert not os.path.lexists(adopted.path.with_name("s1.manifest"))
    assert Path("/etc/hostname").exists() or not Path("/etc").exists()
    again = commit(directories, "s1")
    assert directories.find("s1") == again


def test_a_directory_that_lacks_a_file_is_left_to_the_next_restore(directories: StoreDirectories, root: Path) -> None:
    """Invariant 10: the directory is not used as a state. Its other files stay until the next clean-up."""
    adopted = commit(directories, "s1")
    (adopted.path / "000008.sst").unlink()
    assert directories.find("s1") is None
    (left,) = directories.leftovers()
    assert "000008.sst" not in names(left)
    assert {"CURRENT", "sub"} <= set(names(left))
    directories.keep_only({"s1"})
    assert directories.leftovers() == []


def test_removal_of_a_linked_directory_leaves_its_target(directories: StoreDirectories, root: Path) -> None:
    """Fault 28: the target of a planted link is neither used nor changed."""
    adopted = commit(directories, "s1")
    os.rename(adopted.path, root / "moved")
    adopted.path.symlink_to(root / "moved")
    assert directories.find("s1") is None
    assert names(root / "moved") == names(fill(root / "reference"))


def test_touched_but_equal_content_is_kept(directories: StoreDirectories, root: Path) -> None:
    """If only the times differ, as in a copied directory, the hashes decide and the new times are recorded."""
    adopted = commit(directories, "s1")
    for name in ("CURRENT", "000008.sst"):
        os.utime(adopted.path / name, ns=(1, 1))
    before = (root / "committed" / "s1.manifest").read_bytes()
    assert directories.find("s1") == adopted
    after = (root / "committed" / "s1.manifest").read_bytes()
    assert after != before
    assert directories.find("s1") == adopted
    assert (root / "committed" / "s1.manifest").read_bytes() == after


def test_a_limit_takes_no_memory(tmp_path: Path) -> None:
    """Reading a small file needs memory for the file only."""
    (tmp_path / "note").write_bytes(b"12")
    assert durable.read_small(tmp_path / "note", 1 << 62) == b"12"


@pytest.mark.parametrize("name", ["s1/CURRENT", "s1.manifest"])
def test_a_directory_that_the_disk_cannot_read_is_restored(
    directories: StoreDirectories, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It blocks neither another directory nor the next restore. Without descriptors, nothing is given up."""
    commit(directories, "s1")
    other = commit(directories, "s2")
    open_file = durable.open_file

    def opened(path: Path) -> BinaryIO:
        if path.as_posix().endswith(name):
            raise OSError(error, os.strerror(error), str(path))
        return open_file(path)

    monkeypatch.setattr(durable, "open_file", opened)
    error = errno.EMFILE
    with pytest.raises(RetryableError):
        directories.reusable()
    error = errno.EIO
    assert [found.state_id for found in directories.begin_restore().reusable] == ["s2"]
    assert directories.find("s1") is None
    assert directories.find("s2") == other


@pytest.mark.parametrize(("altered", "distrusted"), [(False, False), (True, False), (True, True)])
def test_what_was_made_before_a_reboot_is_hashed(
    directories: StoreDirectories, root: Path, altered: bool, distrusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 10: large files are not synced, so after a reboot a directory is used only if their content is correct,
    even if size and time match. A check before the reboot reads what is not on the disk yet."""
    large = {"000008.sst": b"t" * 200_000}
    commit(directories, "s1", large)
    if distrusted:
        directories.distrust()
        assert directories.find("s1") is not None
    path = root / "committed" / "s1" / "000008.sst"
    status = path.stat()
    if altered:  # as after a power failure: the file has its size but not its content
        path.write_bytes(b"\0" * 200_000)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert directories.find("s1") is not None
    monkeypatch.setattr(durable, "boot_id", lambda: "another run")
    again = directories_at(root)
    assert (again.find("s1") is None) == altered
    if not altered:
        staging = directories.staging()
        again.clone(again.find("s1")).rename(staging)
        assert directories.adopt(staging, "s2", None).files == expected(large)
    again.close()


def test_files_are_synced_where_no_run_of_the_machine_is_told(
    directories: StoreDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a reboot cannot be detected, large files are synced before the directory counts."""
    synced: list[Path] = []
    monkeypatch.setattr(durable, "boot_id", lambda: "")
    monkeypatch.setattr(durable, "sync", synced.append)
    commit(directories, "s1", {"000008.sst": b"t" * 200_000, "small": b"s"})
    assert [path.name for path in synced] == ["000008.sst", "committed"]


def test_reusable_is_newest_first_and_verified(directories: StoreDirectories) -> None:
    """Invariant 10: files of older directories are offered only while those directories verify."""
    for state_id in ("b", "a", "c"):
        commit(directories, state_id)
    (directories.find("a") or pytest.fail("a")).path.joinpath("stray").touch()
    assert [found.state_id for found in directories.reusable()] == ["c", "b"]


def test_hashes_are_remembered_by_a_held_inode(directories: StoreDirectories, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 5: each file is hashed once. A file that a committed directory holds by hard link is not read again."""
    adopted = commit(directories, "s1")
    staging = directories.staging()
    fill(staging, {"new.sst": b"new"})
    os.link(adopted.path / "000008.sst", staging / "000077.sst")
    read: list[str] = []
    hash_file = durable.hash_file
    monkeypatch.setattr(durable, "hash_file", lambda path: read.append(path.name) or hash_file(path))
    made = directories.finished(staging)
    assert made.files["new.sst"] == (3, None)
    adopted = directories.adopt(staging, "s2", made.files)
    assert adopted.files == expected({"new.sst": b"new", "000077.sst": FILES["000008.sst"]})
    assert read == ["new.sst"]


def test_tables_that_a_database_left_as_they_were_are_not_read_again(
    directories: StoreDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a database has written to a directory, only tables with the same name and size keep their known hash. The
    file of a memory store is no table: each flush writes it again under the same name."""
    written = {"000008.sst": b"table", "000009.sst": b"longer", "CURRENT": b"other", "memory.segment": b"other"}
    staging = fill(directories.staging(), written)
    known = {name: (5, content_hash(b"table")) for name in (*written, "gone.sst")}
    read: list[str] = []
    hash_file = durable.hash_file
    monkeypatch.setattr(durable, "hash_file", lambda path: read.append(path.name) or hash_file(path))
    adopted = directories.adopt(staging, "s1", None, tables=known)
    assert sorted(read) == ["000009.sst", "CURRENT", "memory.segment"]
    assert adopted.files["000008.sst"] == (5, content_hash(b"table"))
    assert adopted.files["CURRENT"] == adopted.files["memory.segment"] == (5, content_hash(b"other"))


def test_an_altered_file_is_never_taken_for_a_new_one(directories: StoreDirectories) -> None:
    """FAULT 44: a shared table file with altered content is refused, and its states are no longer found. A file that
    was only touched is hashed."""
    adopted = commit(directories, "s1")
    staging = fill(directories.staging(), {"keep": b""})
    os.link(adopted.path / "000008.sst", staging / "000077.sst")
    os.utime(staging / "000077.sst", ns=(1, 1))
    assert directories.finished(staging).files["000077.sst"] == expected(FILES)["000008.sst"]
    content = bytearray(FILES["000008.sst"])
    content[7] ^= 1
    (staging / "000077.sst").write_bytes(content)
    with pytest.raises(CorruptFile, match="altered"):
        directories.finished(staging)
    with pytest.raises(CorruptFile, match="altered"):
        directories.adopt(staging, "s2", None)
    assert directories.find("s2") is None
    assert directories.find("s1") is None


def test_what_is_in_doubt_is_hashed_before_it_is_used(directories: StoreDirectories, root: Path) -> None:
    """FAULT 44: hashing finds a flipped bit with unchanged size and time in every directory that shares the file, and
    in any process. Intact directories are used again."""
    large = fill(directories.staging(), {"000008.sst": b"table" * 20_000})
    table = directories.adopt(large, "s1", None).path / "000008.sst"
    staging = fill(directories.staging(), {"000010.sst": b"other" * 1000})
    os.link(table, staging / "000008.sst")
    directories.adopt(staging, "s2", None)
    whole = fill(directories.staging(), {"000011.sst": b"whole" * 10_000})
    directories.adopt(whole, "s3", None)
    flip(table)
    assert directories.find("s1") is not None, "nothing that is cheap to look at has changed"
    directories.distrust()
    other = directories_at(root)
    assert [found.state_id for found in other.reusable()] == ["s3"]
    assert other.find("s1") is other.find("s2") is None
    directories.distrust()
    flip(root / "committed" / "s3" / "000011.sst")
    staging = fill(directories.staging(), {"keep": b""})
    os.link(root / "committed" / "s3" / "000011.sst", staging / "000011.sst")
    with pytest.raises(CorruptFile, match="altered"):
        directories.finished(staging)


def flip(path: Path) -> None:
    """Flip one bit of a file and keep its size and time."""
    before, content = os.stat(path), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_reused_inode_is_hashed_again(how: str, directories: StoreDirectories) -> None:
    """Fault 33: without an unchanged hard link to it, an inode number and a size prove nothing."""
    adopted = commit(directories, "s1")
    table = adopted.path / "000008.sst"
    recorded, other = os.stat(table), b"TABLE" * 1000
    staging = fill(directories.staging(), {"keep": b""})
    target = staging / "000008.sst"
    table.unlink()
    target.write_bytes(other)
    # the two differ only in that nothing holds the old inode
    os.utime(target, ns=(recorded.st_atime_ns, recorded.st_mtime_ns))
    if how == "replaced":
        table.write_bytes(b"LBTAE" * 1000)
        os.utime(table, ns=(recorded.st_atime_ns, recorded.st_mtime_ns))
    assert directories.finished(staging).files["000008.sst"] == (5000, None)
    assert directories.adopt(staging, "s2", None).files["000008.sst"] == (5000, content_hash(other))


def test_clone_links_tables_and_copies_the_rest(directories: StoreDirectories, root: Path) -> None:
    """A live directory shares only immutable files, so writes to other files do not reach the committed directory."""
    adopted = commit(directories, "s1")
    live = directories.clone(adopted)
    assert os.path.samefile(live / "000008.sst", adopted.path / "000008.sst")
    assert os.path.samefile(live / "sub/deep/000009.sst", adopted.path / "sub/deep/000009.sst")
    (live / "CURRENT").write_bytes(b"changed")
    (live / "000099.sst").write_bytes(b"new")
    assert (live / "void").is_dir()
    assert directories.find("s1") == adopted
    directories.discard(live)
    assert names(root / "live") == []
    assert directories.find("s1") == adopted


def test_clone_of_nothing_is_empty(directories: StoreDirectories) -> None:
    """Without a state, each clone is a new empty directory."""
    first, second = directories.clone(None), directories.clone(None)
    assert first != second
    assert names(first) == names(second) == []


@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOSYS])
def test_clone_copies_where_links_are_impossible(
    directories: StoreDirectories, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """On a file system without hard links, a clone copies the files."""
    adopted = commit(directories, "s1")

    def no_links(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", no_links)
    live = directories.clone(adopted)
    assert (live / "000008.sst").read_bytes() == FILES["000008.sst"]
    assert not os.path.samefile(live / "000008.sst", adopted.path / "000008.sst")


def test_clone_after_removal_is_missing_state(directories: StoreDirectories, root: Path) -> None:
    """Cloning a directory that was removed in the meantime raises MissingState and leaves no partial clone."""
    adopted = commit(directories, "s1")
    directories_at(root).keep_only([])
    # the other one spares what this living owner has just created
    assert directories.find("s1") == adopted
    directories.keep_only([])
    with pytest.raises(MissingState):
        directories.clone(adopted)
    assert names(root / "live") == []


def test_clone_on_a_full_disk(directories: StoreDirectories, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24: a full disk raises DiskFull. The committed directory stays and no partial clone is left."""
    adopted = commit(directories, "s1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "copy_file", full)
        with pytest.raises(DiskFull):
            directories.clone(adopted)
    assert names(root / "live") == []
    assert directories.find("s1") == adopted


def test_keep_only(directories: StoreDirectories, root: Path) -> None:
    """A clean-up removes other states and the leftovers of crashes. It keeps the requested states and those in use."""
    for state_id in ("s1", "s2", "s3"):
        commit(directories, state_id)
    attempt, dead = "1700000000000-0123456789abcdef", "fedcba9876543210"
    (root / "committed" / f"{attempt}-half").mkdir()
    (root / "committed" / f"{attempt}-lost.manifest").write_bytes(b"x")
    (root / "committed" / f"{attempt}-s4.manifest.tmp").write_bytes(b"x")
    (root / "committed" / f"{attempt}-link").symlink_to("/etc")
    (root / "live" / f"{attempt}.{dead}").mkdir()
    (root / "staging" / f"{attempt}.left").mkdir()
    (root / "staging" / f"{attempt}.{dead}").symlink_to("/etc")
    mine, other = directories.clone(None), directories_at(root)
    theirs = other.clone(None)
    commit(other, "s5")
    directories.keep_only(["s2", "never"])
    assert names(root / "committed") == ["s2", "s2.manifest", "s5", "s5.manifest"]
    assert sorted(map(str, (root / "live").iterdir())) == sorted(map(str, (mine, theirs)))
    assert names(root / "staging") == []
    assert Path("/etc").is_dir()
    other.close()
    directories.keep_only(["s2"])
    assert names(root / "committed") == ["s2", "s2.manifest"]
    assert list((root / "live").iterdir()) == [mine]


def test_remove_takes_the_state_away_whoever_made_it(directories: StoreDirectories, root: Path) -> None:
    """A state found to be damaged can be removed even if a living owner has just created it."""
    commit(directories, "s1")
    other = directories_at(root)
    commit(other, "s2")
    directories.remove("s2")
    directories.remove("never")
    assert names(root / "committed") == ["s1", "s1.manifest"]
    assert other.find("s2") is None
    with pytest.raises(InvalidError):
        directories.remove("../committed")


def test_old_directory_of_a_living_owner_goes(directories: StoreDirectories, root: Path) -> None:
    """Invariant 13: a long-lived worker does not keep its old directories on the disk for ever."""
    commit(directories, "s1")
    later = directories_at(root, start=3600)
    commit(later, "s2")
    later.keep_only(["s2"])
    assert names(root / "committed") == ["s2", "s2.manifest"]


def test_half_adopted_state_is_cleaned_up_also_when_it_is_kept(directories: StoreDirectories, root: Path) -> None:
    """Fault 1: the next clean-up removes a directory whose manifest was not written before a crash."""
    fill(root / "committed" / "s1")
    commit(directories, "s2")
    directories.keep_only(["s1", "s2"])
    assert names(root / "committed") == ["s2", "s2.manifest"]


CHILD = """
import os, signal, sys
from pathlib import Path
from statemgr.local.machine import SystemClock, system_ids
from statemgr.local.directories import StoreDirectories
directories = StoreDirectories(Path(sys.argv[1]), SystemClock(), system_ids())
print(directories.clone(None), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_owner_is_told_from_a_living_one(directories: StoreDirectories, root: Path) -> None:
    """Fault 1: a live directory of another process stays while that process lives, and is removed once it is killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        live = Path(child.stdout.readline().strip())
        assert live.is_dir()
        directories.keep_only([])
        assert live.is_dir()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(30) == -9
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    directories.keep_only([])
    assert not live.exists()


def test_forked_child_does_not_declare_its_parent_dead(directories: StoreDirectories, root: Path) -> None:
    """A forked child that ends does not affect its parent's directories."""
    live = directories.clone(None)
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from statemgr.local.machine import SystemClock, system_ids\n"
        "from statemgr.local.directories import StoreDirectories\n"
        "d = StoreDirectories(Path(sys.argv[1]), SystemClock(), system_ids())\n"
        "live = d.clone(None)\n"
        "child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "StoreDirectories(Path(sys.argv[1]), SystemClock(), system_ids()).keep_only([])\n"
        "print(live.is_dir())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=600, check=True
    )
    assert run.stdout == "True\n"
    assert live.is_dir()


def test_discard_is_for_own_directories_only(directories: StoreDirectories, tmp_path: Path) -> None:
    """Neither a committed directory nor any other path can be discarded. A second discard is no error."""
    adopted = commit(directories, "s1")
    for path in (adopted.path, tmp_path, adopted.path.parent.parent):
        with pytest.raises(InvalidError):
            directories.discard(path)
    staging = fill(directories.staging())
    directories.discard(staging)
    directories.discard(staging)
    assert not staging.exists()


def test_what_is_called_otherwise_is_not_ours(directories: StoreDirectories, root: Path, tmp_path: Path) -> None:
    """FAULT 49, invariant 16: a clean-up keeps everything with a name that statemgr does not use. It also keeps the
    target of a link with one of statemgr's names, and reads nothing behind it."""
    commit(directories, "s1")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.sst").write_bytes(b"x")
    planted = []
    for part in ("committed", "live", "staging", "owners"):
        for name in ("photos", "notes.manifest", "1-2.left", "x.dead"):
            (root / part / name).mkdir()
            (root / part / name / "precious").write_bytes(b"x")
            planted.append(root / part / name / "precious")
        os.mkfifo(root / part / "fifo")
        (root / part / "link").symlink_to(outside)
        planted += [root / part / "fifo", root / part / "link"]
    ours = "1700000000000-0123456789abcdef"
    (root / "staging" / f"{ours}.left").symlink_to(outside)
    (root / "live" / f"{ours}.0123456789abcdef").symlink_to(outside)
    os.mkfifo(root / "committed" / f"{ours}-totals.manifest")
    assert directories.leftovers() == []
    assert [found.state_id for found in directories.reusable()] == ["s1"]
    directories.keep_only(["s1"])
    assert all(os.path.lexists(path) for path in planted)
    assert names(outside) == ["precious.sst"]
    assert names(root / "staging") == sorted(["photos", "notes.manifest", "1-2.left", "x.dead", "fifo", "link"])
    assert not os.path.lexists(root / "committed" / f"{ours}-totals.manifest")


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "huge"])
def test_a_planted_file_ends_in_an_error_at_once(kind: str, directories: StoreDirectories, root: Path) -> None:
    """FAULT 49: the lock and a manifest are read only if they are regular files of a plausible size."""
    commit(directories, "s1")
    for path in (root / "lock", root / "committed" / "s1.manifest"):
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("/etc/passwd")
        else:
            path.touch()
            os.truncate(path, 1 << 42)
        if path.name == "lock" and kind != "huge":
            with pytest.raises(CorruptFile):
                directories.find("s1")
        else:
            assert (directories.find("s1") is None) == (path.name != "lock")
        durable.remove(path)


def test_local_files_are_for_this_user_alone(directories: StoreDirectories, root: Path) -> None:
    """Invariant 16: directories have mode 0700 and files 0600, whatever the umask is."""
    umask = os.umask(0)
    try:
        adopted = commit(directories, "s1")
        live = directories.clone(adopted)
    finally:
        os.umask(umask)
    for path in (root, *(root / part for part in ("committed", "live", "staging", "owners")), live):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    found = [path for path in (*adopted.path.rglob("*"), *live.rglob("*"), root / "lock") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}


@pytest.mark.parametrize("gone", ["owners", "root"])
def test_a_living_owner_keeps_what_is_its_own(directories: StoreDirectories, root: Path, gone: str) -> None:
    """FAULT 47: if someone deletes the sign of life or the root, a living owner still owns what it creates later."""
    commit(directories, "s1")
    before = directories.clone(None)
    shutil.rmtree(root / "owners" if gone == "owners" else root)
    live = directories.clone(None)
    directories.keep_only([])
    assert live.is_dir()
    assert before.is_dir() == (gone == "owners")
    other = directories_at(root)
    commit(other, "s2")
    other.keep_only(["s2"])
    assert live.is_dir()


@pytest.mark.parametrize("part", ["committed", "live", "staging", "owners", ""])
def test_planted_structure_is_refused(part: str, directories: StoreDirectories, root: Path, tmp_path: Path) -> None:
    """Fault 28: a link in place of one of the root's own directories is refused, and nothing is written behind it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = root / part if part else root
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(elsewhere)
    with pytest.raises(InvalidError, match="symbolic link"):
        directories.staging()
    with pytest.raises(InvalidError, match="symbolic link"):
        directories.find("s1")
    with pytest.raises(InvalidError, match="symbolic link"):
        directories.keep_only([])
    assert names(elsewhere) == []


def test_link_in_a_staging_directory_is_refused(directories: StoreDirectories) -> None:
    """Fault 28: a link among the files to adopt is never followed."""
    staging = fill(directories.staging())
    (staging / "passwd.sst").symlink_to("/etc/passwd")
    with pytest.raises(CorruptError):
        directories.finished(staging)
    with pytest.raises(CorruptError):
        directories.adopt(staging, "s1", None)


def test_many_threads_adopt_find_and_clean_up(root: Path) -> None:
    """Concurrent attempts of one task neither deadlock nor see an incomplete directory."""
    failures: list[BaseException] = []

    def attempt(number: int) -> None:
        try:
            mine = StoreDirectories(root, SystemClock(), system_ids())
            for step in range(5):
                state_id = f"s{step}"
                adopted = commit(mine, state_id)
                try:
                    live = mine.clone(adopted)
                except MissingState:
                    continue
                assert (live / "000008.sst").read_bytes() == FILES["000008.sst"]
                mine.discard(live)
                found = mine.find(state_id)
                assert found is None or dict(found.files) == expected()
                mine.keep_only([state_id])
            mine.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_lock_held_by_another_has_a_deadline(directories: StoreDirectories, root: Path) -> None:
    """Invariant 13: a lock that is never released causes no hang. After a minute the directories are others, without
    copies, where all continues; what was begun before is finished and discarded. When nobody is there any more, the
    next clean-up removes them."""
    adopted = commit(directories, "s1")
    live, begun = directories.clone(adopted), fill(directories.staging())
    late = directories_at(root)
    with exclusive(root / "lock", StepClock()):
        assert directories.find("s1") is None
        made = directories.adopt(begun, "s2", None)
        assert made.path.parent == root / "aside" / "committed"
        assert dict(made.files) == expected()
        directories.discard(live)
        for number, other in enumerate((directories, late)):
            found = other.find("s2")
            assert found == made
            clone = other.clone(found)
            assert (clone / "000008.sst").read_bytes() == FILES["000008.sst"], number
    after = directories_at(root)
    assert after.find("s1") == adopted
    after.keep_only({"s1"})
    assert directories.find("s2") == made, "others are still there"
    directories.close()
    late.close()
    after.keep_only({"s1"})
    assert names(root) == ["committed", "live", "lock", "owners", "staging"]
    assert after.find("s1") == adopted
    after.close()


def test_many_threads_go_aside_together(directories: StoreDirectories, root: Path) -> None:
    """Invariant 13: threads that wait for one lock at the same time all go on, in directories that work."""
    commit(directories, "s1")
    failures: list[BaseException] = []

    def adopt(number: int) -> None:
        try:
            commit(directories, f"t{number}")
        except BaseException as error:
            failures.append(error)

    with exclusive(root / "lock", StepClock()):
        threads = [threading.Thread(target=adopt, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    # the clock of this test runs so fast that a short wait for each other counts as a minute, too
    assert sorted(path.name for path in (root / "aside").rglob("t?")) == [f"t{number}" for number in range(6)]
    last = commit(directories, "last")
    assert directories.find("last") == last


@pytest.mark.long
def test_ten_thousand_files(directories: StoreDirectories) -> None:
    """Fault 32: ten thousand files go through adopt, find and clone."""
    files = {f"{i:06d}.sst": b"%d" % i for i in range(10_000)}
    adopted = commit(directories, "s1", files)
    assert len(adopted.files) == 10_000
    assert directories.find("s1") == adopted
    assert len(os.listdir(directories.clone(adopted))) == 10_001


def test_descriptors_do_not_grow_with_the_stores(tmp_path: Path) -> None:
    """The signs of life of a process share a descriptor, however many stores it uses. Each one ends by itself."""
    made = [directories_at(tmp_path / f"{task}" / f"{store}") for task in range(40) for store in range(5)]
    before = len(os.listdir("/proc/self/fd"))
    live = [directories.clone(None) for directories in made]
    assert len(os.listdir("/proc/self/fd")) < before + 5
    made[0].close()
    for path in live:
        directories_at(path.parent.parent).keep_only([])
    assert [path for path in live if not path.exists()] == live[:1]


def test_signs_of_life_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file cannot have another link, the next sign of life is a file of its own."""

    def full(*_: object, **__: object) -> None:
        raise OSError(31, "Too many links")

    monkeypatch.setattr(os, "link", full)
    made = [directories_at(tmp_path / name) for name in "ab"]
    live = [directories.clone(None) for directories in made]
    for path in live:
        directories_at(path.parent.parent).keep_only([])
        assert path.exists()


def test_closed_services_own_no_directories(tmp_path: Path) -> None:
    """The sign of life ends with the services, even while something still holds the directories object."""
    config = JobConfig.from_mapping(
        {
            "job.name": "job",
            "stores.totals.type": "memory",
            "state.dir": str(tmp_path),
            "kafka.bootstrap.servers": "none",
        }
    )
    services = open_services(config)
    directories = services.directories("Partition 0", "totals")
    staging = directories.staging()
    signs = staging.parent.parent / "owners"
    assert len(os.listdir(signs)) == 1
    services.close()
    assert os.listdir(signs) == []
