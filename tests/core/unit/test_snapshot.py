"""snapshot: the tree of the index, and what validation refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr.errors import CorruptBlob
from statemgr.model import snapshot
from statemgr.model.checkpoint import BlobRef
from statemgr.model.codecs import decode_index, encode_index
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex, validate
from tests import model_samples as sample

OWNER = {"job_name": "orders", "job_id": "1", "task": sample.TASK, "store": "totals"}
EMPTY = FileIndex("empty", 0, sample.HASH, inline=b"")


def with_files(*files: FileIndex) -> SnapshotIndex:
    """Return an index whose root holds just these files."""
    return replace(sample.INDEX, root=DirIndex("", files))


def nested(depth: int) -> SnapshotIndex:
    """Return an index with nested directories."""
    root = DirIndex("d", (EMPTY,))
    for _ in range(depth - 1):
        root = DirIndex("d", (), (root,))
    return replace(sample.INDEX, root=DirIndex("", (), (root,)))


def in_blob(blob_id: str, size: int = 3, content_hash: bytes = sample.HASH) -> FileIndex:
    """Return a file of 3 bytes in one blob."""
    return FileIndex("a", 3, sample.HASH, parts=(BlobRef(blob_id, size, content_hash),))


def test_a_real_index_is_accepted() -> None:
    """A realistic index is valid, with nested and empty directories, empty files, inline files and parts."""
    validate(sample.INDEX, "b", **OWNER)


def test_walk_and_blobs() -> None:
    """Paths are relative to the root. The index lists its blobs, and those that its own attempt added."""
    assert [path for path, _ in sample.INDEX.root.walk()] == ["000012.sst", "CURRENT", "journal/empty"]
    assert list(sample.INDEX.root.walk_dirs()) == ["journal", "journal/old", "z"]
    assert list(sample.INDEX.blobs()) == list(sample.INDEX.added()) == [sample.BLOB]
    assert list(replace(sample.INDEX, attempt="1800-cd").added()) == []
    assert sample.INDEX.root.size == 5


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".", "", "/x", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 256, "é" * 128],
)
@pytest.mark.parametrize("what", ["file", "directory"])
def test_hostile_names_are_refused(name: str, what: str) -> None:
    """Names that lead elsewhere, or that no file can have, are refused for files and directories alike."""
    inner = ((replace(EMPTY, name=name),), ()) if what == "file" else ((), (DirIndex(name),))
    for root in (DirIndex("", *inner), DirIndex("", (), (DirIndex("d", *inner),))):
        with pytest.raises(CorruptBlob) as caught:
            validate(replace(sample.INDEX, root=root), "the-blob", **OWNER)
        assert caught.value.where["blob"] == "the-blob"


@pytest.mark.parametrize("name", ["a\nb", "a\r", "\x1b[2J", "a\x85", "\u2028", "\ud800", "\udfff.sst", "a\u0378"])
def test_characters_that_not_every_file_system_holds(name: str) -> None:
    """Line breaks, other control characters, halves of surrogate pairs and what is no character are refused: in names
    of files and directories, in state IDs and in names of blobs. Other characters are accepted."""
    for index in (
        with_files(replace(EMPTY, name=name)),
        replace(sample.INDEX, root=DirIndex("", (), (DirIndex(name),))),
        replace(sample.INDEX, state_id=name),
        with_files(in_blob(f"orders/1/Partition_0/totals/x/{name}")),
    ):
        with pytest.raises(CorruptBlob) as refused:
            validate(index, "b", **OWNER)
        refused.value.message.encode()  # it can be logged
    validate(with_files(replace(EMPTY, name="a b-é-雪-🦀.sst")), "b", **OWNER)


@pytest.mark.parametrize(
    ("one", "other"),
    [("CURRENT", "current"), ("é", "e\u0301"), ("É", "e\u0301"), ("straße", "STRASSE"), ("Å", "\u212b"), ("ﬁ", "FI")],
)
def test_names_that_macos_takes_for_one(one: str, other: str) -> None:
    """Two names that differ only in case or in their Unicode form are one file on macOS: an index with both restores on
    Linux only, so it is refused, whether they are files, directories or one of each."""
    first, second = replace(EMPTY, name=one), replace(EMPTY, name=other)
    for root in (
        DirIndex("", (first, second)),
        DirIndex("", (first,), (DirIndex(other),)),
        DirIndex("", (), (DirIndex(one), DirIndex(other))),
    ):
        with pytest.raises(CorruptBlob, match="only in case or Unicode form"):
            validate(replace(sample.INDEX, root=root), "b", **OWNER)
    validate(replace(sample.INDEX, root=DirIndex("", (first,), (DirIndex("d", (second,)),))), "b", **OWNER)


@pytest.mark.parametrize(
    "root",
    [
        DirIndex("", (EMPTY, EMPTY)),
        DirIndex("", (EMPTY,), (DirIndex("empty"),)),
        DirIndex("", (), (DirIndex("d"), DirIndex("d", (EMPTY,)))),
        DirIndex("", (), (DirIndex("d", (EMPTY, EMPTY)),)),
    ],
)
def test_duplicate_names_are_refused(root: DirIndex) -> None:
    """A name that appears twice in a directory is refused, whether as files, as directories or as one of each."""
    with pytest.raises(CorruptBlob, match="appears twice"):
        validate(replace(sample.INDEX, root=root), "b", **OWNER)


@pytest.mark.parametrize(
    "file",
    [
        FileIndex("a", -1, sample.HASH, inline=b""),
        FileIndex("a", snapshot.MAX_FILE_SIZE + 1, sample.HASH),
        FileIndex("a", 4, sample.HASH, inline=b"123"),
        FileIndex("a", 3, sample.HASH, inline=b"123", parts=(sample.BLOB,)),
        FileIndex("a", 3, sample.HASH),
        FileIndex("a", 4, sample.HASH, parts=(sample.BLOB,)),
        FileIndex("a", 3, sample.HASH, parts=(sample.BLOB, replace(sample.BLOB, size=-1))),
        FileIndex("a", 2, sample.HASH, parts=(sample.BLOB, replace(sample.BLOB, size=-1))),
        FileIndex("a", 3, b"short", parts=(sample.BLOB,)),
        in_blob(sample.BLOB.blob_id, content_hash=b"short"),
        *(FileIndex("a", 3, sample.HASH, parts=(sample.BLOB,), frames=frames) for frames in [(-1,), (3,), (1, 1)]),
        FileIndex("a", 3, sample.HASH, parts=(replace(sample.BLOB, offset=0),), frames=(1,)),
        FileIndex("a", 3, sample.HASH, inline=b"123", frames=(1,)),
        *(FileIndex("a", 3, sample.HASH, inline=b"123", mode=mode) for mode in (0, 0o200, 0o077, 0o4755, -1)),
    ],
)
def test_absurd_sizes_and_hashes_are_refused(file: FileIndex) -> None:
    """Sizes that are negative, too large or inconsistent are refused, and so are invalid hashes, frames and modes."""
    with pytest.raises(CorruptBlob):
        validate(with_files(file), "b", **OWNER)


@pytest.mark.parametrize(
    "blob_id",
    [
        "other/1/Partition_0/totals/x/a.0",
        "orders/2/Partition_0/totals/x/a.0",
        "orders/11/x",
        "orders/1/../2/x",
        "orders/1/./x",
        "orders/1//x",
        "orders/1/",
        "orders/1/a\0b",
        "orders/1/a\\..\\b",
        "/orders/1/x",
        "",
    ],
)
def test_foreign_blobs_are_refused(blob_id: str) -> None:
    """An index may refer only to blobs under its own job's prefix, by plain names."""
    with pytest.raises(CorruptBlob, match="not one of this job's"):
        validate(with_files(in_blob(blob_id)), "b", **OWNER)
    with pytest.raises(CorruptBlob, match="not one of this job's"):
        validate(replace(sample.INDEX, previous=BlobRef(blob_id, 3, sample.HASH)), "b", **OWNER)


@pytest.mark.parametrize("field", OWNER)
def test_index_of_another_owner_is_refused(field: str) -> None:
    """An index of another job, job ID, task or store is refused, and the error names its owner."""
    with pytest.raises(CorruptBlob, match="it belongs to") as caught:
        validate(replace(sample.INDEX, **{field: "another"}), "b", **OWNER)
    assert "'another'" in str(caught.value)


@pytest.mark.parametrize("field", ["state_id", "attempt"])
def test_ids_that_are_paths_are_refused(field: str) -> None:
    """A state ID names a local directory and an attempt names a blob, so neither may lead elsewhere."""
    with pytest.raises(CorruptBlob):
        validate(replace(sample.INDEX, **{field: "../x"}), "b", **OWNER)


def test_depth_is_limited() -> None:
    """Directories up to the limit are accepted. Validation and decoding refuse deeper ones."""
    deepest = nested(snapshot.MAX_DEPTH)
    validate(deepest, "b", **OWNER)
    assert decode_index(encode_index(deepest)) == deepest
    with pytest.raises(CorruptBlob, match="deeper"):
        validate(nested(snapshot.MAX_DEPTH + 1), "b", **OWNER)
    with pytest.raises(CorruptBlob, match="deeper"):
        decode_index(encode_index(nested(100_000)))


def test_number_of_files_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index with more files and directories than the limit is refused, wherever they are."""
    monkeypatch.setattr(snapshot, "MAX_FILES", 6)
    validate(sample.INDEX, "b", **OWNER)
    monkeypatch.setattr(snapshot, "MAX_FILES", 5)
    with pytest.raises(CorruptBlob, match="more than 5 files"):
        validate(sample.INDEX, "b", **OWNER)


def test_inline_content_is_limited() -> None:
    """The total size of inline files has a limit."""
    half = bytes(snapshot.INLINE_TOTAL_LIMIT // 2)
    files = [FileIndex(name, len(half), sample.HASH, inline=half) for name in ("a", "b")]
    validate(with_files(*files), "b", **OWNER)
    with pytest.raises(CorruptBlob, match="inline"):
        validate(with_files(*files, FileIndex("c", 1, sample.HASH, inline=b"1")), "b", **OWNER)
