"""Codecs read exactly what they wrote, and answer everything else with a typed error."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemgr.errors import CorruptBlob, CorruptError, CorruptRecord
from statemgr.model import codecs
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import (
    ChangelogMarker,
    Checkpoint,
    CheckpointKey,
    CheckpointRecord,
    Layout,
)
from statemgr.model.checkpoint_records import JobCheckpoint, checkpoint_of, common_inputs, publish_of, task_part
from statemgr.model.commit import Change, PreparedCommit
from statemgr.model.segment import encode_segment, read_segment, verify_segment
from statemgr.model.snapshot import SnapshotIndex
from tests import model_samples as sample
from tests.core.property import model_strategies as some

KEY = sample.RECORD.key(sample.CHECKPOINT)
JOB = JobCheckpoint(sample.LAYOUT, publish_of(sample.CHECKPOINT))
JOB_KEY, JOB_VALUE = codecs.encode_job(replace(KEY, task=""), JOB)
((TASK_KEY, TASK_VALUE),) = codecs.encode_record(sample.RECORD)

#: name → (valid bytes, decoder, the only error that it may raise)
DECODERS: dict[str, tuple[bytes, Callable[[bytes], Any], type[CorruptError]]] = {
    "key": (codecs.encode_key(KEY), codecs.decode_key, CorruptRecord),
    "key-v1": (codecs.encode_key(sample.RECORD.key_v1()), codecs.decode_key, CorruptRecord),
    "task": (TASK_VALUE, lambda b: codecs.decode_task(TASK_KEY, KEY, b), CorruptRecord),
    "job": (JOB_VALUE, lambda b: codecs.decode_job(JOB_KEY, replace(KEY, task=""), b), CorruptRecord),
    "record-v1": (
        codecs.encode_record_v1(sample.RECORD),
        lambda b: codecs.decode_record_v1(sample.RECORD.key_v1(), b),
        CorruptRecord,
    ),
    "checkpoint": (codecs.encode_checkpoint(sample.CHECKPOINT), codecs.decode_checkpoint, CorruptRecord),
    "index": (codecs.encode_index(sample.INDEX), codecs.decode_index, CorruptBlob),
    "chain": (codecs.encode_chain(sample.CHAIN), codecs.decode_chain, CorruptBlob),
    "prepared": (codecs.encode_prepared(sample.PREPARED), codecs.decode_prepared, CorruptRecord),
    "segment": (
        encode_segment([(b"k%d" % n, b"v" * n if n % 3 else None) for n in range(50)]),
        lambda b: list(read_segment(io.BytesIO(b))),
        CorruptBlob,
    ),
}


@given(some.keys)
def test_key_round_trips(key: CheckpointKey) -> None:
    """A key reads as it was written, and equal keys have equal bytes."""
    assert codecs.decode_key(codecs.encode_key(key)) == key
    assert codecs.encode_key(key) == codecs.encode_key(replace(key))


@given(some.records, some.counts)
def test_record_round_trips(record: CheckpointRecord, offset: int) -> None:
    """Every checkpoint of a record reads as it was written, with the offset at which it was read."""
    read = []
    for (key, value), checkpoint in zip(codecs.encode_record(record), reversed(record.checkpoints), strict=True):
        at = codecs.decode_key(key)
        assert at == record.key(checkpoint)
        task = codecs.decode_task(key, at, value)
        assert task.publish is not None
        assert task.layout == record.layout
        read.insert(0, checkpoint_of(task, task.publish, offset))
    assert tuple(read) == record.checkpoints
    assert {checkpoint.offset for checkpoint in read} == {offset}


@given(some.layouts, st.lists(some.checkpoints, min_size=1, max_size=3), some.keys)
def test_parts_make_the_checkpoint_again(layout: Layout, found: list[Checkpoint], key: CheckpointKey) -> None:
    """A task's own part refers to the job record. Together they make the checkpoint, whose offsets may be its own."""
    common = common_inputs(dict(enumerate(found)))  # type: ignore[arg-type]
    for checkpoint in found:
        publish = publish_of(checkpoint, common)
        at = replace(key, layout_generation=layout.generation, sequence=checkpoint.sequence, record_version=2)
        job_data, job_value = codecs.encode_job(replace(at, task=""), JobCheckpoint(layout, publish))
        data, value = codecs.encode_task(at, task_part(checkpoint, publish))
        job = codecs.decode_job(job_data, replace(at, task=""), job_value)
        task = codecs.decode_task(data, at, value)
        assert task.publish is None
        assert checkpoint_of(task, job.publish) == checkpoint


@given(some.chains)
def test_chain_round_trips(chain: SegmentChain) -> None:
    """A segment chain reads as it was written. References to the blob that holds the chain get that blob's name."""
    data = codecs.encode_chain(chain)
    assert codecs.decode_chain(data) == chain
    assert codecs.decode_chain(data, "j/1/o") == chain.lying_in("j/1/o")


@given(some.records)
def test_version_one_keeps_offsets_and_changelog_markers(record: CheckpointRecord) -> None:
    """A version 1 record contains only the current checkpoint's ID, input offsets and changelog offsets."""
    read = codecs.decode_record_v1(record.key_v1(), codecs.encode_record_v1(record), codecs.Place(offset=5)).current
    assert read.checkpoint_id == record.current.checkpoint_id
    assert read.input_offsets == record.current.input_offsets
    assert read.record_version == 1
    kept = {
        store: ChangelogMarker(marker.topic, None, marker.partition, marker.offset)
        for store, marker in record.current.state_checkpoint_markers.get("kafka-changelog", {}).items()
        if isinstance(marker, ChangelogMarker)
    }
    assert read.state_checkpoint_markers.get("kafka-changelog", {}) == kept
    assert set(read.stores) == set(kept)


@given(some.checkpoints)
def test_checkpoint_alone_round_trips(checkpoint: Checkpoint) -> None:
    """A single checkpoint reads as it was written."""
    assert codecs.decode_checkpoint(codecs.encode_checkpoint(checkpoint)) == checkpoint


@given(some.checkpoints)
def test_equal_checkpoints_have_equal_bytes(checkpoint: Checkpoint) -> None:
    """The order in which a map was filled does not affect the bytes."""
    turned = {name: checkpoint.input_offsets[name] for name in reversed(checkpoint.input_offsets)}
    other = replace(checkpoint, input_offsets=turned)
    assert codecs.encode_checkpoint(other) == codecs.encode_checkpoint(checkpoint)


@given(some.indexes)
def test_index_round_trips(index: SnapshotIndex) -> None:
    """An index reads with its complete tree: nested and empty directories, empty files, files of many parts."""
    assert codecs.decode_index(codecs.encode_index(index), "b") == index


@given(some.prepared_commits)
def test_prepared_commit_round_trips(prepared: PreparedCommit) -> None:
    """A prepared commit reads as it was written."""
    assert codecs.decode_prepared(codecs.encode_prepared(prepared)) == prepared


@given(some.histories)
def test_segment_round_trips(changes: list[Change]) -> None:
    """A change segment returns the same changes in the same order. An empty value is not a delete."""
    data = encode_segment(changes)
    assert list(read_segment(io.BytesIO(data))) == changes
    assert verify_segment(io.BytesIO(data)) == len(changes)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_damaged_bytes_give_only_typed_errors(name: str, data: st.DataObject) -> None:
    """For flipped, removed or inserted bytes, a decoder returns or raises its one error, and never another."""
    valid, decode, error = DECODERS[name]
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(damaged) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "end"])):
            case "flip" if damaged:
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del damaged[at : at + data.draw(st.integers(1, 9))]
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=12))
            case _:
                del damaged[at:]
    with suppress(error):
        decode(bytes(damaged))


@pytest.mark.parametrize("name", DECODERS)
@given(tail=st.binary(max_size=200), keep=st.integers(0, 40))
def test_random_bytes_give_only_typed_errors(name: str, tail: bytes, keep: int) -> None:
    """For random bytes after a valid start of any length, a decoder returns or raises its one error."""
    valid, decode, error = DECODERS[name]
    with suppress(error):
        decode(valid[:keep] + tail)


@pytest.mark.parametrize("name", DECODERS)
def test_every_cut_and_every_tail_is_refused(name: str) -> None:
    """A decoder rejects a record that is cut at any byte or has extra bytes at its end."""
    valid, decode, error = DECODERS[name]
    decode(valid)
    for end in range(len(valid)):
        with pytest.raises(error):
            decode(valid[:end])
    for tail in (b"\x00", b"\xff", valid):
        with pytest.raises(error):
            decode(valid + tail)
