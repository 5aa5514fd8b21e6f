"""One complete example of every record, for tests that need one."""

from __future__ import annotations

from dataclasses import replace

from statemgr.ids import CheckpointId
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import (
    Attachment,
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Layout,
    MicroBatch,
    OpaqueMarker,
    OutstandingTtl,
)
from statemgr.model.codecs import encode_chain
from statemgr.model.commit import PreparedChanges, PreparedCommit, PreparedStore, ProducedRecord
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex

TASK = "Partition 0"
HASH = bytes(range(16))
PREFIX = "orders/1/Partition_0/totals/1700-ab"
BLOB = BlobRef(f"{PREFIX}/000012.sst.0", 3, HASH)
INDEX_BLOB = BlobRef(f"{PREFIX}/index", 500, HASH)
CHAIN_BLOB = BlobRef("orders/1/Partition_0/_segments/1700-ab", 300, HASH, offset=200)
LAYOUT = Layout(generation=0, tasks=3, partitioner="kafka-murmur2")

CHAIN = SegmentChain(
    job_name="orders",
    job_id="1",
    task=TASK,
    store="totals",
    state_id="1700-ab-totals",
    attempt="1700-ab",
    lineage="1500-aa",
    created_ms=1_700_000_000_000,
    snapshot=ChainSnapshot(INDEX_BLOB, "1600-ef-totals", 10),
    segments=(
        ChainSegment(8, 12, replace(CHAIN_BLOB, offset=0, size=200)),
        ChainSegment(12, 13, inline=b"segment"),
        ChainSegment(13, 20, BlobRef("", 200, HASH, offset=0)),
    ),
    added=(INDEX_BLOB.blob_id,),
)
INLINE_CHAIN = encode_chain(CHAIN)

CHECKPOINT = Checkpoint(
    checkpoint_id=CheckpointId(1_700_000_000_000, 42),
    sequence=7,
    epoch=2,
    input_offsets={"orders-0": 1234, "orders-1": 0},
    stores={"totals": "1700-ab-totals", "seen": "1600-cd-seen"},
    state_checkpoint_markers={
        "kafka-changelog": {
            "totals": ChangelogMarker("orders-1-totals-changelog", "Zm9v", 0, 99, 7, 1_700_000_000_000, True)
        },
        "blob-store": {"totals": BlobMarker(CHAIN_BLOB), "seen": BlobMarker(inline=INLINE_CHAIN)},
        "custom": {"totals": OpaqueMarker(b"\x00own")},
    },
    backup_factories={"totals": ("kafka-changelog", "blob-store"), "seen": ()},
    restore_factories={"totals": ("blob-store",), "seen": ()},
    batch=MicroBatch("query", 3, '{"orders":{"0":0}}', '{"orders":{"0":1234}}', watermark_ms=1_699_999_000_000),
    attachments=(Attachment("rows", inline=b"row"), Attachment("more", blob=BLOB)),
    outstanding_ttl=(OutstandingTtl(BLOB.blob_id, 1_700_000_000_000),),
    input_topic_ids={"orders": "b3JkZXJzLWlucHV0LWlk"},
    serdes={"totals": ("string v1", "json v1")},
    retired_changelogs={"totals": (ChangelogMarker("old-changelog", "some-id", 0, 7),)},
    kept=("1699999999999-000041",),
)
RECORD = CheckpointRecord("orders", "1", TASK, LAYOUT, (CHECKPOINT,))

INDEX = SnapshotIndex(
    job_name="orders",
    job_id="1",
    task=TASK,
    store="totals",
    state_id="1700-ab-totals",
    attempt="1700-ab",
    created_ms=1_700_000_000_000,
    root=DirIndex(
        "",
        (
            FileIndex("000012.sst", 3, HASH, parts=(BLOB,), mode=0o640, modified_ms=1_700_000_000_000),
            FileIndex("CURRENT", 2, HASH, inline=b"x\n"),
        ),
        (DirIndex("journal", (FileIndex("empty", 0, HASH, inline=b""),), (DirIndex("old"),)), DirIndex("z")),
    ),
    previous=INDEX_BLOB,
)

PREPARED = PreparedCommit(
    job_name="orders",
    job_id="1",
    task=TASK,
    layout=LAYOUT,
    epoch=2,
    attempt="1700-ab",
    base_checkpoint_id="1600000000000-000001",
    input_offsets={"orders-0": 1234},
    stores={
        "totals": PreparedStore(
            "1700-ab-totals",
            {"blob-store": BlobMarker(CHAIN_BLOB)},
            {"kafka-changelog": PreparedChanges(fill=True, blob=BLOB)},
        ),
        "seen": PreparedStore("1600-cd-seen", changes={"kafka-changelog": PreparedChanges(False, inline=b"")}),
    },
    added_blobs=(BLOB.blob_id,),
    attachments=(Attachment("rows", inline=b""),),
    produced=(ProducedRecord("totals-out", b"k", None, 2, (("h", None), ("i", b"")), 1_700_000_000_001),),
    input_topic_ids={"orders": "b3JkZXJzLWlucHV0LWlk"},
)
