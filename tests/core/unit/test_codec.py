"""codec: the rules beyond round trips, that is, what a decoder refuses and what its error says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import xxhash

from statemgr.errors import CorruptBlob, CorruptError, CorruptRecord, InvalidError
from statemgr.ids import CheckpointId
from statemgr.model import codecs
from statemgr.model.checkpoint import (
    Attachment,
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    CheckpointKey,
    OpaqueMarker,
)
from statemgr.model.checkpoint_records import JobCheckpoint, TaskCheckpoint, publish_of, task_alone
from statemgr.model.codecs import records
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.schemas import single_objects
from statemgr.model.codecs.special_types import SHAPES
from statemgr.model.commit import PreparedChanges, PreparedStore
from statemgr.model.hashing import content_hash, hasher
from statemgr.model.snapshot import SnapshotIndex
from tests import model_samples as sample
from tests.change_lists import ChangeList

KEY = sample.RECORD.key(sample.CHECKPOINT)
KEY_V1 = sample.RECORD.key_v1()
PLACE = {"topic": "__checkpoints", "partition": 0, "offset": 41}
AT = codecs.Place("__checkpoints", 0, 41)
((KEY_BYTES, VALUE),) = codecs.encode_record(sample.RECORD)
JOB = JobCheckpoint(sample.LAYOUT, publish_of(sample.CHECKPOINT))
JOB_KEY = replace(KEY, task="")


def decode_task(value: bytes, key: CheckpointKey = KEY) -> TaskCheckpoint:
    """Decode a task record under a key."""
    return codecs.decode_task(codecs.encode_key(key), key, value, AT)


def in_avro(schema: str, data: bytes) -> dict[str, Any]:
    """Return the fields of a record as Avro has them."""

    def refuse(why: str) -> CorruptError:
        return CorruptError(why)

    return Codec(schema, dict, SHAPES).decode(data, refuse)


def test_single_object_encoding() -> None:
    """Every record starts with 0xC301 and the fingerprint of its schema."""
    for name, data in {
        "checkpoint_key.v1": codecs.encode_key(KEY_V1),
        "checkpoint_key.v2": codecs.encode_key(KEY),
        "checkpoint_job.v2": codecs.encode_job(JOB_KEY, JOB)[1],
        "checkpoint_task.v3": VALUE,
        "checkpoint.v1": codecs.encode_record_v1(sample.RECORD),
        "snapshot_index.v1": codecs.encode_index(sample.INDEX),
        "prepared_commit.v2": codecs.encode_prepared(sample.PREPARED),
        "segment_chain.v1": codecs.encode_chain(sample.CHAIN),
    }.items():
        assert data[:10] == single_objects(name).header


def test_key_bytes_are_frozen() -> None:
    """Compaction compares the bytes of keys, so a change to them would leave the old record next to the new one."""
    expected = "c301c5e165864b0e8c1e" + "0c6f7264657273" + "0231" + "00" + "16506172746974696f6e2030" + "02"
    assert codecs.encode_key(KEY_V1).hex() == expected
    expected = "c301472a55ea47f1e10d" + "0c6f7264657273" + "0231" + "00" + "16506172746974696f6e2030"
    assert codecs.encode_key(KEY)[:-8].hex() == expected + "0000000000000007"
    assert codecs.encode_key(KEY)[-8:] == xxhash.xxh3_64_digest(codecs.encode_key(KEY)[:-8])


def test_keys_differ_in_every_part() -> None:
    """A different job, job ID, layout generation, task, version or sequence number makes a different key."""
    others = [
        replace(KEY, job_name="x"),
        replace(KEY, job_id="2"),
        replace(KEY, layout_generation=1),
        replace(KEY, task="Partition 1"),
        replace(KEY, sequence=8),
        KEY_V1,
    ]
    assert len({codecs.encode_key(key) for key in [KEY, *others]}) == 7


def test_keys_of_a_task_differ_in_their_last_bytes_alone() -> None:
    """All keys of a task start with the same bytes, whatever the sequence number, so a reader knows the owner."""
    keys = {codecs.encode_key(replace(KEY, sequence=n)) for n in (0, 1, 127, 128, 2**40, 2**63 - 1)}
    assert len({key[: -codecs.KEY_TAIL_SIZE] for key in keys}) == 1
    with pytest.raises(InvalidError, match="sequence number is -1"):
        codecs.encode_key(replace(KEY, sequence=-1))


@pytest.mark.parametrize("value", [b"", b"garbage", b"\xc3\x01", b"\xc3\x01" + b"x" * 8, b'{"json": 1}'])
def test_poison_names_topic_partition_and_offset(value: bytes) -> None:
    """A record that statemgr did not write is an error that says where the record is."""
    for decode in (
        lambda: codecs.decode_task(KEY_BYTES, KEY, value, AT),
        lambda: codecs.decode_job(codecs.encode_key(JOB_KEY), JOB_KEY, value, AT),
        lambda: codecs.decode_record_v1(KEY_V1, value, AT),
        lambda: codecs.decode_key(value, AT),
    ):
        with pytest.raises(CorruptRecord) as caught:
            decode()
        assert caught.value.where == PLACE


def test_every_flipped_bit_is_refused() -> None:
    """FAULT 43: the checksums cover every bit of a record's key and value."""
    for name, key, value in (("job", JOB_KEY, codecs.encode_job(JOB_KEY, JOB)[1]), ("task", KEY, VALUE)):
        data = codecs.encode_key(key)
        decode = codecs.decode_job if name == "job" else codecs.decode_task
        decode(data, key, value)
        for bit in range(8 * len(data)):
            flipped = _flip(data, bit)
            with pytest.raises(CorruptRecord):
                codecs.decode_key(flipped)
            with pytest.raises(CorruptRecord):
                decode(flipped, key, value)
        for bit in range(8 * len(value)):
            with pytest.raises(CorruptRecord):
                decode(data, key, _flip(value, bit))


def _flip(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_a_value_under_another_key_is_refused() -> None:
    """The checksum covers the key, so a value is valid only with the key that it was written with."""
    for key in (replace(KEY, job_name="x"), replace(KEY, task="Partition 1"), replace(KEY, sequence=8)):
        with pytest.raises(CorruptRecord, match="checksum"):
            decode_task(VALUE, key)


def test_a_value_says_the_layout_and_sequence_of_its_key() -> None:
    """A record whose layout or sequence number differs from its key's is refused."""
    task = task_alone(sample.CHECKPOINT, sample.LAYOUT)
    for key in (replace(KEY, layout_generation=1), replace(KEY, sequence=8)):
        with pytest.raises(CorruptRecord, match="its key of layout"):
            decode_task(codecs.encode_task(key, task)[1], key)
        with pytest.raises(CorruptRecord, match="its key of layout"):
            codecs.decode_job(*codecs.encode_job(key, JOB)[:1], key, codecs.encode_job(key, JOB)[1])
    with pytest.raises(CorruptRecord, match="without the other"):
        decode_task(codecs.encode_task(KEY, replace(task, layout=None))[1])


def test_a_key_with_another_sequence_number() -> None:
    """A key for another sequence number can be made from existing key bytes, without the codec."""
    for key in (KEY, JOB_KEY):
        for sequence in (0, 8, 2**40):
            expected = codecs.encode_key(replace(key, sequence=sequence))
            assert codecs.with_sequence(codecs.encode_key(key), sequence) == expected


def test_version_one_value_of_another_key_is_refused() -> None:
    """A version 1 value with another job or task than its key is refused."""
    value = codecs.encode_record_v1(sample.RECORD)
    for key in (replace(KEY_V1, job_name="x"), replace(KEY_V1, job_id="2"), replace(KEY_V1, task="Partition 1")):
        with pytest.raises(CorruptRecord, match="its key is of"):
            codecs.decode_record_v1(key, value)


def test_record_needs_a_checkpoint() -> None:
    """A record without any checkpoint cannot be encoded."""
    with pytest.raises(InvalidError):
        codecs.encode_record(replace(sample.RECORD, checkpoints=()))


def test_many_partitions_take_little_room() -> None:
    """FAULT 58: a thousand input partitions take a few bytes each, and come back unchanged."""
    offsets = {f"orders-{n}": 10**9 + n for n in range(1000)} | {"odd-name-007": 1, "no number": 2, "late-5": 3}
    checkpoint = replace(sample.CHECKPOINT, input_offsets=offsets, input_topic_ids={"orders": "id", "unread": "x"})
    empty = replace(sample.CHECKPOINT, input_offsets={}, input_topic_ids={})
    assert codecs.decode_checkpoint(codecs.encode_checkpoint(checkpoint)) == checkpoint
    assert len(codecs.encode_checkpoint(checkpoint)) - len(codecs.encode_checkpoint(empty)) < 6000


@pytest.mark.parametrize(
    "runs",
    [
        [{"first": -1, "offsets": [1]}],
        [{"first": 0, "offsets": [1, 2]}, {"first": 1, "offsets": [3]}],
    ],
)
def test_impossible_input_partitions_are_refused(runs: list[dict[str, object]]) -> None:
    """A negative partition or a partition that occurs twice is refused."""
    value = in_avro("checkpoint_task.v3", codecs.encode_checkpoint(sample.CHECKPOINT))
    value["publish"]["inputs"]["topics"] = [{"topic": "t", "topic_id": None, "runs": runs}]
    with pytest.raises(CorruptRecord, match="partition"):
        codecs.decode_checkpoint(Codec("checkpoint_task.v3", dict, SHAPES).encode(value))


@pytest.mark.parametrize(
    "marker",
    [
        ChangelogMarker("t", None, 0, -1),
        ChangelogMarker("t", None, -1, 0),
        BlobMarker(BlobRef("b", -1, sample.HASH)),
    ],
)
def test_impossible_markers_are_refused(marker: ChangelogMarker | BlobMarker) -> None:
    """A negative offset, partition or size is refused."""
    checkpoint = replace(sample.CHECKPOINT, state_checkpoint_markers={"f": {"s": marker}})
    with pytest.raises(CorruptRecord):
        codecs.decode_checkpoint(codecs.encode_checkpoint(checkpoint))


def test_state_id_that_is_a_path_is_refused() -> None:
    """A state ID becomes the name of a local directory. The decoder refuses an ID that leads elsewhere."""
    checkpoint = replace(sample.CHECKPOINT, stores={"totals": "../../x"})
    with pytest.raises(CorruptRecord, match="state ID"):
        decode_task(codecs.encode_record(replace(sample.RECORD, checkpoints=(checkpoint,)))[0][1])
    stores = {"totals": PreparedStore("a/b")}
    with pytest.raises(CorruptRecord, match="state ID"):
        codecs.decode_prepared(codecs.encode_prepared(replace(sample.PREPARED, stores=stores)))


@pytest.mark.parametrize("attachment", [Attachment("n"), Attachment("n", b"x", sample.BLOB)])
def test_attachment_is_inline_or_in_a_blob(attachment: Attachment) -> None:
    """An attachment that is both inline and in a blob, or neither, is refused."""
    with pytest.raises(CorruptRecord, match="exactly one"):
        codecs.decode_checkpoint(codecs.encode_checkpoint(replace(sample.CHECKPOINT, attachments=(attachment,))))


def test_wrong_hash_size_is_invalid() -> None:
    """A hash that is not 16 bytes long cannot be encoded."""
    with pytest.raises(InvalidError):
        codecs.encode_index(replace(sample.INDEX, previous=BlobRef("b", 1, b"short")))


def test_version_one_written_by_older_software_is_read() -> None:
    """Changelog offsets, input offsets and the ID are read. Anything that version 1 lacks is marked as unknown."""
    data = Codec("checkpoint.v1", dict, SHAPES).encode(
        {
            "job_name": "orders",
            "job_id": "1",
            "task": sample.TASK,
            "checkpoint_id": "1700000000000-000042",
            "input_offsets": {"orders-0": 12},
            "stores": {"totals": {"topic": "changelog", "partition": 0, "offset": 99}},
        },
    )
    record = codecs.decode_record_v1(KEY_V1, data, codecs.Place(offset=7))
    assert record.offset == 7
    assert record.layout.tasks == 0
    current = record.current
    assert current.checkpoint_id == CheckpointId(1_700_000_000_000, 42)
    assert current.input_offsets == {"orders-0": 12}
    assert current.record_version == 1
    assert current.state_checkpoint_markers == {
        codecs.VERSION_ONE_FACTORY: {"totals": ChangelogMarker("changelog", None, 0, 99)}
    }
    assert set(current.stores) == {"totals"}


@pytest.mark.parametrize(("field", "value"), [("checkpoint_id", "yesterday"), ("offset", -3)])
def test_version_one_with_bad_content_is_refused(field: str, value: object) -> None:
    """A version 1 record with an impossible ID or offset raises a typed error."""
    store = {"topic": "changelog", "partition": 0, "offset": 99}
    fields = {"job_name": "orders", "job_id": "1", "task": sample.TASK, "checkpoint_id": "1-000000"}
    (store if field in store else fields)[field] = value  # type: ignore[assignment, index]
    data = Codec("checkpoint.v1", dict, SHAPES).encode({**fields, "input_offsets": {}, "stores": {"s": store}})
    with pytest.raises(CorruptRecord):
        codecs.decode_record_v1(KEY_V1, data)


@pytest.mark.parametrize(
    "changes",
    [
        PreparedChanges(False, local=ChangeList(((b"k", b"v"),))),
        PreparedChanges(False),
        PreparedChanges(False, inline=b"", blob=sample.BLOB),
    ],
)
def test_local_changes_do_not_leave_their_process(changes: PreparedChanges) -> None:
    """A prepared commit cannot be encoded unless its changes are either inline or in a blob."""
    stores = {"totals": PreparedStore("x", changes={"kafka-changelog": changes})}
    with pytest.raises(InvalidError):
        codecs.encode_prepared(replace(sample.PREPARED, stores=stores))


def directory(name: str, parent: int) -> dict[str, object]:
    """Return an entry of an index's flat tree."""
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
    """No root, a named root, two roots, cycles and later parents are refused, and the error names the blob."""
    fields = ("job_name", "job_id", "task", "store", "state_id", "attempt")
    value = {**dict.fromkeys(fields, "x"), "created_ms": 0, "previous": None, "root": dirs}
    with pytest.raises(CorruptBlob) as caught:
        codecs.decode_index(Codec("snapshot_index.v1", dict, SHAPES).encode(value), "j/1/index")
    assert caught.value.where == {"blob": "j/1/index"}


def test_index_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index above the limit can be neither encoded nor decoded."""
    data = codecs.encode_index(sample.INDEX)
    monkeypatch.setattr(records, "_INDEX", Codec("snapshot_index.v1", SnapshotIndex, SHAPES, len(data) - 1))
    with pytest.raises(InvalidError):
        codecs.encode_index(sample.INDEX)
    with pytest.raises(CorruptBlob, match="larger"):
        codecs.decode_index(data, "b")


def test_decoders_of_each_kind_raise_their_own_error() -> None:
    """Records and blobs have errors of their own, and both are CorruptError."""
    for decode, kind in ((codecs.decode_checkpoint, CorruptRecord), (codecs.decode_index, CorruptBlob)):
        with pytest.raises(CorruptError) as caught:
            decode(b"")
        assert type(caught.value) is kind


def test_opaque_marker_keeps_its_bytes() -> None:
    """The marker of an external backend keeps its bytes unchanged."""
    marker = OpaqueMarker(bytes(range(256)))
    checkpoint = replace(sample.CHECKPOINT, state_checkpoint_markers={"theirs": {"totals": marker}})
    assert codecs.decode_checkpoint(codecs.encode_checkpoint(checkpoint)).marker("theirs", "totals") == marker


def test_content_hash_is_xxh3_128() -> None:
    """The hash of no bytes is the algorithm's published one. Hashing piece by piece gives the same hash."""
    assert content_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    pieces = hasher()
    for piece in (b"a", bytearray(b"b" * 1000), memoryview(b"c")):
        pieces.update(piece)
    assert pieces.digest() == content_hash(b"a" + b"b" * 1000 + b"c")
