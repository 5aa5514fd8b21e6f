"""codec: the rules beyond round trips: what a decoder refuses and what its error says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemgr.errors import CorruptBlob, CorruptError, CorruptRecord, InvalidError
from statemgr.ids import CheckpointId
from statemgr.model import codec, codec_index
from statemgr.model.checkpoint import Attachment, BlobRef, ChangelogMarker, IndexMarker, OpaqueMarker
from statemgr.model.codec_checkpoint import encode as encode_checkpoint_schema
from statemgr.model.codec_index import encode as encode_index_schema
from statemgr.model.commit import PreparedChanges, PreparedStore
from statemgr.model.hashing import content_hash, hasher
from statemgr.model.schemas import shipped_schemas
from tests import model_samples as sample
from tests.change_lists import ChangeList

KEY = sample.RECORD.key()
PLACE = {"topic": "__checkpoints", "partition": 0, "offset": 41}


def test_single_object_encoding() -> None:
    """Every record starts with 0xC301 and the fingerprint of its schema."""
    for name, data in {
        "checkpoint_key.v1": codec.encode_key(KEY),
        "checkpoint.v2": codec.encode_record(sample.RECORD),
        "checkpoint.v1": codec.encode_record_v1(sample.RECORD),
        "checkpoint_state.v1": codec.encode_checkpoint(sample.CHECKPOINT),
        "snapshot_index.v1": codec.encode_index(sample.INDEX),
        "prepared_commit.v1": codec.encode_prepared(sample.PREPARED),
        "segment_chain.v1": codec.encode_chain(sample.CHAIN),
    }.items():
        known = shipped_schemas()
        assert data[:10] == b"\xc3\x01" + known.fingerprint(name)


def test_key_bytes_are_frozen() -> None:
    """Compaction goes by a key's bytes: a change of them would leave the old record beside the new one."""
    expected = "c301c5e165864b0e8c1e" + "0c6f7264657273" + "0231" + "00" + "16506172746974696f6e2030" + "04"
    assert codec.encode_key(KEY).hex() == expected


def test_keys_differ_in_every_part() -> None:
    """Another job, job ID, layout generation, task or version is another key."""
    others = [
        replace(KEY, job_name="x"),
        replace(KEY, job_id="2"),
        replace(KEY, layout_generation=1),
        replace(KEY, task="Partition 1"),
        replace(KEY, record_version=1),
    ]
    assert len({codec.encode_key(key) for key in [KEY, *others]}) == 6


@pytest.mark.parametrize("value", [b"", b"garbage", b"\xc3\x01", b"\xc3\x01" + b"x" * 8, b'{"json": 1}'])
def test_poison_names_topic_partition_and_offset(value: bytes) -> None:
    """A record that statemgr did not write is an error that says where it is."""
    with pytest.raises(CorruptRecord) as caught:
        codec.decode_record(KEY, value, 41, topic="__checkpoints", partition=0)
    assert caught.value.where == PLACE
    with pytest.raises(CorruptRecord) as caught:
        codec.decode_key(value, topic="__checkpoints", partition=0, offset=41)
    assert caught.value.where == PLACE


def test_unknown_record_version_is_refused() -> None:
    """A version that newer software writes is not guessed at."""
    with pytest.raises(CorruptRecord, match="version 3"):
        codec.decode_record(replace(KEY, record_version=3), codec.encode_record(sample.RECORD), 1)


def test_version_of_key_and_value_must_agree() -> None:
    """A version 1 value under a version 2 key, or the other way round, is refused."""
    with pytest.raises(CorruptRecord):
        codec.decode_record(KEY, codec.encode_record_v1(sample.RECORD))
    with pytest.raises(CorruptRecord):
        codec.decode_record(sample.RECORD.key(1), codec.encode_record(sample.RECORD))


@pytest.mark.parametrize(
    "key",
    [replace(KEY, job_name="x"), replace(KEY, job_id="2"), replace(KEY, task="Partition 1")],
)
@pytest.mark.parametrize("version", [1, 2])
def test_value_of_another_key_is_refused(key: codec.CheckpointKey, version: int) -> None:
    """A value that says another job or task than its key does is refused, in either version."""
    write = codec.encode_record_v1 if version == 1 else codec.encode_record
    with pytest.raises(CorruptRecord, match="its key is of"):
        codec.decode_record(replace(key, record_version=version), write(sample.RECORD))


def test_value_of_another_layout_is_refused() -> None:
    """The layout generation in key and value must be the same."""
    with pytest.raises(CorruptRecord, match="layout"):
        codec.decode_record(replace(KEY, layout_generation=1), codec.encode_record(sample.RECORD))


def test_record_needs_a_checkpoint() -> None:
    """A record without any checkpoint is neither written nor read."""
    empty = replace(sample.RECORD, checkpoints=())
    with pytest.raises(InvalidError):
        codec.encode_record(empty)
    fields = {"job_name": "orders", "job_id": "1", "task": sample.TASK, "checkpoints": []}
    layout = {"generation": 0, "tasks": 3, "partitioner": "p"}
    with pytest.raises(CorruptRecord, match="no checkpoint"):
        codec.decode_record(KEY, encode_checkpoint_schema("checkpoint.v2", {**fields, "layout": layout}))


@pytest.mark.parametrize(
    "marker",
    [
        ChangelogMarker("t", None, 0, -1),
        ChangelogMarker("t", None, -1, 0),
        IndexMarker(BlobRef("b", -1, sample.HASH)),
    ],
)
def test_impossible_markers_are_refused(marker: ChangelogMarker | IndexMarker) -> None:
    """A negative offset, partition or size cannot be what was written."""
    checkpoint = replace(sample.CHECKPOINT, state_checkpoint_markers={"f": {"s": marker}})
    with pytest.raises(CorruptRecord):
        codec.decode_checkpoint(codec.encode_checkpoint(checkpoint))


def test_state_id_that_is_a_path_is_refused() -> None:
    """A state ID becomes a local directory's name; one that leads elsewhere is refused when it is read."""
    checkpoint = replace(sample.CHECKPOINT, stores={"totals": "../../x"})
    with pytest.raises(CorruptRecord, match="state ID"):
        codec.decode_record(KEY, codec.encode_record(replace(sample.RECORD, checkpoints=(checkpoint,))))
    stores = {"totals": PreparedStore("a/b")}
    with pytest.raises(CorruptRecord, match="state ID"):
        codec.decode_prepared(codec.encode_prepared(replace(sample.PREPARED, stores=stores)))


@pytest.mark.parametrize("attachment", [Attachment("n"), Attachment("n", b"x", sample.BLOB)])
def test_attachment_is_inline_or_in_a_blob(attachment: Attachment) -> None:
    """An attachment with both or neither is refused."""
    with pytest.raises(CorruptRecord, match="exactly one"):
        codec.decode_checkpoint(codec.encode_checkpoint(replace(sample.CHECKPOINT, attachments=(attachment,))))


def test_wrong_hash_size_is_invalid() -> None:
    """A hash of another length than 16 bytes cannot be written."""
    with pytest.raises(InvalidError):
        codec.encode_index(replace(sample.INDEX, previous=BlobRef("b", 1, b"short")))


def test_version_one_written_by_older_software_is_read() -> None:
    """Changelog offsets, input offsets and the ID come through; what version 1 lacks is marked as unknown."""
    data = encode_checkpoint_schema(
        "checkpoint.v1",
        {
            "job_name": "orders",
            "job_id": "1",
            "task": sample.TASK,
            "checkpoint_id": "1700000000000-000042",
            "input_offsets": {"orders-0": 12},
            "stores": {"totals": {"topic": "changelog", "partition": 0, "offset": 99}},
        },
    )
    record = codec.decode_record(sample.RECORD.key(1), data, 7)
    assert record.offset == 7
    assert record.layout.tasks == 0
    current = record.current
    assert current.checkpoint_id == CheckpointId(1_700_000_000_000, 42)
    assert current.input_offsets == {"orders-0": 12}
    assert current.record_version == 1
    assert current.state_checkpoint_markers == {
        codec.VERSION_ONE_FACTORY: {"totals": ChangelogMarker("changelog", None, 0, 99)}
    }
    assert set(current.stores) == {"totals"}


@pytest.mark.parametrize(("field", "value"), [("checkpoint_id", "yesterday"), ("offset", -3)])
def test_version_one_with_bad_content_is_refused(field: str, value: object) -> None:
    """A version 1 record with an ID or an offset that cannot be is a typed error."""
    store = {"topic": "changelog", "partition": 0, "offset": 99}
    fields = {"job_name": "orders", "job_id": "1", "task": sample.TASK, "checkpoint_id": "1-000000"}
    (store if field in store else fields)[field] = value  # type: ignore[assignment, index]
    data = encode_checkpoint_schema("checkpoint.v1", {**fields, "input_offsets": {}, "stores": {"s": store}})
    with pytest.raises(CorruptRecord):
        codec.decode_record(sample.RECORD.key(1), data)


@pytest.mark.parametrize(
    "changes",
    [
        PreparedChanges(False, local=ChangeList(((b"k", b"v"),))),
        PreparedChanges(False),
        PreparedChanges(False, inline=b"", blob=sample.BLOB),
    ],
)
def test_local_changes_do_not_leave_their_process(changes: PreparedChanges) -> None:
    """A prepared commit whose changes are not inline or in a blob has no bytes."""
    stores = {"totals": PreparedStore("x", changes={"kafka-changelog": changes})}
    with pytest.raises(InvalidError):
        codec.encode_prepared(replace(sample.PREPARED, stores=stores))


def directory(name: str, parent: int) -> dict[str, object]:
    """An entry of an index's flat tree."""
    return {"name": name, "parent": parent, "files": []}


@pytest.mark.parametrize(
    "dirs",
    [
        [],
        [directory("root", -1)],
        [directory("", 0)],
        [directory("", -1), directory("a", -1)],
        [directory("", -1), directory("a", 1)],
        [directory("", -1), directory("a", 2), directory("b", 1)],
        [directory("", -1), directory("a", -2)],
    ],
)
def test_tree_that_is_none_is_refused(dirs: list[dict[str, object]]) -> None:
    """No root, a named root, two roots, cycles and parents to come are refused, naming the blob."""
    fields = ("job_name", "job_id", "task", "store", "state_id", "attempt")
    value = {**dict.fromkeys(fields, "x"), "created_ms": 0, "previous": None, "dirs": dirs}
    with pytest.raises(CorruptBlob) as caught:
        codec.decode_index(encode_index_schema("snapshot_index.v1", value), "j/1/index")
    assert caught.value.where == {"blob": "j/1/index"}


def test_index_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index beyond the limit is neither written nor read."""
    data = codec.encode_index(sample.INDEX)
    monkeypatch.setattr(codec_index, "MAX_INDEX_SIZE", len(data) - 1)
    with pytest.raises(InvalidError):
        codec.encode_index(sample.INDEX)
    with pytest.raises(CorruptBlob, match="larger"):
        codec.decode_index(data, "b")


def test_decoders_of_each_kind_raise_their_own_error() -> None:
    """Records and blobs are told apart, and both are corrupt."""
    for decode, kind in ((codec.decode_checkpoint, CorruptRecord), (codec.decode_index, CorruptBlob)):
        with pytest.raises(CorruptError) as caught:
            decode(b"")
        assert type(caught.value) is kind


def test_opaque_marker_keeps_its_bytes() -> None:
    """A marker of a backend from outside is carried as it is."""
    marker = OpaqueMarker(bytes(range(256)))
    checkpoint = replace(sample.CHECKPOINT, state_checkpoint_markers={"theirs": {"totals": marker}})
    assert codec.decode_checkpoint(codec.encode_checkpoint(checkpoint)).marker("theirs", "totals") == marker


def test_content_hash_is_xxh3_128() -> None:
    """The hash of nothing is the algorithm's published one, and feeding pieces gives that of the whole."""
    assert content_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    pieces = hasher()
    for piece in (b"a", bytearray(b"b" * 1000), memoryview(b"c")):
        pieces.update(piece)
    assert pieces.digest() == content_hash(b"a" + b"b" * 1000 + b"c")
