"""One partition of a broker in memory: its records by offset, where it begins, and which transactions are open in it.

An offset whose record was deleted or compacted away holds None, so the index of an entry is always its offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException

Header = tuple[str, bytes | None]


@dataclass(slots=True)
class Entry:
    """A record, or the marker that ends a transaction.

    Attributes:
        timestamp: its type and epoch milliseconds, as ``Message.timestamp()`` returns them.
        owner: the transaction that wrote it; None if none did.
        horizon_ms: from when on a compaction may remove a tombstone or a marker; None before the first compaction.
    """

    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    timestamp: tuple[int, int]
    owner: Txn | None = None
    is_marker: bool = False
    horizon_ms: int | None = None

    @property
    def is_visible(self) -> bool:
        """Whether a reader of committed records gets it."""
        return not self.is_marker and (self.owner is None or self.owner.committed)


@dataclass(slots=True, eq=False)
class Txn:
    """A transaction, from its first partition on.

    Attributes:
        began_ms: when that was, by the broker's clock.
        places: the topics and partitions that get a marker when it ends.
    """

    began_ms: int
    places: set[tuple[str, int]] = field(default_factory=set)
    committed: bool = False


@dataclass(slots=True)
class Log:
    """A partition.

    Attributes:
        entries: index → the record at this offset, or None.
        start: the first offset that a consumer may ask for.
        open: transactions that are open here → the offset of their first record.
        leader_epoch: how often another broker has become the leader.
    """

    entries: list[Entry | None] = field(default_factory=list)
    start: int = 0
    open: dict[Txn, int] = field(default_factory=dict)
    leader_epoch: int = 0

    def end(self, *, only_settled: bool) -> int:
        """The offset after the last record; with ``only_settled`` not beyond the first record of an open transaction,
        which is the last stable offset."""
        end = len(self.entries)
        return max(self.start, min([end, *self.open.values()])) if only_settled else end

    def records(self, end: int) -> Iterator[tuple[int, Entry]]:
        """Offsets and entries below ``end``, markers included."""
        for offset in range(self.start, end):
            entry = self.entries[offset]
            if entry is not None:
                yield offset, entry

    def append(self, entry: Entry) -> int:
        """Returns: its offset."""
        self.entries.append(entry)
        offset = len(self.entries) - 1
        if entry.owner is not None and not entry.is_marker:
            self.open.setdefault(entry.owner, offset)
        elif entry.owner is not None:
            self.open.pop(entry.owner, None)
        return offset

    def lose_from(self, offset: int) -> None:
        """Lose the records from an offset on: a broker that lacks them becomes the leader."""
        del self.entries[offset:]
        self.leader_epoch += 1

    def delete_before(self, offset: int) -> int:
        """Move the start up to ``offset``, or to the end with -1. Returns: the start. Raises: KafkaException."""
        end = len(self.entries)
        if not -1 <= offset <= end:
            raise failure(KafkaError.OFFSET_OUT_OF_RANGE, "Broker: Offset out of range")
        start = max(self.start, end if offset == -1 else offset)
        self.entries[self.start : start] = [None] * (start - self.start)
        self.start = start
        return start

    def first_since(self, at_ms: int, end: int) -> tuple[int, int]:
        """Offset and timestamp of the first entry below ``end`` that is not older than ``at_ms``; -1 without one."""
        for offset, entry in self.records(end):
            if entry.timestamp[1] >= at_ms:
                return offset, entry.timestamp[1]
        return -1, -1

    def compact(self, now_ms: int, settings: Mapping[str, str]) -> None:
        """Compact as the log cleaner does (``Cleaner.java`` of Kafka, and KIP-534 for the horizons).

        It keeps the newest record of each key below the last stable offset, and what is younger than
        ``min.compaction.lag.ms``. Records of aborted transactions are removed. Tombstones, and markers whose
        transactions have no record left, are removed when ``delete.retention.ms`` has passed since the first compaction
        that has seen them.
        """
        lag_ms, retention_ms = int(settings["min.compaction.lag.ms"]), int(settings["delete.retention.ms"])
        end = self.end(only_settled=True)
        if lag_ms:
            young = self.first_since(now_ms - lag_ms + 1, end)[0]
            end = end if young < 0 else young
        newest = {entry.key: offset for offset, entry in self.records(end) if entry.is_visible}
        kept_by: set[Txn] = set()
        for offset, entry in list(self.records(end)):
            if entry.is_marker:
                ends = entry.owner not in kept_by
            else:
                ends = not entry.is_visible or newest[entry.key] != offset
                if ends:
                    self.entries[offset] = None
                    continue
                ends = entry.value is None
            if ends:
                entry.horizon_ms = entry.horizon_ms or now_ms + retention_ms
                if now_ms >= entry.horizon_ms:
                    self.entries[offset] = None
                    continue
            if entry.owner is not None:
                kept_by.add(entry.owner)


def failure(
    code: int, reason: str, *, fatal: bool = False, retriable: bool = False, requires_abort: bool = False
) -> KafkaException:
    """What the clients raise."""
    return KafkaException(KafkaError(code, reason, fatal, retriable, requires_abort))
