"""Hypothesis strategies for the models. They generate everything that the types and the formats allow."""

from __future__ import annotations

from hypothesis import strategies as st

from statemgr.ids import CheckpointId
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import (
    Attachment,
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointKey,
    CheckpointRecord,
    Layout,
    MicroBatch,
    OpaqueMarker,
    OutstandingTtl,
)
from statemgr.model.commit import Change, PreparedChanges, PreparedCommit, PreparedStore, ProducedRecord
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex, name_problem

longs = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**63 - 1)
ints = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
printable = st.characters(exclude_categories=["C", "Z"], include_characters=" ", exclude_characters="/\\")
names = st.text(printable, min_size=1, max_size=12).filter(lambda name: name_problem(name) is None)
hashes = st.binary(min_size=16, max_size=16)
contents = st.binary(max_size=40)


def few(values: st.SearchStrategy[object], size: int = 3) -> st.SearchStrategy[tuple[object, ...]]:
    """Return a short tuple."""
    return st.lists(values, max_size=size).map(tuple)


def maps(values: st.SearchStrategy[object], keys: st.SearchStrategy[str] = texts) -> st.SearchStrategy[dict]:
    """Return a small map."""
    return st.dictionaries(keys, values, max_size=3)


blobs = st.builds(BlobRef, texts, counts, hashes, st.none() | counts)
changelog_markers = st.builds(
    ChangelogMarker, texts, st.none() | texts, ints, counts, newest_ms=st.none() | counts, newest_deletes=st.booleans()
)
markers = st.one_of(
    changelog_markers,
    st.builds(BlobMarker, blob=blobs) | st.builds(BlobMarker, inline=contents),
    st.builds(OpaqueMarker, contents),
)
attachments = st.builds(Attachment, texts, inline=contents) | st.builds(Attachment, texts, blob=blobs)
layouts = st.builds(Layout, ints, ints, texts)
checkpoint_ids = st.builds(CheckpointId, st.integers(0, 10**19 - 1), st.integers(0, 999_999))
#: Source partitions. Most are a topic name and a number.
partitions = texts | st.builds("{}-{}".format, texts, st.integers(0, 2**31 - 1) | st.integers(0, 5))
checkpoints = st.builds(
    Checkpoint,
    checkpoint_id=checkpoint_ids,
    sequence=counts,
    epoch=counts,
    input_offsets=maps(longs, partitions),
    stores=maps(names),
    state_checkpoint_markers=maps(maps(markers), st.just("kafka-changelog") | texts),
    backup_factories=maps(few(texts)),
    restore_factories=maps(few(texts)),
    batch=st.none() | st.builds(MicroBatch, texts, longs, texts, texts, st.none() | longs),
    attachments=few(attachments),
    outstanding_ttl=few(st.builds(OutstandingTtl, texts, counts)),
    record_version=st.integers(1, 2),
    input_topic_ids=maps(texts),
    serdes=maps(st.tuples(texts, texts)),
    retired_changelogs=maps(few(changelog_markers)),
    kept=few(texts),
)
records = st.builds(
    CheckpointRecord, texts, texts, texts, layouts, st.lists(checkpoints, min_size=1, max_size=3).map(tuple)
)
keys = st.builds(CheckpointKey, texts, texts, ints, texts, st.just(1)) | st.builds(
    CheckpointKey, texts, texts, ints, texts, st.just(2), counts
)

files = st.builds(FileIndex, names, counts, hashes, inline=st.none() | contents, parts=few(blobs), frames=few(counts))
directories = st.recursive(
    st.builds(DirIndex, names, few(files)),
    lambda inner: st.builds(DirIndex, names, few(files), few(inner)),
    max_leaves=8,
)
roots = st.builds(DirIndex, st.just(""), few(files), few(directories))
indexes = st.builds(SnapshotIndex, texts, texts, texts, texts, texts, texts, longs, roots, st.none() | blobs)

chain_segments = st.builds(ChainSegment, counts, counts, blob=blobs) | st.builds(
    ChainSegment, counts, counts, inline=contents
)
chains = st.builds(
    SegmentChain, texts, texts, texts, texts, texts, texts, texts, longs,
    st.builds(ChainSnapshot, blobs, texts, counts), few(chain_segments), few(texts),
)  # fmt: skip

changes_to_send = st.builds(PreparedChanges, st.booleans(), inline=contents) | st.builds(
    PreparedChanges, st.booleans(), blob=blobs
)
produced = st.builds(
    ProducedRecord,
    texts,
    st.none() | contents,
    st.none() | contents,
    st.none() | ints,
    few(st.tuples(texts, st.none() | contents)),
    st.none() | longs,
)
prepared_commits = st.builds(
    PreparedCommit,
    texts,
    texts,
    texts,
    layouts,
    longs,
    texts,
    st.none() | texts,
    st.none() | maps(longs),
    maps(st.builds(PreparedStore, names, maps(markers), maps(changes_to_send))),
    few(texts),
    few(attachments),
    few(produced),
    input_topic_ids=maps(texts),
)
histories: st.SearchStrategy[list[Change]] = st.lists(st.tuples(contents, st.none() | contents), max_size=40)
