"""What an adoption looks for, and what it finds of a job that other software ran. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from statemgr.ids import source_topic
from statemgr.model.commit import Change
from statemgr.operations.adopt.copying import Counts
from statemgr.operations.adopt.old_topics import Bounds
from statemgr.operations.adopt.origins import PLAIN, CheckpointingOrigin, Decoder, Kind, Origin, expiring
from statemgr.ports import TopicInfo


@dataclass(frozen=True)
class Request:
    """What to look for.

    Attributes:
        job: the name of the old job, which is that of its consumer group; None if everything is given.
        changelogs: store → topic; empty: find them by the old job's name.
        offsets: source partition → next offset; they replace those of the group.
        inputs: the input topics; empty: those that the group and ``offsets`` have.
        tasks: how many partitions each topic must have; None: as many as the first changelog.
        settle_s: how long ends and offsets must stand still, in seconds.
        snapshots: whether to adopt the snapshots of stores that have one, and not their changelogs.
        confirmed: stores and input topics whose state the user has confirmed, where it cannot be proved → the kind of
            the store; without one, it is plain if that is possible.
        ttls: store → the time to live that the new job gives its entries, in milliseconds.
        checkpoint_topic: where the old job keeps its checkpoints; None: where its origin does by default.
    """

    origin: Origin
    job: str | None
    changelogs: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    inputs: Sequence[str] = ()
    tasks: int | None = None
    settle_s: float = 5.0
    checkpoint_topic: str | None = None
    snapshots: bool = False
    confirmed: Mapping[str, str | None] = field(default_factory=dict)
    ttls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OldPartition:
    """The partition of an old changelog that has a task's changes.

    Attributes:
        number: the partition of the old changelog.
        bounds: its bounds. ``end``: the offset after the last record that is adopted.
        is_exact: whether the state at ``end`` is exactly that of the adopted input offsets.
        until_ms: until when compaction certainly keeps the values before ``end``, although there are newer ones, in
            epoch milliseconds; None: there are none.
    """

    number: int
    bounds: Bounds
    end: int
    is_exact: bool = False
    until_ms: int | None = field(default=None, compare=False)

    @property
    def has_tail(self) -> bool:
        """Whether records after ``end`` are left out."""
        return self.end < self.bounds.end


@dataclass(frozen=True)
class Proof:
    """What a store is taken for.

    Attributes:
        why: the end of a sentence about its changelog.
        samples: a few of its changes, as the new store has them.
        newest_ms: by task, the newest time of an entry, which is the old job's time; None without entries, or if
            the records do not show the kind: then they expire by the clock.
        retention_ms: how long the changelog keeps entries; None: for ever.
    """

    kind: Kind
    why: str = ""
    samples: tuple[Change, ...] = ()
    newest_ms: tuple[int | None, ...] = ()
    retention_ms: int | None = None


@dataclass(frozen=True)
class OldStore:
    """A store of the old job: its changelog, by task the partition and, if counted, its content; and a few changes."""

    name: str
    topic: TopicInfo
    partitions: tuple[OldPartition, ...]
    counts: tuple[Counts, ...] = ()
    proof: Proof = field(default=Proof(PLAIN), compare=False)


@dataclass(frozen=True)
class OldInput:
    """One partition of an input topic: the next offset, the end of the partition, and whether the user gave the
    offset."""

    source: str
    offset: int
    end: int = field(compare=False)  # others may write to the input
    given: bool = False

    @property
    def behind(self) -> int:
        """Number of offsets from the next one to the end, which an open transaction may hold back before it."""
        return max(0, self.end - self.offset)


@dataclass(frozen=True)
class OldJob:
    """What was found.

    Attributes:
        inputs: of each partition that has an offset; the others have no records.
        all_offsets: also of topics that the new job does not read.
        topic_ids: input topic → its ID in Kafka.
        notes: what else the user should know.
        snapshots: store → the index blob of each task's snapshot, for stores that have no entry in ``stores``.
        old_names: store → its name in the old job, if that is another one.
        ttls: as in the request.
        producers: how those of the input choose a partition, if the keys show it.
        seen_ms: when the old job was looked at, in epoch milliseconds.
    """

    origin: Origin
    job: str | None
    tasks: int
    stores: Mapping[str, OldStore]
    inputs: Mapping[str, OldInput]
    topic_ids: Mapping[str, str]
    all_offsets: Mapping[str, int]
    notes: tuple[str, ...] = field(default=(), compare=False)
    snapshots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)
    ttls: Mapping[str, int] = field(default_factory=dict)
    seen_ms: int = field(default=0, compare=False)
    producers: str | None = field(default=None, compare=False)

    @property
    def names(self) -> list[str]:
        """All stores."""
        return sorted({*self.stores, *self.snapshots})

    @property
    def has_checkpoints(self) -> bool:
        """Whether the old job keeps checkpoints that say where its changes end."""
        return isinstance(self.origin, CheckpointingOrigin)

    @property
    def input_topics(self) -> list[str]:
        """In the order of their names."""
        return sorted(self.topic_ids)

    @property
    def behind(self) -> int:
        """Input records that follow the adopted offsets, at most: the marks of transactions count, too."""
        return sum(one.behind for one in self.inputs.values())

    def behind_in(self, task: int) -> int:
        """The same in one task."""
        return sum(one.behind for source, one in self.inputs.items() if _partition(source) == task)

    @property
    def doubled_at_most(self) -> int:
        """Input records that the new job processes although the adopted state may have their effects already.

        0 for an exactly-once job: its changelogs end with committed transactions, which counting the records shows.
        0 also if checkpoints say where the changelogs end, or each record says from which input it was made.
        """
        exact = all(partition.is_exact for store in self.stores.values() for partition in store.partitions)
        if self.origin.leaves_out_uncommitted:
            return self.behind if any(one.unproved for store in self.stores.values() for one in store.counts) else 0
        if exact:
            return 0
        if not all(store.counts for store in self.stores.values()):
            return self.behind
        transactional = (
            counts.transactional
            for store in self.stores.values()
            for partition, counts in zip(store.partitions, store.counts, strict=True)
            if partition.bounds.start < partition.bounds.end and not partition.is_exact
        )
        return 0 if all(transactional) else self.behind

    def offsets(self, task: int) -> dict[str, int]:
        """The input offsets of one task."""
        return {s: one.offset for s, one in self.inputs.items() if _partition(s) == task}

    def committed(self, task: int) -> dict[str, int]:
        """Topic → next offset in the partition of one task, for every topic that the old job has read."""
        of_task = ((source, offset) for source, offset in self.all_offsets.items() if _partition(source) == task)
        return {str(source_topic(source)): offset for source, offset in of_task}

    def decoder(self, store: OldStore, task: int) -> Decoder | None:
        """What turns the records of a task's changelog into changes of its new store; None if they are plain.

        Windows and sessions expire by the old job's time, which is that of the newest one: it may be behind the clock.
        So a window expires when its time to live has passed since its time, and in addition as much time as the old job
        was behind. Each one that is live for the old job is live for the new one.
        """
        kind, ttl_ms = store.proof.kind, self.ttls.get(store.name)
        if ttl_ms is not None and kind.with_expiry is not None:
            return kind.with_expiry(self.committed(task))
        decoder = kind.decoding(self.committed(task))
        if decoder is None or kind.time_ms is None or ttl_ms is None:
            return decoder
        newest_ms = store.proof.newest_ms[task]
        behind_ms = 0 if newest_ms is None else max(self.seen_ms - newest_ms, 0)
        return expiring(decoder, kind.time_ms, life_ms=ttl_ms + behind_ms, now_ms=self.seen_ms)


def _partition(source: str) -> int:
    return int(source.rpartition("-")[2])
