"""Forged indexes and planted links: each is refused before anything local is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs import open_blob_store
from statemgr.errors import CorruptBlob, InvalidError
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr.model.checkpoint import BlobRef, CheckpointRecord
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex
from statemgr.ports import StoreIdentity
from statemgr.reader import JobReader
from tests.blob_snapshots import marker_of
from tests.commits import TASK, commit, current, publish_by_hand
from tests.jobs import elsewhere, job_mapping
from tests.servers import KafkaServer


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A dual-commit job on a directory of blobs."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


def _file(name: str, size: int = 1) -> FileIndex:
    return FileIndex(name, size, content_hash(b"x"), inline=b"x")


def _with_file(index: SnapshotIndex, *files: FileIndex) -> SnapshotIndex:
    root = index.root
    return replace(index, root=replace(root, files=(*root.files, *files)))


def _with_dir(index: SnapshotIndex, directory: DirIndex) -> SnapshotIndex:
    return replace(index, root=replace(index.root, dirs=(directory,)))


def _deep(levels: int) -> DirIndex:
    found = DirIndex("leaf", (_file("f"),))
    for _ in range(levels):
        found = DirIndex("d", (), (found,))
    return found


def _huge(index: SnapshotIndex) -> SnapshotIndex:
    size = 1 << 50
    blob = BlobRef(f"{index.job_name}/{index.job_id}/Partition_0/totals/x/huge", size, content_hash(b"x"))
    return _with_file(index, FileIndex("huge", size, content_hash(b"x"), parts=(blob,)))


def _elsewhere(index: SnapshotIndex, blob_id: str) -> SnapshotIndex:
    return _with_file(index, FileIndex("f", 5, content_hash(b"x"), parts=(BlobRef(blob_id, 5, content_hash(b"x")),)))


#: The forgeries: each spoils an index that is then published under a real checkpoint.
HOSTILE: dict[str, Callable[[SnapshotIndex], SnapshotIndex]] = {
    "parent": lambda index: _with_file(index, _file("../planted")),
    "absolute": lambda index: _with_file(index, _file("/tmp/planted")),
    "nul": lambda index: _with_file(index, _file("a\0b")),
    "duplicate": lambda index: _with_file(index, _file("twice"), _file("twice")),
    "directory-parent": lambda index: replace(
        index, root=replace(index.root, dirs=(DirIndex("..", (_file("planted"),)),))
    ),
    "absurd-size": _huge,
    "depth": lambda index: _with_dir(index, _deep(40)),
    "another-jobs-blob": lambda index: _elsewhere(index, "another/1/Partition_0/totals/a/f.0"),
    "state-id": lambda index: replace(index, state_id="../../planted"),
    "other-job": lambda index: replace(index, job_name="another"),
    "other-job-id": lambda index: replace(index, job_id="7"),
    "other-task": lambda index: replace(index, task="Partition 1"),
    "other-store": lambda index: replace(index, store="another"),
}


class Forger:
    """Publishes a forged index under the job's real checkpoint."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        record = current(config)
        assert record is not None
        self.record: CheckpointRecord = record
        with JobReader(config) as reader:
            self.index = reader.index(TASK, "totals")
        self._number = 0

    def publish(self, data: bytes, blob_id: str | None = None) -> str:
        """Put the bytes as an index blob and publish a checkpoint that names it. Returns the blob's name."""
        self._number += 1
        config = self.config
        name = blob_id or f"{config.job_name}/{config.job_id}/Partition_0/totals/forged-{self._number}/index"
        blobs = open_blob_store(config, SystemClock())
        blobs.put(name, data, ttl_days=None)
        blobs.close()
        identity = StoreIdentity(config.job_name, config.job_id, TASK, "totals")
        marker = marker_of(BlobRef(name, len(data), content_hash(data)), identity)
        forged = replace(
            self.record.current,
            sequence=self.record.current.sequence + self._number,
            state_checkpoint_markers={"blob-store": {"totals": marker}},
        )
        publish_by_hand(config, replace(self.record, checkpoints=(forged,)))
        return name


def test_a_hostile_index_is_refused_before_any_io(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULTS 27 and 29, invariant 15: an index with names that lead elsewhere, absurd sizes or another owner is
    refused, and no local file is made."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    commit(config, {b"a": b"1"}, 1)
    forger = Forger(config)
    target = tmp_path / "target"
    before = sorted(path for path in tmp_path.rglob("*") if "blobs" not in path.parts)
    for name, spoil in HOSTILE.items():
        blob = forger.publish(codecs.encode_index(spoil(forger.index)))
        with JobReader(config) as reader, pytest.raises(CorruptBlob) as caught:
            reader.restore(TASK, target / name)
        assert caught.value.where["blob"] == blob, name
        assert not [p for p in (target / name).rglob("*") if p.is_file()], name
    # a task that opens also refuses it, and the state directory stays without state
    with (
        StateManager(elsewhere(config, tmp_path / "machine", "blob-store")) as manager,
        pytest.raises(CorruptBlob),
    ):
        manager.open_task(TASK)
    shutil.rmtree(target)
    made = {path for path in tmp_path.rglob("*") if "blobs" not in path.parts} - set(before)
    assert not [path for path in made if path.suffix == ".sst" or path.name == "CURRENT"]
    assert not list(tmp_path.rglob("planted*"))


def test_an_index_that_is_no_index_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULTS 12 and 27: random bytes, a truncated index, an index with extra bytes and one under another job's prefix
    cause CorruptBlob."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    commit(config, {b"a": b"1"}, 1)
    forger = Forger(config)
    good = codecs.encode_index(forger.index)
    for data, blob_id in (
        (b"\x00" * 100, None),
        (good[:-1], None),
        (good + b"\x00", None),
        (good, "another/1/Partition_0/totals/x/index"),
    ):
        blob = forger.publish(data, blob_id)
        with JobReader(config) as reader, pytest.raises(CorruptBlob) as caught:
            reader.restore(TASK, tmp_path / "target")
        assert caught.value.where["blob"] == blob


def test_a_planted_link_is_never_followed(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 28: the open refuses a link in place of a store's directories, and the link's target stays as it was."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    commit(config, {b"a": b"1"}, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("as it was")
    before = outside.stat()
    for inside in ("", "committed", "live", "staging", "owners"):
        machine = tmp_path / f"machine-{inside}"
        place = machine / config.job_name / config.job_id / "Partition_0" / "totals" / inside
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(outside, target_is_directory=True)
        with (
            StateManager(elsewhere(config, machine, "blob-store")) as manager,
            pytest.raises(InvalidError, match=machine.name),
        ):
            manager.open_task(TASK)
        after = outside.stat()
        assert [path.name for path in outside.iterdir()] == ["precious"]
        assert (outside / "precious").read_text() == "as it was"
        assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
        assert place.is_symlink()
