"""The ports of Kafka: the checkpoint topic, publishing, changelogs. No I/O here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from statemgr.errors import RetryableError
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.model.commit import Change
from statemgr.model.permissions import Permit


class CheckpointLog(Protocol):
    """The checkpoint topic, for reading."""

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False
    ) -> Mapping[str, CheckpointRecord]:
        """The newest record of every task of the job (of ``tasks``) in the newest layout generation.

        Reads to the high watermark captured first, waiting for the last stable offset to pass it; where
        ``only_settled``, to the last stable offset, waiting for nobody.
        Raises: CorruptRecord, UnavailableError (deadline), MissingState (the topic is gone or truncated).
        """

    def permits(self) -> Sequence[Permit]:
        """The one-shot permissions that wait for an opening of the job's tasks, as of the last read."""

    def job_records(self) -> Collection[int]:
        """The sequence numbers of all job records in the newest layout, as of the last read."""

    def begin_check(self) -> Callable[[int], None]:
        """Begin to ask whether the topic is still the one that was read.

        Returns: what is called before a transaction is committed, with the offset after its last record on the topic.
            Raises: MissingState when the topic was deleted, or deleted and created again.
        """

    def was_truncated(self) -> bool:
        """True when records before the first offset were removed from the topic."""


class Delivered(NamedTuple):
    """Where the records of a transaction lie in a partition: the first one's offset, the offset after the last one, and
    how many they are."""

    start: int
    end: int
    records: int


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

    def flush(self) -> Mapping[tuple[str, int], Delivered]:
        """Wait for all deliveries. Returns, per topic and partition sent to, where the records lie.

        Raises: FencedError, RetryableError (the transaction must be given up).
        """


class IdForgotten(RetryableError):
    """The brokers had forgotten the transactional ID, since nobody used it for long. Nothing was published."""


class Publisher(Protocol):
    """A transactional producer of one ``transactional.id``."""

    def fence(self) -> None:
        """Take the ID over: older owners are fenced, a pending transaction is settled.

        Raises: FencedError, UnavailableError.
        """

    def transaction(self) -> AbstractContextManager[Transaction]:
        """One transaction: committed when the block ends, aborted when it raises.

        Raises: FencedError; RetryableError (surely not published), of which IdForgotten may be tried again at once;
            OutcomeUnknownError (call :meth:`settle`).
        """

    def settle(self) -> None:
        """Bring what is open to an end: ask again about a commit that was not answered, and abort what failed.

        Takes nothing over from anybody. Asks nobody when nothing is open.
        Raises: FencedError when another owner has taken over; UnavailableError when it cannot be settled yet.
        """

    @property
    def regained(self) -> bool:
        """Whether the ID was initialised again since :meth:`confirmed`, or has to be.

        Then another owner may have held it in between, and the topic must be compared with what this one knows.
        """

    def regain(self) -> None:
        """Initialise the ID again where the producer is beyond use. Raises: as :meth:`fence`."""

    def confirmed(self) -> None:
        """The ID is this owner's, the other kind of owner is fenced, and the topic says what this owner knows."""

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

    def time_ms(self) -> int:
        """The broker's time (epoch milliseconds), never earlier than it is: what the cleaner goes by."""
