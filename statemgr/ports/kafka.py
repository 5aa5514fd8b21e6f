"""The ports of Kafka: the checkpoint topic, publishing, changelogs. No I/O here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from statemgr.model.checkpoint import CheckpointRecord
from statemgr.model.commit import Change


class CheckpointLog(Protocol):
    """The checkpoint topic, for reading."""

    def read(self, tasks: Collection[str] | None = None) -> Mapping[str, CheckpointRecord]:
        """The newest record of every task of the job (of ``tasks``) in the newest layout generation.

        Reads to the high watermark captured first, waiting for the last stable offset to pass it.
        Raises: CorruptRecord, UnavailableError (deadline), MissingState (the topic is gone or truncated).
        """

    def was_truncated(self) -> bool:
        """True when records before the first offset were removed from the topic."""


class Transaction(Protocol):
    """An open Kafka transaction. Sends only queue; :meth:`flush` waits until the broker has taken them."""

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None: ...

    def send_changes(self, topic: str, partition: int, changes: Iterable[Change]) -> None:
        """Queue many records for one partition, with back-pressure; None as value is a tombstone."""

    def flush(self) -> Mapping[tuple[str, int], int]:
        """Wait for all deliveries. Returns, per topic and partition sent to, the offset after the last record.

        Raises: FencedError, RetryableError (the transaction must be given up).
        """


class Publisher(Protocol):
    """A transactional producer of one ``transactional.id``."""

    def fence(self) -> None:
        """Take the ID over: older owners are fenced, a pending transaction is settled. Raises: UnavailableError."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """One transaction: committed when the block ends, aborted when it raises.

        Raises: FencedError; RetryableError (surely not published); OutcomeUnknownError (call :meth:`settle`).
        """

    def settle(self) -> bool:
        """Bring a transaction whose outcome is unknown to an end, so that the topic can be read for it, and replace a
        producer that is beyond use. Asks nobody when there is neither.

        Returns: whether the ID had to be taken over once more, so that the other kind of owner must be fenced again.

        Raises: FencedError when another owner has taken over; UnavailableError when it cannot be settled yet.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the broker describes it."""

    name: str
    topic_id: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


class ChangelogRecord(NamedTuple):
    """One record of a changelog: raw bytes, its offset and timestamp (epoch milliseconds). Made by the million."""

    key: bytes
    value: bytes | None
    offset: int
    timestamp_ms: int


class ChangelogBatch(NamedTuple):
    """Changes read from a changelog, in order: bytes of their keys and values, and the offset after the last one."""

    changes: Sequence[Change]
    size: int
    end: int


class Changelog(Protocol):
    """Changelog topics, for reading. Positions are offsets; control records and compaction leave gaps."""

    def describe(self, topic: str) -> TopicInfo:
        """Raises: MissingState when the topic does not exist."""

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """First offset and high watermark (queried with read_uncommitted)."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Sequence[ChangelogRecord]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches, until the position reaches ``end``.

        Raises: UnavailableError (deadline), MissingState (``start`` is below the low watermark, or ``end`` beyond
        the high watermark), CorruptRecord (a null key).
        """

    def changes(self, topic: str, partition: int, start: int, end: int) -> Iterator[ChangelogBatch]:
        """The same as :meth:`read`, for replays of millions of records: keys and values only. Raises: as that."""
