"""Checkpoints, as the records on the checkpoint topic describe them. Pure.

Compaction keeps only the newest record of a key, so each retained checkpoint has a record with its own key. The design
follows Samza's CheckpointV2 (SEP for SAMZA-2657) and adds the layout, the sequence number, the list of all stores and
the outbox of a micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from statemgr.config.store import expires
from statemgr.config.units import DAY_MS, HOUR_MS
from statemgr.errors import InvalidError
from statemgr.ids import OTHER_SOURCE, CheckpointId

#: Checkpoints that a task may keep beyond its retention: each has a record of its own.
MOST_KEPT = 32
#: The most characters of a machine's name in a checkpoint.
MOST_HOST = 64
#: Ends the version of an owner if a command has published the checkpoint.
_COMMAND = " (command)"
#: Changelogs that a store no longer writes and that its checkpoints still list: the newest.
_MOST_RETIRED = 8


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where bytes are, and how to recognise them.

    ``blob_id`` is the blob's name relative to the blob store's root, ``size`` is in bytes, ``hash`` is XXH3-128 (16
    bytes). ``offset`` is where the bytes begin in a blob that holds others, too. None means that they are the whole
    blob.
    """

    blob_id: str
    size: int
    hash: bytes
    offset: int | None = None

    def size_problem(self, stored: int, size: int) -> str | None:
        """Why a blob of ``size`` bytes cannot hold these, which take ``stored`` bytes in it; None if it can."""
        if self.offset is None and size != stored:
            return f"the blob has {size} bytes, but {stored} were written"
        if self.offset is not None and size < self.offset + stored:
            return f"the blob ends at byte {size}, but its part ends at byte {self.offset + stored}"
        return None


@dataclass(frozen=True, slots=True)
class ChangelogMarker:
    """Marker of ``kafka-changelog``: the offset after the last record that belongs to the checkpoint.

    ``topic_id`` is Kafka's UUID of the topic as text; None when older software (version 1) wrote the marker. ``start``
    is where the last fill began, which wrote the whole state: no record before it is needed. ``newest_ms`` is the
    timestamp (epoch milliseconds) of the newest record below ``offset``, by which it is recognised: if the topic loses
    its newest records, others may take their offsets. None if nobody noted it. ``newest_deletes``: it is a delete,
    which compaction removes after a while.
    """

    topic: str
    topic_id: str | None
    partition: int
    offset: int
    start: int = 0
    newest_ms: int | None = None
    newest_deletes: bool = False


@dataclass(frozen=True, slots=True)
class BlobMarker:
    """Marker of ``blob-store``: the encoded segment chain, either in a blob or ``inline``.

    The chain names a snapshot's index and the segments after it, and is all that a restore needs to know.
    """

    blob: BlobRef | None = None
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class OpaqueMarker:
    """Marker of a backend that is not part of statemgr, in the backend's own format."""

    data: bytes


Marker = BlobMarker | ChangelogMarker | OpaqueMarker
#: factory name → store → marker
Markers = Mapping[str, Mapping[str, Marker]]


#: Names of attachments with output rows.
_OUTPUT = re.compile(r"output-(unsent-)?\d+\Z")
#: Name of an attachment of a checkpoint that repeats another one: the sequence number of the publish that it repeats.
SEQUENCE = "sequence"
#: The sequence number of a job's first publish. For an adopted job, that is the adoption.
FIRST = 1


@dataclass(frozen=True, slots=True)
class Attachment:
    """Bytes that are published with a checkpoint, such as a micro-batch's output rows: either inline or in a blob."""

    name: str
    inline: bytes | None = None
    blob: BlobRef | None = None

    @property
    def is_output(self) -> bool:
        """Whether it is a part of a micro-batch's output. Nobody needs that any more once it was delivered."""
        return _OUTPUT.match(self.name) is not None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Identifies a Spark micro-batch by its query, its number and its source offsets (Spark's JSON, normalised).

    ``watermark_ms`` is the watermark that it ran with, in epoch milliseconds. None means that the query has none.
    """

    query_id: str
    batch_id: int
    start_offsets: str
    end_offsets: str
    watermark_ms: int | None = None

    @property
    def has_other_sources(self) -> bool:
        """Whether the query reads a source other than Kafka, which only the location of its last batch can continue."""
        return f'"{OTHER_SOURCE}' in self.end_offsets


@dataclass(frozen=True, slots=True)
class OutstandingTtl:
    """A published blob that still has a TTL because removing it failed, and since when (epoch milliseconds)."""

    blob_id: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How keys are spread over tasks. Every checkpoint has it, and a rescale is a change of it."""

    generation: int
    tasks: int
    partitioner: str


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that published a checkpoint: its machine, its process ID there, and its version of statemgr, with
    :data:`_COMMAND` if it ran a command."""

    host: str
    process: int
    version: str

    def of_command(self) -> Owner:
        """The same process, which ends after it has published."""
        return replace(self, version=f"{self.version[: MOST_HOST - len(_COMMAND)]}{_COMMAND}")

    @property
    def label(self) -> str:
        """For people, with its version."""
        return f"{self} (v{self.version.removesuffix(_COMMAND)})"

    def __str__(self) -> str:
        ended = ", a command that has ended" if self.version.endswith(_COMMAND) else ""
        return f"{self.host}, process {self.process}{ended}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One published state of one task.

    Attributes:
        sequence: counts publishes, and is never used twice.
        input_offsets: source partition (``orders-0``) → next offset to read.
        stores: every store of the job → its state ID, which is unique for the attempt that made the content.
        state_checkpoint_markers: factory → store → marker.
        published_ms: when it was first published, by the broker's clock (epoch milliseconds). None if the topic does
            not say. Its record has it only if another layout published it first.
        input_topic_ids: input topic → its ID in Kafka, as text.
        serdes: store → its key serde and its value serde, each with its version.
        retired_changelogs: store → the last markers of changelogs that it no longer writes, newest first.
        kept: IDs of older checkpoints that retention never drops. Only the list of the newest checkpoint counts.
        owner: the process that published it. None if its configuration withholds it.
        offset: where its record was read on the checkpoint topic. None before it is published.
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
    published_ms: int | None = field(default=None, compare=False)
    input_topic_ids: Mapping[str, str] = field(default_factory=dict)
    serdes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    retired_changelogs: Mapping[str, tuple[ChangelogMarker, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    owner: Owner | None = None
    offset: int | None = field(default=None, compare=False)

    @property
    def output_sequence(self) -> int:
        """The sequence number of the publish that this one repeats; its own if it repeats none.

        A repeated checkpoint says so if it has output, or if it repeats the first publish of the job.
        """
        noted = next((a.inline for a in self.attachments if a.name == SEQUENCE and a.inline), None)
        return int(noted) if noted is not None else self.sequence

    @property
    def names_blobs(self) -> bool:
        """Whether the state of a store is in the blob store."""
        return any(isinstance(one, BlobMarker) for of in self.state_checkpoint_markers.values() for one in of.values())

    def marker(self, factory: str, store: str) -> Marker | None:
        """A backend's marker for a store. None if it has none."""
        return self.state_checkpoint_markers.get(factory, {}).get(store)

    def has_ttl(self, store: str) -> bool:
        """Whether the stored values begin with their expiry (:mod:`statemgr.model.expiry`)."""
        return store in self.serdes and expires(self.serdes[store][1])


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """Key of a record on the checkpoint topic.

    In version 2, each checkpoint has a record, its key has the ``sequence``, and ``task`` is empty for a job record. In
    version 1, each task has one record, and its key has no sequence.
    """

    job_name: str
    job_id: str
    layout_generation: int
    task: str
    record_version: int
    sequence: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints of a task stay: the rules of ``restic forget``.

    Args:
        newest: the newest ones, so many.
        hourly: the last one of each hour, of so many hours. Hours without a checkpoint do not count.
        daily: the last one of each day (UTC), of so many days.
    """

    newest: int
    hourly: int = 0
    daily: int = 0

    def stay(self, times_ms: Sequence[int]) -> set[int]:
        """The positions of those that stay among checkpoints of these times (since the epoch), newest first."""
        stay = set(range(min(self.newest, len(times_ms))))
        for count, length_ms in ((self.hourly, HOUR_MS), (self.daily, DAY_MS)):
            last: dict[int, int] = {}  # an hour or a day → the position of its last checkpoint
            for position, time_ms in enumerate(times_ms):
                last.setdefault(time_ms // length_ms, position)
            stay.update([*last.values()][:count])
        return stay


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A task's layout and its retained checkpoints, newest first. There is at least one.

    ``offset`` is where the newest record was read, None before it is published. ``from_version_one``: the topic has the
    current checkpoint as a version 1 record only.
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
        """The newest checkpoint, which is the current one."""
        return self.checkpoints[0]

    @property
    def kept(self) -> tuple[str, ...]:
        """IDs of its checkpoints that retention never drops, newest first."""
        ids = (str(checkpoint.checkpoint_id) for checkpoint in self.checkpoints)
        return tuple(one for one in ids if one in self.current.kept)

    def with_kept(self, checkpoint_id: str, *, is_kept: bool) -> tuple[str, ...]:
        """``kept`` with one of its checkpoints, or without it. Raises: InvalidError if these are too many."""
        wanted = {*self.kept, checkpoint_id} if is_kept else {*self.kept} - {checkpoint_id}
        kept = tuple(one for one in (str(checkpoint.checkpoint_id) for checkpoint in self.checkpoints) if one in wanted)
        if len(kept) > MOST_KEPT:
            raise InvalidError(
                f"{self.task} would keep {len(kept)} checkpoints, and the limit is {MOST_KEPT}",
                hint="release one with `statemgr checkpoints tag --drop`",
                task=self.task,
            )
        return kept

    def find(self, checkpoint_id: str | None) -> Checkpoint | None:
        """The retained checkpoint of this ID, or the current one if it is None."""
        if checkpoint_id is None:
            return self.current
        return next((one for one in self.checkpoints if str(one.checkpoint_id) == checkpoint_id), None)

    def key(self, checkpoint: Checkpoint) -> CheckpointKey:
        """The key under which one of its checkpoints is published."""
        generation = self.layout.generation
        return CheckpointKey(self.job_name, self.job_id, generation, self.task, 2, checkpoint.sequence)

    def key_v1(self) -> CheckpointKey:
        """The key of the version 1 record of the current checkpoint."""
        return CheckpointKey(self.job_name, self.job_id, self.layout.generation, self.task, 1)

    def followed_by(self, checkpoint: Checkpoint, retention: Retention | None = None) -> CheckpointRecord:
        """The record after ``checkpoint`` was published, with the checkpoints that stay; None: all stay.

        Only the newest lists outstanding TTLs, and it lists all of them.
        """
        older = self.checkpoints
        if retention is not None:
            stay = retention.stay([c.checkpoint_id.millis for c in (checkpoint, *older)])
            older = tuple(c for n, c in enumerate(older, 1) if n in stay or str(c.checkpoint_id) in checkpoint.kept)
        return replace(
            self,
            checkpoints=(checkpoint, *without_outstanding(older)),
            offset=None,
            from_version_one=False,
        )


def without_outstanding(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The checkpoints without outstanding TTLs, which only the newest lists."""
    return tuple(replace(c, outstanding_ttl=()) if c.outstanding_ttl else c for c in checkpoints)


def with_version_one(newest: CheckpointRecord | None, version_one: CheckpointRecord | None) -> CheckpointRecord | None:
    """The current record of a task, of which both versions were read: the record with the highest offset wins.

    If older software has published since, its version 1 record becomes the current checkpoint. It has only changelog
    markers and gets the next sequence number. The older checkpoints stay retained.
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
    # a store that only blobs have stays listed: its state is missing, so it is no new store
    stores = {**before.stores, **version_one.current.stores}
    current = replace(
        version_one.current, sequence=before.sequence + 1, epoch=before.epoch, stores=stores, kept=before.kept
    )
    record = newest.followed_by(current)
    return replace(record, offset=version_one.offset, from_version_one=True)


def retired_changelogs(before: Checkpoint | None, now: Markers) -> Mapping[str, tuple[ChangelogMarker, ...]]:
    """Store → the last marker of each changelog topic that the store no longer writes, newest first.

    They show which records of such a topic are the job's own, if the store uses the topic again.

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
