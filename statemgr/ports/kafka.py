"""The ports of Kafka: the checkpoint topic, publishing, changelogs. No I/O here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from statemgr.errors import RetryableError, UnavailableError
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.model.commit import Change
from statemgr.model.jobs.adopted_job import AdoptedJob
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.model.jobs.permissions import Permit


class CheckpointLog(Protocol):
    """Reads the checkpoint topic."""

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False, generation: int | None = None
    ) -> Mapping[str, CheckpointRecord]:
        """The newest record of each of ``tasks`` (default: all tasks of the job) in a layout ``generation`` (default:
        the newest). Empty if an older layout is not a replaced one any more.

        Asks for the high watermark first, and reads up to it. It waits until the last stable offset has passed it.
        With ``only_settled`` it reads to the last stable offset and does not wait.
        Raises: CorruptRecord, UnavailableError (deadline), MissingState (the topic is gone or truncated).
        """

    def current(self) -> Mapping[str, CheckpointRecord]:
        """The newest record of each task of the job, with its current checkpoint only, as of the last read. Raises:
        CorruptRecord, MissingState."""

    def permits(self) -> Sequence[Permit]:
        """The one-shot permissions that wait for an opening of the job's tasks, as of the last read."""

    def offers(self) -> Mapping[OfferKey, Offer]:
        """The offers of first snapshots, also expired ones and those of older layouts, as of the last read."""

    def retired(self) -> Sequence[RetiredLayout]:
        """The layouts that a rescale has replaced and whose records are still there, oldest first, as of the last
        read."""

    def adopted(self) -> AdoptedJob | None:
        """The job of other software that this job was adopted from, as of the last read."""

    def record_keys(self, generation: int) -> Sequence[bytes]:
        """The keys of all records of a layout generation but those of version 1, as of the last read."""

    def job_records(self) -> Collection[int]:
        """The sequence numbers of all job records in the newest layout, as of the last read."""

    def begin_check(self) -> Callable[[int], None]:
        """Start to check whether the topic is still the one that was read.

        Returns: a function to call before a transaction is committed, with the offset after its last record on the
            topic. It raises MissingState if the topic was deleted, or deleted and created again.
        """

    def ends_at(self, end: int) -> bool:
        """Whether nothing was written after a committed transaction of the caller. It costs two requests, and reads no
        record.

        Args:
            end: the offset after the transaction's last record on the topic.

        Raises: UnavailableError, AccessDenied, MissingState (the topic was deleted, or deleted and created again).
        """

    def was_truncated(self) -> bool:
        """Whether records at the beginning of the topic were removed."""


class Delivered(NamedTuple):
    """The records of a transaction in a partition: the offset of the first, the offset after the last, and their
    number; the timestamp of the last one (epoch milliseconds), and whether it is a delete."""

    start: int
    end: int
    records: int
    newest_ms: int
    newest_deletes: bool


class Transaction(Protocol):
    """An open Kafka transaction. Sends only queue records; :meth:`flush` waits until the broker has them."""

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None: ...

    def send_changes(self, topic: str, partition: int, changes: Iterable[Change]) -> None:
        """Queue many records for one partition, with back-pressure. None as a value is a tombstone."""

    def flush(self) -> Mapping[tuple[str, int], Delivered]:
        """Wait for all deliveries. Returns: topic and partition → where the records are.

        Raises: FencedError, RetryableError (the transaction must be aborted).
        """


class IdForgotten(RetryableError):
    """The brokers had forgotten the transactional ID, because nobody used it for a long time. Nothing was published."""


class TransactionOpen(UnavailableError):
    """A transaction is open where an aborted one has written records, and the next one would commit these if it is the
    same. It may belong to other software, and take as long as that takes. Nothing was published."""


class Publisher(Protocol):
    """A transactional producer of one ``transactional.id``."""

    def fence(self) -> None:
        """Take over the ID: fence older owners, and settle a pending transaction.

        Raises: FencedError, UnavailableError.
        """

    def transaction(self) -> AbstractContextManager[Transaction]:
        """A transaction that is committed when the block ends, and aborted if it raises.

        Raises: FencedError; RetryableError (nothing was published; after IdForgotten the caller may try again at
            once); OutcomeUnknownError (call :meth:`settle`).
        """

    def settle(self) -> None:
        """End an open transaction: find out the outcome of a commit whose acknowledgement was lost, and abort a
        transaction that failed.

        It fences nobody, and sends nothing if nothing is open.
        Raises: FencedError if another owner has taken over; UnavailableError if it cannot be settled yet.
        """

    @property
    def regained(self) -> bool:
        """Whether the ID was initialised again since :meth:`confirmed`, or has to be.

        Another owner may have had it in between, so the topic must be compared with what this owner knows.
        """

    def regain(self) -> None:
        """Initialise the ID again if the producer can no longer be used. Raises: as :meth:`fence`."""

    def confirmed(self) -> None:
        """Call this after the other kind of owner was fenced, and the topic was found to have no newer publish."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the broker describes it."""

    name: str
    topic_id: str
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)


class TopicBounds(NamedTuple):
    """A topic's ID and number of partitions, and partition → its first offset and high watermark. A partition without a
    leader is left out of ``bounds``."""

    topic_id: str
    partitions: int
    bounds: Mapping[int, tuple[int, int]]


class ChangelogRecord(NamedTuple):
    """One record of a changelog: raw bytes, offset and timestamp (epoch milliseconds). Replays make millions."""

    key: bytes
    value: bytes | None
    offset: int
    timestamp_ms: int


class ChangelogBatch(NamedTuple):
    """Changes from a changelog in order, the bytes of their keys and values, and the offset after the last one."""

    changes: Sequence[Change]
    size: int
    end: int


class Changelog(Protocol):
    """Reads changelog topics. Positions are offsets. Control records and compaction leave gaps."""

    def describe(self, topic: str) -> TopicInfo:
        """Raises: MissingState when the topic does not exist."""

    def survey(self, topics: Collection[str], only: Collection[int] | None = None) -> Mapping[str, TopicBounds]:
        """Those of the topics that exist, with the bounds of all their partitions or of ``only`` these, in three
        requests."""

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The first offset and the high watermark (queried with read_uncommitted)."""

    def settled_end(self, topic: str, partition: int) -> int:
        """The offset before which no transaction is open. Raises: MissingState if there is no such topic."""

    def read(
        self, topic: str, partition: int, start: int, end: int, *, checked: bool = False
    ) -> Iterator[Sequence[ChangelogRecord]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches, until the position reaches ``end``.

        ``checked``: the caller has just asked for the bounds, and both offsets are within them.

        Raises: UnavailableError (deadline), MissingState (``start`` is below the low watermark, or ``end`` beyond
        the high watermark), CorruptRecord (a null key).
        """

    def changes(
        self, topic: str, partition: int, start: int, end: int, *, checked: bool = False
    ) -> Iterator[ChangelogBatch]:
        """Like :meth:`read`, but keys and values only, for replays of millions of records. Raises: as :meth:`read`."""

    def time_ms(self) -> int:
        """The broker's time (epoch milliseconds), or a little later. Compaction uses this clock."""
