"""The backend ``blob-store``: incremental backup, clean-up and restore of one store's directory."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from statemgr.backends.blobs import catalogue
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import (
    CorruptBlob,
    CorruptError,
    DiskFull,
    InvalidError,
    MissingBlob,
    MissingState,
    StatemgrError,
    UnavailableError,
)
from statemgr.model.checkpoint import BlobMarker, ChangelogMarker, OpaqueMarker
from statemgr.model.codecs import encode_index
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex
from statemgr.phases import Phase, observed
from statemgr.ports import CommittedDirectory, RestoreRequest, StoreIdentity, list_blobs, no_progress
from tests.blob_faults import FaultyBlobStore, ManualClock
from tests.blob_snapshots import IDENTITY, Snapshots, committed, finished, index_of, marker_of, read_tree


def big(seed: int, size: int = 50_000) -> bytes:
    """Return content that is too large to be inside an index."""
    return (b"%d;" % seed) * (size // 2)


def noise(size: int, seed: int) -> bytes:
    """Return random bytes."""
    return random.Random(seed).randbytes(size)


TREE = {"CURRENT": b"MANIFEST-1\n", "000001.sst": big(1), "000002.sst": big(2, 250_000), "MANIFEST-1": b"m"}


@pytest.fixture
def blobs() -> FaultyBlobStore:
    """A blob store that fails when a test asks it to."""
    return FaultyBlobStore()


@pytest.fixture
def snapshots(tmp_path: Path, blobs: FaultyBlobStore) -> Iterator[Snapshots]:
    """The backend of one store."""
    made = Snapshots(tmp_path, blobs, ManualClock())
    yield made
    made.transfer.close()


# --- backup -----------------------------------------------------------------------------------------------


def test_first_upload(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """A2, A4, A8: the first commit uploads everything. Its marker names the index blob, and all blobs have a TTL."""
    prepared = snapshots.prepare(TREE)
    assert isinstance(prepared.marker, BlobMarker)
    assert index_of(prepared.marker).blob_id == "orders/1/Partition_0/totals/attempt-0/index"
    assert set(prepared.added_blobs) == snapshots.names() == snapshots.referenced(prepared.marker)
    assert all(info.expires_ms is not None for info in list_blobs(blobs, ""))
    index = snapshots.index(prepared.marker)
    assert (index.previous, index.state_id, index.attempt) == (None, "state-0", "attempt-0")
    assert snapshots.restore(prepared.marker)[0] == TREE


def test_small_files_are_inside_the_index(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """A commit of small files only costs one PUT."""
    snapshots.prepare({"CURRENT": b"x", "OPTIONS": b"y" * 16_384, "empty": b""})
    assert blobs.count("put") == 1


def test_small_new_files_share_packs(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """Packs make many files cost few PUTs and GETs. Fetching one file from a pack costs only its own bytes."""
    tree = {f"{n:03}.sst": noise(20_000 + n, n) for n in range(300)}
    marker = snapshots.commit(tree)
    packs = blobs.count("put") - 1
    assert packs == 2  # of 6 MB in all
    blobs.calls.clear()
    assert snapshots.restore(marker)[0] == tree
    assert blobs.count("get") <= packs + 1 + 1
    other = {name: data for name, data in tree.items() if name != "150.sst"}
    here = committed(snapshots.tmp_path / "here", other)
    blobs.ranges.clear()
    found, restored = snapshots.restore(marker, [here])
    assert found == tree
    assert restored.bytes_fetched < 100_000 + index_of(marker).size
    assert blobs.ranges[-1][1] == len(tree["150.sst"])


def test_a_pack_lives_as_long_as_one_of_its_files(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """Invariant 3: a clean-up deletes a pack only when nothing references any of its files."""
    tree = {f"{n}.sst": noise(30_000, n) for n in range(3)}
    first = snapshots.commit(tree)
    [pack] = [name for name in snapshots.names() if "/packs/" in name]
    second = snapshots.commit({"2.sst": tree["2.sst"], "9.sst": noise(50_000, 9)}, first)
    snapshots.clean_up([first], [second])
    assert pack in snapshots.names() == snapshots.referenced(second)
    third = snapshots.commit({"9.sst": noise(50_000, 9)}, second)
    snapshots.clean_up([second], [third])
    assert pack not in snapshots.names() == snapshots.referenced(third)


def test_a_corrupt_pack_names_the_blob(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """FAULTS 11: a restore finds altered bytes in a pack, and the error names the pack."""
    marker = snapshots.commit({f"{n}.sst": noise(30_000, n) for n in range(3)})
    [pack] = [name for name in snapshots.names() if "/packs/" in name]
    blobs.altered[pack] = lambda data: bytes([data[0] ^ 1]) + data[1:]
    with pytest.raises(CorruptBlob, match=pack):
        snapshots.restore(marker)


def test_an_index_holds_a_bounded_number_of_inline_bytes(snapshots: Snapshots) -> None:
    """Invariant 13: small files beyond one megabyte become blobs, even over several commits."""
    tree = {f"f{n:03}": bytes([n]) * 16_000 for n in range(100)}
    first = snapshots.commit(tree)
    more = {**tree, **{f"g{n:03}": bytes([n]) * 15_999 for n in range(100)}}
    second = snapshots.commit(more, first)
    for marker, expected in ((first, tree), (second, more)):
        inline = sum(len(file.inline or b"") for _, file in snapshots.index(marker).root.walk())
        assert 1_000_000 < inline <= 1024 * 1024
        assert snapshots.restore(marker)[0] == expected


def test_later_uploads_are_incremental(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """A5, A7, A8: each later commit uploads only what the acknowledged index lacks, even after a restart."""
    base = snapshots.commit(TREE)
    tree = dict(TREE)
    for number in range(3, 7):
        if number == 5:
            snapshots.reopen()
        before = snapshots.names()
        del tree[f"00000{number - 2}.sst"]
        tree[f"00000{number}.sst"] = big(number)
        prepared = snapshots.prepare(tree, base)
        assert isinstance(prepared.marker, BlobMarker)
        assert snapshots.names() - before == set(prepared.added_blobs)
        assert [name.rpartition("/")[2] for name in prepared.added_blobs] == [f"00000{number}.sst.0", "index"]
        assert snapshots.index(prepared.marker).previous == index_of(base)
        assert snapshots.restore(prepared.marker)[0] == tree
        base = prepared.marker


def test_same_name_and_size_but_other_content_is_uploaded(snapshots: Snapshots) -> None:
    """Invariant 5, FAULTS 14: only content decides whether a file is the same. A renamed file is not uploaded again."""
    base = snapshots.commit({"000009.sst": big(1), "000010.sst": big(2)})
    tree = {"000009.sst": big(3), "000011.sst": big(2)}
    prepared = snapshots.prepare(tree, base)
    assert prepared.marker is not None
    assert [name.rpartition("/")[2] for name in prepared.added_blobs] == ["000009.sst.0", "index"]
    assert snapshots.restore(prepared.marker)[0] == tree


def test_equal_files_are_uploaded_once(snapshots: Snapshots) -> None:
    """Files with the same content share blobs, within a directory and between directories."""
    tree = {"a.sst": big(1), "b.sst": big(1), "sub/c.sst": big(1)}
    prepared = snapshots.prepare(tree)
    assert len(prepared.added_blobs) == 2
    assert prepared.marker is not None
    assert snapshots.restore(prepared.marker)[0] == tree


def test_directories_of_every_kind(snapshots: Snapshots) -> None:
    """A26: nested and empty directories, empty files and equal file names in several directories all come back."""
    tree = {
        "x.sst": big(1), "a/x.sst": big(2), "a/b/c/x.sst": big(3), "a/empty/": b"", "void/deep/er/": b"",
        "nothing": b"", "a/nothing": b"", "index": big(4), "a_x.sst": big(5), ".hidden": big(6), "späß €.sst": big(7),
        "x" * 250: big(8), "a.b": big(9), "-": big(10),
    }  # fmt: skip
    base = snapshots.commit(tree)
    assert snapshots.restore(base)[0] == tree
    smaller = {"x.sst": big(1), "void/deep/": b""}
    after = snapshots.commit(smaller, base)
    assert snapshots.restore(after)[0] == smaller


def test_modes_come_back(snapshots: Snapshots, tmp_path: Path) -> None:
    """A restore sets the owner's permissions and gives others none. It does not reuse a file with another mode."""
    tree = {"large.sst": big(1), "small": b"inline", "plain": b"plain"}
    modes = {"large.sst": 0o500, "small": 0o444, "plain": 0o666}

    def commit(base: BlobMarker | None) -> tuple[CommittedDirectory, BlobMarker]:
        name = "first" if base is None else "second"
        local = committed(tmp_path / name, tree, name)
        for file, mode in modes.items():
            (local.path / file).chmod(mode)
            os.utime(local.path / file, (1_000, 2_000))
        marker = snapshots.prepare_directory(finished(local), base, name, name).marker
        assert isinstance(marker, BlobMarker)
        return local, marker

    local, first = commit(None)
    files = dict(snapshots.index(first).root.walk())
    assert {(name, file.mode, file.modified_ms) for name, file in files.items()} == {
        (name, mode, 2_000_000) for name, mode in modes.items()
    }
    snapshots.restore_into(first, tmp_path / "back")
    assert {n: stat.S_IMODE((tmp_path / "back" / n).stat().st_mode) for n in tree} == {
        "large.sst": 0o500,
        "small": 0o400,
        "plain": 0o600,
    }
    assert read_tree(tmp_path / "back") == tree
    modes["large.sst"] = 0o600
    _, second = commit(first)
    assert snapshots.restore(second, [local])[1].bytes_reused == 0
    assert snapshots.restore(first, [local])[1].bytes_reused >= len(tree["large.sst"])


def test_an_empty_store(snapshots: Snapshots) -> None:
    """FAULTS 32: an empty directory is a state like any other."""
    marker = snapshots.commit({})
    tree, restored = snapshots.restore(marker)
    assert (tree, restored.files) == ({}, {})


def test_many_files(snapshots: Snapshots) -> None:
    """FAULTS 32: a snapshot of thousands of files can be restored."""
    tree = {f"{n % 10}/{n:05}": b"%d" % n for n in range(3_000)}
    assert snapshots.restore(snapshots.commit(tree))[0] == tree


def test_planted_links_are_not_followed_by_a_backup(snapshots: Snapshots, tmp_path: Path) -> None:
    """FAULTS 28: a backup neither enters nor uploads a link in the directory."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "inner").mkdir()
    directory = committed(tmp_path / "local", {"a.sst": big(1)})
    (directory.path / "link").symlink_to(tmp_path / "outside")
    prepared = snapshots.prepare_directory(finished(directory))
    assert isinstance(prepared.marker, BlobMarker)
    assert snapshots.restore(prepared.marker)[0] == {"a.sst": big(1)}


def test_a_file_is_read_before_its_upload_only_where_the_diff_needs_it(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 5, one pass: a file with a new size is certainly new, so only its upload hashes it."""
    compared: list[str] = []
    hash_of = snapshots.transfer.hash_of
    monkeypatch.setattr(
        snapshots.transfer, "hash_of", lambda path, *where: compared.append(path.name) or hash_of(path, *where)
    )
    first = snapshots.commit({"a.sst": big(1), "b.sst": big(2) + b"b", "CURRENT": b"1"})
    assert compared == []
    tree = {
        "a2.sst": big(1),
        "b2.sst": big(3) + b"b",
        "c.sst": big(4) + b"cc",
        "d.sst": big(5) + b"ddd",
        "CURRENT": b"12",
    }
    tree["e.sst"] = tree["d.sst"]
    prepared = snapshots.prepare(tree, first)
    assert sorted(compared) == ["a2.sst", "b2.sst", "d.sst", "e.sst"]
    assert isinstance(prepared.marker, BlobMarker)
    assert snapshots.restore(prepared.marker)[0] == tree
    files = dict(snapshots.index(prepared.marker).root.walk())
    assert files["a2.sst"].parts == dict(snapshots.index(first).root.walk())["a.sst"].parts
    assert files["d.sst"].parts == files["e.sst"].parts


def test_a_small_file_that_changed_since_is_refused(snapshots: Snapshots, tmp_path: Path) -> None:
    """Invariant 2: the backend also checks files inside the index against the committed hash."""
    directory = committed(tmp_path / "local", {"CURRENT": b"MANIFEST-1"})
    (directory.path / "CURRENT").write_bytes(b"MANIFEST-2")
    with pytest.raises(CorruptError):
        snapshots.prepare_directory(finished(directory))
    assert snapshots.names() == set()


def test_an_unreadable_base_means_a_full_upload(
    snapshots: Snapshots, blobs: FaultyBlobStore, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS 12 and 13: without a readable acknowledged index, the backend logs it and uploads everything again."""
    for spoil in (blobs.delete, lambda name: blobs.altered.update({name: lambda data: data[:-1]})):
        base = snapshots.commit(TREE)
        of_base = snapshots.referenced(base)
        snapshots.reopen()
        spoil(index_of(base).blob_id)
        marker = snapshots.commit(TREE, base)
        assert len(snapshots.referenced(marker)) == len(of_base)
        assert not snapshots.referenced(marker) & of_base
        assert snapshots.index(marker).previous == index_of(base)
        assert snapshots.restore(marker)[0] == TREE
        assert "everything is uploaded again" in caplog.text
        caplog.clear()


def test_an_unreachable_base_fails_the_commit(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """FAULTS 8: a blob store that does not answer is no reason to upload everything."""
    base = snapshots.commit(TREE)
    snapshots.reopen()
    blobs.faults["get"] = [UnavailableError("503")]
    with pytest.raises(UnavailableError):
        snapshots.prepare(TREE, base)
    assert snapshots.prepare(TREE, base).marker is not None


def test_a_marker_of_another_backend_is_no_base(snapshots: Snapshots) -> None:
    """The chain starts again when the predecessor has no snapshot."""
    for base in (ChangelogMarker("t", "id", 0, 5), OpaqueMarker(b"x")):
        prepared = snapshots.prepare(TREE, base)
        assert isinstance(prepared.marker, BlobMarker)
        assert snapshots.index(prepared.marker).previous is None
        assert snapshots.backup.carry(IDENTITY, base) is None


def test_a_failed_commit_is_no_base(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """Invariant 4, FAULTS 6: the next commit does not rely on blobs that a failed commit uploaded."""
    base = snapshots.commit(TREE)
    changed = {**TREE, "000003.sst": big(3), "000004.sst": big(4)}
    blobs.faults["put"] = [None, UnavailableError("503")]
    with pytest.raises(UnavailableError):
        snapshots.prepare(changed, base)
    prepared = snapshots.prepare(changed, base)
    assert isinstance(prepared.marker, BlobMarker)
    assert {name.split("/")[4] for name in prepared.added_blobs} == {snapshots.index(prepared.marker).attempt}
    assert snapshots.restore(prepared.marker)[0] == changed


def test_the_index_is_put_after_all_files(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """A33: the index is the last PUT. If a file's PUT fails, no index is written."""
    snapshots.prepare(TREE)
    puts = [name for method, name in blobs.calls if method == "put"]
    assert puts[-1].endswith("/index")
    blobs.faults["put"] = [UnavailableError("503")]
    with pytest.raises(UnavailableError):
        snapshots.prepare(TREE, attempt="failing")
    assert "orders/1/Partition_0/totals/failing/index" not in snapshots.names()


def test_unchanged_stores_keep_their_index(snapshots: Snapshots) -> None:
    """A commit carries the marker of an unchanged store. Its added blobs can still be listed after a restart."""
    prepared = snapshots.prepare(TREE)
    assert isinstance(prepared.marker, BlobMarker)
    assert snapshots.backup.carry(IDENTITY, prepared.marker) == prepared.marker
    assert not snapshots.backup.has_tail(IDENTITY, prepared.marker)
    snapshots.reopen()
    assert set(snapshots.backup.added_blobs(IDENTITY, prepared.marker)) == set(prepared.added_blobs)


def test_added_blobs_of_a_later_commit_are_its_own(snapshots: Snapshots) -> None:
    """A9: when a task opens, REMOVE_TTL covers only the index and the files that the last commit added."""
    base = snapshots.commit(TREE)
    prepared = snapshots.prepare({**TREE, "000003.sst": big(3)}, base)
    snapshots.reopen()
    assert prepared.marker is not None
    assert set(snapshots.backup.added_blobs(IDENTITY, prepared.marker)) == set(prepared.added_blobs)
    assert len(prepared.added_blobs) == 2


def test_phases_of_a_commit(snapshots: Snapshots) -> None:
    """The backend announces each step before it takes it, with task and store."""
    seen: list[tuple[Phase, str]] = []
    with observed(lambda phase, subject: seen.append((phase, subject))):
        first = snapshots.commit(TREE)
        second = snapshots.commit({}, first)
        snapshots.clean_up([first], [second])
        snapshots.restore(second)
    steps = [Phase.DIFF, Phase.UPLOAD, Phase.PUT_INDEX]
    expected = [*steps, *steps, Phase.DELETE_BLOBS, Phase.DELETE_INDEX, Phase.GET_INDEX, Phase.FETCH, Phase.VERIFY]
    assert seen == [(phase, "Partition 0/totals") for phase in expected]


# --- clean-up ---------------------------------------------------------------------------------------------


def chain(snapshots: Snapshots, length: int) -> list[BlobMarker]:
    """Make commits that each replace one file and keep another."""
    markers: list[BlobMarker] = []
    for number in range(length):
        tree = {"keep.sst": big(0), f"{number}.sst": big(number + 1), "sub/x.sst": big(100 + number // 2)}
        markers.append(snapshots.commit(tree, markers[-1] if markers else None))
    return markers


def test_clean_up_leaves_what_is_retained(snapshots: Snapshots) -> None:
    """Invariant 3, A10, A11: after each clean-up, exactly the blobs that retained checkpoints reference are left."""
    markers = chain(snapshots, 6)
    for number in range(1, 6):
        snapshots.clean_up([markers[number - 1]], [markers[number]])
        later = snapshots.referenced(*markers[number:])
        assert snapshots.names() == later
        for marker in markers[number:]:
            snapshots.restore(marker)


def test_clean_up_with_several_retained(snapshots: Snapshots) -> None:
    """A10: an index that a retained checkpoint needs stays, even if older and newer ones are evicted."""
    markers = chain(snapshots, 4)
    snapshots.clean_up([markers[0], markers[2]], [markers[3], markers[2], markers[1]])
    assert snapshots.names() == snapshots.referenced(*markers[1:])


def test_a_clean_up_reads_the_index_of_a_retained_checkpoint_once(
    snapshots: Snapshots, blobs: FaultyBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if more checkpoints are retained than the process can remember indexes of."""
    monkeypatch.setattr(catalogue, "_INDEXES", 1)
    monkeypatch.setattr(catalogue, "_INDEX_BYTES", 0)
    markers = chain(snapshots, 12)
    snapshots.clean_up([markers[0]], markers[:0:-1])
    blobs.calls.clear()
    snapshots.clean_up([markers[1]], markers[:1:-1])
    assert blobs.count("get") == 1, "that of the evicted one"
    assert snapshots.names() == snapshots.referenced(*markers[2:])


def test_clean_up_is_idempotent(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """Invariant 12, A14: a second clean-up, by the same owner or another one, has the same result."""
    markers = chain(snapshots, 3)
    for _ in range(2):
        snapshots.clean_up(markers[:2], markers[2:])
        assert snapshots.names() == snapshots.referenced(markers[2])
    snapshots.reopen()
    snapshots.clean_up(markers[:2], markers[2:])
    assert snapshots.names() == snapshots.referenced(markers[2])


@pytest.mark.parametrize("survivors", range(12))
def test_a_clean_up_that_a_crash_left_half_done_is_finished(
    snapshots: Snapshots, blobs: FaultyBlobStore, survivors: int
) -> None:
    """A13, FAULTS 5: wherever the owner died, the next open finishes the clean-up from the retained checkpoints."""
    markers = chain(snapshots, 4)

    class Killed(Exception):
        """The process ends here."""

    blobs.faults["delete"] = [None] * survivors + [Killed()] * 100
    with suppress(Killed):
        snapshots.clean_up(markers[:3], markers[3:])
    blobs.faults.clear()
    snapshots.reopen()
    assert snapshots.restore(markers[3])[0]
    snapshots.clean_up([], markers[3:])
    assert snapshots.names() == snapshots.referenced(markers[3])


def test_an_older_owner_deletes_nothing_that_lives(snapshots: Snapshots) -> None:
    """Invariant 7, FAULTS 23: a late clean-up by an older owner keeps what the newer owner's commits reference."""
    markers = chain(snapshots, 4)
    snapshots.clean_up([markers[0]], [markers[1]])
    for marker in markers[1:]:
        snapshots.restore(marker)
    assert snapshots.names() == snapshots.referenced(*markers[1:])


def test_a_removed_store_is_deleted_whole(snapshots: Snapshots) -> None:
    """A3, A12: if no checkpoint is retained, a clean-up deletes everything that the evicted ones reference."""
    markers = chain(snapshots, 3)
    snapshots.clean_up(markers, [])
    assert snapshots.names() == set()


def test_nothing_is_deleted_when_a_retained_index_cannot_be_read(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """Invariant 3: a clean-up deletes nothing until it knows what the retained checkpoints reference."""
    markers = chain(snapshots, 3)
    snapshots.reopen()
    blobs.altered[index_of(markers[1]).blob_id] = lambda data: data[:-1]
    before = snapshots.names()
    snapshots.clean_up([markers[0]], [markers[2], markers[1]])
    assert snapshots.names() == before
    # if the newest index is corrupt, the clean-up raises, so that the owner makes a new snapshot
    with pytest.raises(CorruptBlob):
        snapshots.clean_up([markers[0]], [markers[1]])
    assert snapshots.names() == before


def test_an_unreachable_store_fails_the_clean_up(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """A36: the clean-up raises the error, and the next one finishes the work."""
    markers = chain(snapshots, 3)
    blobs.faults["delete"] = [UnavailableError("503")]
    with pytest.raises(UnavailableError):
        snapshots.clean_up(markers[:2], markers[2:])
    assert snapshots.referenced(markers[2]) <= snapshots.names()
    snapshots.clean_up([], markers[2:])
    assert snapshots.names() == snapshots.referenced(markers[2])


def test_clean_up_stays_below_its_own_prefix(snapshots: Snapshots, blobs: FaultyBlobStore) -> None:
    """Invariant 3: a clean-up never deletes another task's blobs, even if its own index references them."""
    marker = snapshots.commit({"own.sst": big(1)})
    foreign = snapshots.transfer.put("orders/1/Partition_7/totals/x/f.0", big(2))
    index = snapshots.index(marker)
    shared = FileIndex("shared.sst", foreign.size, foreign.hash, parts=(foreign,))
    root = DirIndex("", (*index.root.files, shared))
    name = "orders/1/Partition_0/totals/shared/index"
    ref = snapshots.transfer.put(name, encode_index(replace(index, root=root, attempt="shared")))
    snapshots.clean_up([marker_of(ref)], [])
    assert snapshots.names() >= {foreign.blob_id}
    assert name not in snapshots.names()


# --- restore ----------------------------------------------------------------------------------------------


def test_restore_with_local_files(snapshots: Snapshots, tmp_path: Path) -> None:
    """A22, invariant 10: a restore reuses local files by content alone, even if they have other names."""
    marker = snapshots.commit(TREE)
    fetched_all = sum(len(data) for name, data in TREE.items() if name.endswith(".sst"))
    cases = {
        "identical": (TREE, fetched_all),
        "renamed": ({"x/000077.sst": TREE["000001.sst"], "other": TREE["000002.sst"]}, fetched_all),
        "but one": ({**TREE, "000001.sst": big(9)}, len(TREE["000002.sst"])),
        "different": ({"000001.sst": big(8), "000002.sst": big(9, 250_000)}, 0),
        "absent": ({}, 0),
    }
    for name, (tree, reused) in cases.items():
        local = committed(tmp_path / f"cache {name}", tree)
        found, restored = snapshots.restore(marker, [local])
        assert found == TREE, name
        assert restored.bytes_reused == reused, name
        assert restored.bytes_fetched == fetched_all - reused + index_of(marker).size, name
        assert restored.files == committed(tmp_path / f"again {name}", TREE).files


def test_files_of_several_local_directories(snapshots: Snapshots, tmp_path: Path) -> None:
    """A22: each file may come from a different directory."""
    marker = snapshots.commit(TREE)
    caches = [committed(tmp_path / f"c{n}", {name: TREE[name]}) for n, name in enumerate(TREE)]
    found, restored = snapshots.restore(marker, caches)
    assert (found, restored.bytes_fetched) == (TREE, index_of(marker).size)


@pytest.mark.parametrize("how", ["gone", "truncated", "link", "directory gone"])
def test_a_cache_that_vanishes_or_lies_is_fetched_instead(snapshots: Snapshots, tmp_path: Path, how: str) -> None:
    """Invariant 10: a local directory may change or vanish at any time, and the restore is still correct."""
    marker = snapshots.commit(TREE)
    local = committed(tmp_path / "cache", TREE)
    victim = local.path / "000001.sst"
    if how == "directory gone":
        local.path.rename(tmp_path / "elsewhere")
    else:
        victim.unlink()
    if how == "truncated":
        victim.write_bytes(b"short")
    if how == "link":
        (tmp_path / "target").write_bytes(TREE["000001.sst"])
        victim.symlink_to(tmp_path / "target")
    found, restored = snapshots.restore(marker, [local])
    assert found == TREE
    assert restored.bytes_fetched >= len(TREE["000001.sst"])


def test_an_existing_staging_directory_is_refused(snapshots: Snapshots, tmp_path: Path) -> None:
    """A25, FAULTS 28: a restore never merges into existing files and never follows a planted link."""
    marker = snapshots.commit(TREE)
    (tmp_path / "outside").mkdir()
    for number, plant in enumerate((Path.mkdir, lambda p: p.symlink_to(tmp_path / "outside"), Path.touch)):
        staging = tmp_path / f"planted-{number}"
        plant(staging)
        with pytest.raises(InvalidError):
            snapshots.restoring.restore(request(snapshots, marker, staging))
    assert list((tmp_path / "outside").iterdir()) == []


def request(snapshots: Snapshots, marker: BlobMarker, staging: Path) -> RestoreRequest:
    """Return a request to restore into a given directory."""
    return RestoreRequest(snapshots.identity, marker, staging, (), no_progress)


@pytest.mark.parametrize("which", ["file", "index"])
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [(None, MissingBlob), (lambda d: d[:-1], CorruptBlob), (lambda d: d[:-1] + b"?", CorruptBlob)]
    + [(lambda d: d + b"x", CorruptBlob), (lambda d: b"", CorruptBlob)],
)
def test_a_spoilt_blob_is_named(
    snapshots: Snapshots, blobs: FaultyBlobStore, which: str, spoil: Callable[[bytes], bytes] | None,
    expected: type[StatemgrError],
) -> None:  # fmt: skip
    """A28, FAULTS 11 to 13: a missing, short, long or altered blob raises a typed error that names the blob."""
    marker = snapshots.commit({**TREE, "a/b/c/deep.sst": big(5, 350_000)})
    [deep] = [name for name in snapshots.names() if "deep" in name and name.endswith(".2")]
    name = deep if which == "file" else index_of(marker).blob_id
    snapshots.reopen()
    if spoil is None:
        blobs.delete(name)
    else:
        blobs.altered[name] = spoil
    with pytest.raises(expected) as caught:
        snapshots.restore(marker)
    assert caught.value.where["blob"] == name


def hostile_index(snapshots: Snapshots, change: Callable[[SnapshotIndex], SnapshotIndex]) -> BlobMarker:
    """Store an altered index blob and return a marker with its correct hash."""
    marker = snapshots.commit(TREE)
    data = encode_index(change(snapshots.index(marker)))
    return marker_of(snapshots.transfer.put(f"{index_of(marker).blob_id}-altered", data))


def with_file(index: SnapshotIndex, file: FileIndex) -> SnapshotIndex:
    """Return the index with one more file."""
    return replace(index, root=replace(index.root, files=(*index.root.files, file)))


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ".", "", "x\0y", "CURRENT", "x" * 256])
def test_a_hostile_index_is_refused_before_any_io(snapshots: Snapshots, tmp_path: Path, name: str) -> None:
    """Invariant 15, FAULTS 27: a restore refuses hostile names in an index and creates no local files."""
    file = FileIndex(name, 1, b"\0" * 16, inline=b"x")
    marker = hostile_index(snapshots, lambda index: with_file(index, file))
    snapshots.reopen()
    with pytest.raises(CorruptBlob, match="refused"):
        snapshots.restoring.restore(request(snapshots, marker, tmp_path / "staging"))
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize(
    "change",
    [{"job_name": "other"}, {"job_id": "2"}, {"task": "Partition 1"}, {"store": "others"}],
)
def test_a_foreign_index_is_refused(snapshots: Snapshots, change: dict[str, str]) -> None:
    """FAULTS 29: a restore refuses the index of another job, task or store, even if it has read the index before."""
    marker = hostile_index(snapshots, lambda index: replace(index, **change))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(CorruptBlob, match="belongs to"):
            snapshots.restore(marker)


def test_an_index_asked_for_by_another_store_is_refused(snapshots: Snapshots) -> None:
    """FAULTS 29: an index that one store has read and cached cannot be used for another store."""
    marker = snapshots.commit(TREE)
    snapshots.identity = StoreIdentity("orders", "1", "Partition 0", "other")
    with pytest.raises(CorruptBlob, match="belongs to"):
        snapshots.restore(marker)


@pytest.mark.parametrize("name", ["../secret", "elsewhere/1/x/index", "orders/1/../../x"])
def test_a_marker_that_leads_elsewhere_is_refused(snapshots: Snapshots, name: str) -> None:
    """Invariant 15: a marker may name only blobs of its own job."""
    marker = snapshots.commit(TREE)
    with pytest.raises(CorruptBlob, match="not one of this job"):
        snapshots.restore(marker_of(replace(index_of(marker), blob_id=name)))


def test_inline_content_is_verified(snapshots: Snapshots) -> None:
    """A28: content inside the index has a hash too."""
    file = FileIndex("zzz", 4, b"\0" * 16, inline=b"data")
    marker = hostile_index(snapshots, lambda index: with_file(index, file))
    with pytest.raises(CorruptBlob, match="zzz"):
        snapshots.restore(marker)


@pytest.mark.parametrize("marker", [ChangelogMarker("t", None, 0, 5), OpaqueMarker(b"")])
def test_a_marker_of_another_kind_names_no_snapshot(
    snapshots: Snapshots, marker: ChangelogMarker | OpaqueMarker
) -> None:
    """A15: a checkpoint with only changelog offsets cannot be restored from blobs, and the error says so."""
    with pytest.raises(MissingState, match="names neither a snapshot"):
        snapshots.restore(marker)


def test_a_full_disk_is_found_before_fetching(
    snapshots: Snapshots, blobs: FaultyBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 24: a restore that does not fit is refused before it fetches anything."""
    marker = snapshots.commit(TREE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(DiskFull):
        snapshots.restore(marker)
    assert blobs.count("get") == 0


def test_a_restored_directory_is_the_base_of_the_next_commit(snapshots: Snapshots) -> None:
    """A7: after a restore on a new host, the first commit uploads only what is new."""
    base = snapshots.commit(TREE)
    snapshots.reopen()
    tree, _ = snapshots.restore(base)
    prepared = snapshots.prepare({**tree, "000003.sst": big(3)}, base)
    assert len(prepared.added_blobs) == 2


def test_the_file_store_keeps_it_all_the_same(tmp_path: Path) -> None:
    """A40: commits, clean-up and restore work the same on a directory of blobs, and leave no temporary files."""
    blobs = FileBlobStore(tmp_path / "blobs", ManualClock())
    snapshots = Snapshots(tmp_path / "work", blobs, ManualClock(), part_size=10_000)
    markers = chain(snapshots, 3)
    snapshots.clean_up(markers[:2], markers[2:])
    assert set(snapshots.restore(markers[2])[0]) == {"keep.sst", "2.sst", "sub/x.sst"}
    assert snapshots.names() == snapshots.referenced(markers[2])
    left = [name for _, _, names in os.walk(tmp_path / "blobs") for name in names if name.startswith(".")]
    assert left == []
    snapshots.transfer.close()
