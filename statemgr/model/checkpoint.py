"""Checkpoints: what the records on the checkpoint topic say together. Pure.

Every retained checkpoint has a record with a key of its own, since compaction keeps only the newest record of a key.
The design follows Samza's CheckpointV2 (SEP for SAMZA-2657), with what it lacks: the layout, the sequence number, the
list of all stores, the outbox of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from statemgr.ids import CheckpointId

#: Changelogs that a store no longer writes and that its checkpoints still list: the newest.
_MOST_RETIRED = 8


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where bytes are, and how to recognise them.

    ``blob_id`` is the name relative to the blob store's root, ``size`` in bytes, ``hash`` 16 bytes, XXH3-128.
    ``offset`` is where they begin in a blob that has others beside them; None: they are the whole blob.
    """

    blob_id: str
    size: int
    hash: bytes
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class ChangelogMarker:
    """Marker of ``kafka-changelog``: the offset after the last record that belongs to the checkpoint.

    ``topic_id`` is Kafka's UUID of the topic as text; None when older software (version 1) wrote the marker.
    """

    topic: str
    topic_id: str | None
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class BlobMarker:
    """Marker of ``blob-store``: the encoded segment chain, either in a blob or ``inline``.

    The chain names a snapshot's index and the segments after it, and is all that a restore needs to know.
    """

    blob: BlobRef | None = None
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class OpaqueMarker:
    """Marker of a backend from outside, as bytes of its own format."""

    data: bytes


Marker = BlobMarker | ChangelogMarker | OpaqueMarker
#: factory name → store → marker
Markers = Mapping[str, Mapping[str, Marker]]


#: The attachment that a repetition of a checkpoint has: the sequence number under which its output was first published.
SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Attachment:
    """Bytes published with a checkpoint (output rows of a micro-batch): either inline, or in a blob."""

    name: str
    inline: bytes | None = None
    blob: BlobRef | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a Spark micro-batch is known by: query, number, source offsets (Spark's JSON, normalised).

    ``watermark_ms`` is the watermark that it ran with, in epoch milliseconds; None: the query has none.
    """

    query_id: str
    batch_id: int
    start_offsets: str
    end_offsets: str
    watermark_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OutstandingTtl:
    """A published blob whose TTL could not be removed yet, and since when (epoch milliseconds)."""

    blob_id: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How keys are spread over tasks. It is part of every checkpoint; changing it is a rescale."""

    generation: int
    tasks: int
    partitioner: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One published state of one task.

    ``input_offsets``: source partition (``orders-0``) → next offset to read. ``input_topic_ids``: input topic →
    Kafka's ID of it as text. ``stores``: every store of the job → its state ID, unique per attempt that made this
    content. ``serdes``: store → its key and value serde, each with its version. ``state_checkpoint_markers``:
    factory → store → marker. ``retired_changelogs``: store → last markers of changelogs that it no longer writes,
    newest first. ``sequence`` counts publishes and is never used twice. ``offset``: where its record was
    read on the checkpoint topic; None before it is published.
    """

    checkpoint_id: CheckpointId
    sequence: int
    epoch: int
    input_offsets: Mapping[str, int]
    stores: Mapping[str, str]
    state_checkpoint_markers: Markers
    backup_factories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    restore_factories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    batch: MicroBatch | None = None
    attachments: tuple[Attachment, ...] = ()
    outstanding_ttl: tuple[OutstandingTtl, ...] = ()
    record_version: int = 2
    #: When it was published by the broker's clock (epoch milliseconds); None where the topic does not say. Not part of
    #: the encoded record.
    published_ms: int | None = field(default=None, compare=False)
    input_topic_ids: Mapping[str, str] = field(default_factory=dict)
    serdes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    retired_changelogs: Mapping[str, tuple[ChangelogMarker, ...]] = field(default_factory=dict)
    offset: int | None = field(default=None, compare=False)

    @property
    def output_sequence(self) -> int:
        """The sequence number that belongs to the attachments: that of the first publish, if this one repeats it."""
        noted = next((a.inline for a in self.attachments if a.name == SEQUENCE and a.inline), None)
        return int(noted) if noted is not None else self.sequence

    def marker(self, factory: str, store: str) -> Marker | None:
        """The marker of a backend for a store, or None where the backend has none."""
        return self.state_checkpoint_markers.get(factory, {}).get(store)


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """Key of a record on the checkpoint topic.

    Version 2 has one record for each checkpoint and a key with its ``sequence``; ``task`` is empty for a job record.
    Version 1 has one record for each task and no sequence in its key.
    """

    job_name: str
    job_id: str
    layout_generation: int
    task: str
    record_version: int
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What the checkpoint topic says of a task: the layout, and the retained checkpoints, newest first, at least one.

    ``offset``: where the newest record was read; None before it is published. ``from_version_one``: the current
    checkpoint is on the topic as a version 1 record alone.
    """

    job_name: str
    job_id: str
    task: str
    layout: Layout
    checkpoints: tuple[Checkpoint, ...]
    offset: int | None = field(default=None, compare=False)
    from_version_one: bool = field(default=False, compare=False)

    @property
    def current(self) -> Checkpoint:
        """The checkpoint in force."""
        return self.checkpoints[0]

    def key(self, checkpoint: Checkpoint) -> CheckpointKey:
        """The key that a checkpoint of it is published under."""
        generation = self.layout.generation
        return CheckpointKey(self.job_name, self.job_id, generation, self.task, 2, checkpoint.sequence)

    def key_v1(self) -> CheckpointKey:
        """The key of the version 1 record of the current checkpoint."""
        return CheckpointKey(self.job_name, self.job_id, self.layout.generation, self.task, 1)

    def followed_by(self, checkpoint: Checkpoint, retained: int) -> CheckpointRecord:
        """The record that publishes ``checkpoint`` and keeps up to ``retained`` in all.

        Outstanding TTLs count in the newest only, which has all of them.
        """
        return replace(
            self,
            checkpoints=(checkpoint, *without_outstanding(self.checkpoints[: max(retained - 1, 0)])),
            offset=None,
            from_version_one=False,
        )


def without_outstanding(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Checkpoints that are no longer the newest: the newest has all outstanding TTLs."""
    return tuple(replace(c, outstanding_ttl=()) if c.outstanding_ttl else c for c in checkpoints)


def with_version_one(newest: CheckpointRecord | None, version_one: CheckpointRecord | None) -> CheckpointRecord | None:
    """The current record when both versions of it were read: the highest offset wins.

    A version 1 record that is newer (older software ran meanwhile) becomes the current checkpoint, with
    changelog markers alone and the next sequence number, in front of what was retained before.
    """
    if version_one is None:
        return newest
    if newest is None:
        return replace(version_one, from_version_one=True)
    assert newest.offset is not None
    assert version_one.offset is not None
    same_commit = version_one.current.checkpoint_id == newest.current.checkpoint_id
    if same_commit or version_one.offset < newest.offset:
        return newest
    before = newest.current
    # a store that only blobs have stays listed: it is missing now, not new
    stores = {**before.stores, **version_one.current.stores}
    current = replace(version_one.current, sequence=before.sequence + 1, epoch=before.epoch, stores=stores)
    record = newest.followed_by(current, len(newest.checkpoints) + 1)
    return replace(record, offset=version_one.offset, from_version_one=True)


def retired_changelogs(before: Checkpoint | None, now: Markers) -> Mapping[str, tuple[ChangelogMarker, ...]]:
    """Store → the last marker of each changelog topic that the store no longer writes, newest first.

    They explain the records of such a topic when the store turns to it again.

    Args:
        before: the checkpoint that the new one follows.
        now: factory → store → marker of the new one.
    """
    if before is None:
        return {}
    left: dict[str, list[ChangelogMarker]] = {}
    for store, marker in _changelogs(before.state_checkpoint_markers):
        left.setdefault(store, []).append(marker)
    for store, earlier in before.retired_changelogs.items():
        left.setdefault(store, []).extend(earlier)
    in_use = {(store, *_topic(marker)) for store, marker in _changelogs(now)}
    found = {}
    for store, markers in left.items():
        kept = {_topic(m): m for m in reversed(markers) if (store, *_topic(m)) not in in_use}
        if kept:
            found[store] = tuple(reversed(kept.values()))[:_MOST_RETIRED]
    return found


def _changelogs(markers: Markers) -> list[tuple[str, ChangelogMarker]]:
    return [
        (store, marker)
        for of_store in markers.values()
        for store, marker in of_store.items()
        if isinstance(marker, ChangelogMarker)
    ]


def _topic(marker: ChangelogMarker) -> tuple[str, str | None]:
    return marker.topic, marker.topic_id
