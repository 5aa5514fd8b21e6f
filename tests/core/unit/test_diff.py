"""diff: content identifies a file, and not its name, size or time."""

from __future__ import annotations

from statemgr.model.checkpoint import BlobRef
from statemgr.model.diff import LocalFile, LocalTree, assemble, diff
from statemgr.model.snapshot import DirIndex, FileIndex

ONE, TWO = b"1" * 16, b"2" * 16


def remote(name: str, size: int, content: bytes) -> FileIndex:
    """Return a file of an index."""
    return FileIndex(name, size, content, parts=(BlobRef(f"j/1/{name}", size, content),))


def test_first_commit_adds_everything() -> None:
    """Without a base, every local file is new."""
    file = LocalFile("a.sst", 5, ONE)
    assert diff(LocalTree((file,)), None) == ((file,), {})


def test_same_name_and_size_with_other_content_is_new() -> None:
    """RocksDB reuses file numbers, so a file with the same name and size but another hash is uploaded."""
    base = DirIndex("", (remote("000012.sst", 5, ONE),))
    file = LocalFile("000012.sst", 5, TWO)
    assert diff(LocalTree((file,)), base) == ((file,), {})


def test_same_content_under_another_name_is_kept() -> None:
    """A renamed file is not uploaded again, and comes back under its new name."""
    base = DirIndex("", (remote("000012.sst", 5, ONE),))
    local = LocalTree((LocalFile("d/000099.sst", 5, ONE),), ("d",))
    added, kept = diff(local, base)
    assert added == ()
    root = assemble(local, kept)
    assert [(path, file.parts) for path, file in root.walk()] == [("d/000099.sst", base.files[0].parts)]


def test_same_hash_with_another_size_is_new() -> None:
    """A file's size is part of its identity."""
    file = LocalFile("a", 6, ONE)
    assert diff(LocalTree((file,)), DirIndex("", (remote("a", 5, ONE),))) == ((file,), {})


def test_base_is_searched_at_every_depth() -> None:
    """Files in sub-directories of the base are found, and files without a local counterpart are not kept."""
    base = DirIndex("", (), (DirIndex("d", (remote("a", 5, ONE), remote("b", 5, TWO))),))
    added, kept = diff(LocalTree((LocalFile("d/a", 5, ONE),), ("d",)), base)
    assert (added, set(kept)) == ((), {"d/a"})


def test_two_local_files_of_one_content_share_it() -> None:
    """Both names refer to the one file of the base."""
    base = DirIndex("", (remote("a", 5, ONE),))
    added, kept = diff(LocalTree((LocalFile("a", 5, ONE), LocalFile("b", 5, ONE))), base)
    assert (added, set(kept)) == ((), {"a", "b"})


def test_assemble_sorts_and_keeps_empty_directories() -> None:
    """The tree does not depend on the order of its parts. It has empty directories and adds missing parents."""
    files = {"z": remote("z", 1, ONE), "d/e/f": remote("f", 2, TWO), "a": remote("a", 1, ONE)}
    local = tuple(LocalFile(path, file.size, file.hash) for path, file in files.items())
    root = assemble(LocalTree(local, ("d", "empty", "d/e")), files)
    assert root == assemble(LocalTree(local, ("empty",)), dict(reversed(files.items())))
    assert [path for path, _ in root.walk()] == ["a", "z", "d/e/f"]
    assert list(root.walk_dirs()) == ["d", "d/e", "empty"]


def test_mode_and_time_are_the_local_ones() -> None:
    """A file that is kept for its content gets its current local mode and time."""
    local = LocalTree((LocalFile("a", 5, ONE, mode=0o740, modified_ms=7),))
    base = DirIndex("", (remote("a", 5, ONE),))
    (file,) = assemble(local, diff(local, base)[1]).files
    assert (file.mode, file.private_mode, file.modified_ms) == (0o740, 0o700, 7)
