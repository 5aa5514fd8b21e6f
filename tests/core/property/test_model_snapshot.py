"""Diff, assembly, restore plan and validation, for any directory tree."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from statemgr.errors import CorruptBlob
from statemgr.model.checkpoint import BlobRef
from statemgr.model.codecs import decode_index, encode_index
from statemgr.model.diff import LocalFile, LocalTree, assemble, diff
from statemgr.model.hashing import content_hash
from statemgr.model.plan import plan_files
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex, validate
from tests.core.property import model_strategies as some

#: Few names and few contents, so that trees overlap in names, in contents, or in only one of them.
names = st.sampled_from(["a.sst", "b.sst", "CURRENT", "d", "e"])
contents = st.sampled_from([b"", b"1", b"2", b"22", b"large" * 10])
#: relative path → content
trees = st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), contents, max_size=8).map(
    lambda tree: {path: data for path, data in tree.items() if not any(p.startswith(path + "/") for p in tree)}
)


def local_tree(tree: Mapping[str, bytes]) -> LocalTree:
    """Return the tree as a local directory."""
    dirs = {path.rsplit("/", n)[0] for path in tree for n in range(1, path.count("/") + 1)}
    files = tuple(LocalFile(path, len(data), content_hash(data)) for path, data in sorted(tree.items()))
    return LocalTree(files, tuple(sorted(dirs)))


def uploaded(file: LocalFile, attempt: str) -> FileIndex:
    """Return the file as a commit records it after its upload."""
    parts = (BlobRef(f"j/1/Partition_0/s/{attempt}/{file.path}.0", file.size, file.hash),)
    return FileIndex(file.path.rpartition("/")[2], file.size, file.hash, parts=parts)


def commit(tree: Mapping[str, bytes], base: DirIndex | None, attempt: str) -> DirIndex:
    """Diff against the base, keep the unchanged files and 'upload' the rest."""
    local = local_tree(tree)
    added, kept = diff(local, base)
    files = {**kept, **{file.path: uploaded(file, attempt) for file in added}}
    return assemble(local, files)


@given(trees, trees)
def test_diff_applied_is_the_target(first: dict[str, bytes], second: dict[str, bytes]) -> None:
    """The kept and the added files make exactly the local tree, whatever the base had under the same names."""
    base = commit(first, None, "one")
    index = commit(second, base, "two")
    expected = {path: (len(data), content_hash(data)) for path, data in second.items()}
    assert {path: file.identity for path, file in index.walk()} == expected
    assert set(index.walk_dirs()) == set(local_tree(second).dirs)


@given(trees, trees)
def test_diff_uploads_no_content_twice(first: dict[str, bytes], second: dict[str, bytes]) -> None:
    """The diff adds what the base lacks, and keeps files by the base's blobs."""
    base = commit(first, None, "one")
    added, kept = diff(local_tree(second), base)
    had = {file.identity for _, file in base.walk()}
    assert {file.path for file in added} | set(kept) == set(second)
    assert not {file.path for file in added} & set(kept)
    assert all((file.size, file.hash) not in had for file in added)
    assert all(file in [f for _, f in base.walk()] for file in kept.values())


@given(trees)
def test_index_of_a_commit_is_accepted(tree: dict[str, bytes]) -> None:
    """The index that a commit makes passes validation before and after encoding."""
    index = SnapshotIndex("j", "1", "Partition 0", "s", "id", "one", 5, commit(tree, None, "one"))
    read = decode_index(encode_index(index), "b")
    validate(read, "b", job_name="j", job_id="1", task="Partition 0", store="s")
    assert read == index


@given(trees, st.lists(trees, max_size=2))
def test_plan_covers_every_file_once(target: dict[str, bytes], local: list[dict[str, bytes]]) -> None:
    """A plan links, writes inline or fetches every file of the index exactly once. It links files only by identity."""
    root = commit(target, None, "one")
    here = [{path: (len(data), content_hash(data)) for path, data in tree.items()} for tree in local]
    plan = plan_files(root, here)
    identities = {path: file.identity for path, file in root.walk()}
    sources = [set(plan.link), set(plan.inline), set(plan.fetch)]
    assert sum(map(len, sources)) == len(identities)
    assert set().union(*sources) == set(identities)
    for path, (number, source) in plan.link.items():
        assert here[number][source] == identities[path]
    known = {identity for tree in here for identity in tree.values()}
    assert all(file.identity not in known for file in plan.fetch.values())
    assert plan.fetch_bytes == sum(len(target[path]) for path in plan.fetch)


@given(some.indexes)
def test_validation_of_anything_is_a_typed_error(index: SnapshotIndex) -> None:
    """Validation accepts an index or raises CorruptBlob. Names in an accepted index stay inside the job's directory."""
    owner = {"job_name": index.job_name, "job_id": index.job_id, "task": index.task, "store": index.store}
    try:
        validate(index, "blob", **owner)
    except CorruptBlob:
        return
    for path, _ in index.root.walk():
        assert not {"", ".", ".."} & set(path.split("/"))
    assert all(blob.blob_id.startswith(f"{index.job_name}/{index.job_id}/") for blob in index.blobs())
