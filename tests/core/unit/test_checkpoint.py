"""checkpoint: the record, which checkpoints it retains, and how it merges with records of older software."""

from __future__ import annotations

from dataclasses import replace

from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, CheckpointRecord, Layout, Retention, with_version_one
from statemgr.terminal.render import index_to_json_dict, to_json_dict
from tests import model_samples as sample


def version_one(millis: int, offset: int) -> CheckpointRecord:
    """Return a record as older software wrote it: only changelog offsets, without a layout."""
    checkpoint = Checkpoint(
        checkpoint_id=CheckpointId(millis, 0),
        sequence=0,
        epoch=0,
        input_offsets={"orders-0": 2000},
        stores={"totals": "v1"},
        state_checkpoint_markers={"kafka-changelog": {"totals": ChangelogMarker("t", None, 0, 150)}},
        record_version=1,
    )
    return CheckpointRecord("orders", "1", sample.TASK, Layout(0, 0, ""), (checkpoint,), offset)


def test_marker_is_found_by_factory_and_store() -> None:
    """A marker is found by factory and store. It is None for a store or backend without one."""
    assert sample.CHECKPOINT.marker("kafka-changelog", "totals") is not None
    assert sample.CHECKPOINT.marker("kafka-changelog", "seen") is None
    assert sample.CHECKPOINT.marker("another", "totals") is None


def test_without_any_record_there_is_none() -> None:
    """On its first start a job has no record of any version."""
    assert with_version_one(None, None) is None


def test_only_one_version_is_taken_as_it_is() -> None:
    """If the topic has only one version of the record, that one is used unchanged."""
    newest = replace(sample.RECORD, offset=5)
    assert with_version_one(newest, None) == newest
    alone = with_version_one(None, version_one(1, 6))
    assert alone == version_one(1, 6)
    assert alone is not None
    assert alone.from_version_one


def test_version_one_of_the_same_commit_changes_nothing() -> None:
    """One transaction writes both versions with one ID. The newer version counts, whichever comes first."""
    newest = replace(sample.RECORD, offset=5)
    same = version_one(0, 6)
    same = replace(same, checkpoints=(replace(same.current, checkpoint_id=newest.current.checkpoint_id),))
    assert with_version_one(newest, same) == newest
    assert with_version_one(newest, replace(same, offset=4)) == newest


def test_older_version_one_changes_nothing() -> None:
    """A version 1 record at a lower offset than the newest one is history."""
    newest = replace(sample.RECORD, offset=5)
    assert with_version_one(newest, version_one(1, 4)) == newest


def test_newer_version_one_is_current_with_changelog_markers_alone() -> None:
    """If older software ran in between, its offsets count. Blob markers are dropped; layout and epoch stay."""
    newest = replace(sample.RECORD, offset=5)
    merged = with_version_one(newest, version_one(1_800_000_000_000, 6))
    assert merged is not None
    assert merged.offset == 6
    assert merged.from_version_one
    assert merged.layout == newest.layout
    assert merged.current.input_offsets == {"orders-0": 2000}
    assert merged.current.marker("blob-store", "totals") is None
    assert merged.current.sequence == newest.current.sequence + 1
    assert merged.current.epoch == newest.current.epoch
    assert merged.checkpoints[1].checkpoint_id == newest.current.checkpoint_id


def test_kept_checkpoints_outlive_the_retention() -> None:
    """The newest checkpoint lists those to keep. They stay in order, beyond the number that is retained."""
    record = replace(sample.RECORD, checkpoints=(replace(sample.CHECKPOINT, kept=()),))
    kept = (str(sample.CHECKPOINT.checkpoint_id),)
    for number in range(1, 5):
        made = replace(sample.CHECKPOINT, checkpoint_id=CheckpointId(number, 0), sequence=7 + number, kept=kept)
        record = record.followed_by(made, Retention(newest=2))
    assert [c.sequence for c in record.checkpoints] == [11, 10, 7]
    record = record.followed_by(replace(sample.CHECKPOINT, sequence=12, kept=()), Retention(newest=2))
    assert [c.sequence for c in record.checkpoints] == [12, 11]


def test_json_has_the_fields_of_the_record() -> None:
    """Each checkpoint is one object, with typed markers, hexadecimal hashes and the sizes of attachments."""
    older = replace(sample.RECORD, checkpoints=(replace(sample.CHECKPOINT, offset=9),), offset=9)
    record = older.followed_by(
        replace(sample.CHECKPOINT, checkpoint_id=CheckpointId(1_700_000_000_001, 0), sequence=8, offset=10)
    )
    shown = [to_json_dict(record, checkpoint) for checkpoint in record.checkpoints]
    assert [one["current"] for one in shown] == [True, False]
    assert [one["checkpoint_id"] for one in shown] == ["1700000000001-000000", "1700000000000-000042"]
    assert [one["offset"] for one in shown] == [10, 9]
    first = shown[0]
    assert first == to_json_dict(record)
    assert first["task"] == "Partition 0"
    assert first["layout"] == {"generation": 0, "tasks": 3, "partitioner": "kafka-murmur2"}
    assert first["input_offsets"] == {"orders-0": 1234, "orders-1": 0}
    blob = {"blob_id": sample.CHAIN_BLOB.blob_id, "size": 300, "hash": sample.HASH.hex(), "offset": 200}
    markers = first["state_checkpoint_markers"]
    assert markers["blob-store"]["totals"] == {"type": "blobs", "size": 300, "blob": blob}
    index = {"blob_id": sample.INDEX_BLOB.blob_id, "size": 500, "hash": sample.HASH.hex()}
    inline = {"type": "blobs", "size": len(sample.INLINE_CHAIN), "blob": None, "index": index, "segments": 3}
    assert markers["blob-store"]["seen"] == inline
    assert markers["kafka-changelog"]["totals"]["type"] == "changelog"
    assert markers["kafka-changelog"]["totals"]["offset"] == 99
    assert markers["custom"]["totals"] == {"type": "opaque", "size": 4}
    assert [(a["name"], a["size"], a["blob"] is None) for a in first["attachments"]] == [
        ("rows", 3, True),
        ("more", 3, False),
    ]
    assert first["batch"]["batch_id"] == 3
    assert [a["name"] for a in shown[1]["attachments"]] == ["rows", "more"]


def test_json_of_an_index_has_every_file_by_path() -> None:
    """The JSON of an index lists every file by path, whether it is inline or in parts, and all directories."""
    shown = index_to_json_dict(sample.INDEX)
    assert [(file["path"], file["inline"], len(file["parts"])) for file in shown["files"]] == [
        ("000012.sst", False, 1),
        ("CURRENT", True, 0),
        ("journal/empty", True, 0),
    ]
    assert shown["dirs"] == ["journal", "journal/old", "z"]
    assert shown["size"] == 5
    assert shown["previous"]["blob_id"] == sample.INDEX_BLOB.blob_id
