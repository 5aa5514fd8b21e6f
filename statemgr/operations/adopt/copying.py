"""Copies one partition of an old job's changelog to the new job's, with plain keys and values.

The copy is a series of transactions. The last record of each has a header with the next offset of the old changelog. An
interrupted copy continues from there. A last record without this header shows that somebody else writes to the topic.
Compaction may remove a delete from the old changelog some time after it was written (``delete.retention.ms``), while
the copy already has the value that it deletes. So a copy must take less time than that, from its first transaction to
its end.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from statemgr.backends.changelog.integrity import certain_ms
from statemgr.errors import FencedError, InvalidError, PermissionNeeded, StatemgrError
from statemgr.ids import task_name
from statemgr.local import ChangeWriter
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.model.commit import Change
from statemgr.operations.adopt.old_topics import Bounds, OldTopics
from statemgr.operations.adopt.origins import Decoder, OldRecord, Skip, Unproved
from statemgr.phases import Phase, announce
from statemgr.ports import Progress, Publisher, TopicInfo
from statemgr.services import Services

#: Key of the header that the last record of each transaction has.
HEADER = "statemgr-adopted"
#: Key of a header next to it, with the form of keys and values.
_FORM = "statemgr-adopted-as"
#: Records and bytes of one transaction.
_MOST_RECORDS = 100_000
_MOST_BYTES = 64 * 1024 * 1024
#: Offsets that are read first at the end of the new changelog to find its last record.
_LOOK_BACK = 100


@dataclass
class Counts:
    """What a partition of an old changelog has.

    Attributes:
        size: bytes of keys and values of the records that are changes.
        converted: records whose key or value is not plain.
        skipped: records that are no changes of the state.
        uncommitted: how many of these were made from input that the old job did not commit.
        expired: how many of the skipped records are entries that have expired.
        unproved: changes that may have been made from input that the old job did not commit.
        transactional: whether the partition ends with the mark of a transaction.
    """

    records: int = 0
    deletes: int = 0
    size: int = 0
    converted: int = 0
    skipped: int = 0
    uncommitted: int = 0
    expired: int = 0
    unproved: int = 0
    transactional: bool = False

    def take(self, batch: Sequence[OldRecord], decoder: Decoder | None) -> Iterator[tuple[int, Change]]:
        """Count a batch. Yields: the offset after each record that is a change, and the change."""
        for record in batch:
            self.records += 1
            made = record[:2] if decoder is None else decoder(record)
            if isinstance(made, Skip):
                self.skipped += 1
                self.uncommitted += made is Skip.UNCOMMITTED
                self.expired += made is Skip.EXPIRED
                continue
            key, value = made
            self.unproved += isinstance(made, Unproved)
            self.converted += made != record[:2]
            self.deletes += value is None
            self.size += len(key) + len(value or b"")
            yield record.offset + 1, (key, value)

    def take_all(self, batch: Sequence[OldRecord], decoder: Decoder, writer: ChangeWriter | None) -> int:
        """Count a batch, and write its changes. Returns: the offset after it."""
        found = [change for _, change in self.take(batch, decoder)]
        if writer is not None:
            writer.write(found)
        return batch[-1].offset + 1

    def take_plain(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], end: int, writer: ChangeWriter | None
    ) -> int:
        """Count a batch of plain changes up to ``end``, and write them. Returns: that offset."""
        if writer is not None:
            writer.write(zip(keys, values, strict=True))
        found = [*filter(None, values)]
        self.records += len(keys)
        self.deletes += values.count(None) if len(found) < len(values) else 0
        self.size += sum(map(len, keys)) + sum(map(len, found))
        return end


def changes(batch: Sequence[OldRecord], decoder: Decoder | None) -> Iterator[Change]:
    """The changes in a batch, which nobody counts."""
    return (change for _, change in Counts().take(batch, decoder))


@dataclass(frozen=True)
class Copied:
    """The marker of a store that was adopted, and what was counted on the way."""

    marker: ChangelogMarker
    counts: Counts


def count(
    old: OldTopics,
    store: str,
    topic: TopicInfo,
    partition: int,
    bounds: Bounds,
    decoder: Decoder | None,
    progress: Progress,
    writer: ChangeWriter | None = None,
) -> Counts:
    """Read a partition whole. ``writer``: takes all changes. Raises: InvalidError, CorruptRecord, UnavailableError."""
    counts, end = Counts(), bounds.start
    place = topic.name, partition, old.first(topic, partition, bounds.start), bounds.end
    if decoder is None:
        batches = (counts.take_plain(*batch, writer) for batch in old.changes(*place))
    else:
        batches = (counts.take_all(batch, decoder, writer) for batch in old.records(*place))
    with _place(store, topic, partition):
        for end in batches:
            progress(f"count {store} {partition}", end - bounds.start, bounds.end - bounds.start)
    counts.transactional = end < bounds.end
    return counts


class _place:  # noqa: N801 - it reads as a statement
    """Adds to an error which changelog it is about."""

    def __init__(self, store: str, topic: TopicInfo, partition: int) -> None:
        self._where = {"topic": topic.name, "partition": partition, "store": store}

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StatemgrError):
            error.with_where(**self._where)


@dataclass(frozen=True)
class _Progress:
    """How far a copy has come: the next offset of the old changelog, and when the copy began, by the broker's clock."""

    topic_id: str
    offset: int
    began_ms: int

    def header(self) -> tuple[str, bytes]:
        return HEADER, json.dumps([self.topic_id, self.offset, self.began_ms]).encode()


@dataclass(frozen=True)
class Copy:
    """One task's copy.

    Attributes:
        source, target: the old and the new changelog.
        partition: that of the new changelog; ``old_partition``: that of the old one.
        bounds: what to copy of the old one.
        form: what decides how the decoder changes keys and values.
        remembers: whether the decoder has to take the records from the first on.
    """

    services: Services
    old: OldTopics
    publisher: Publisher
    store: str
    source: TopicInfo
    target: TopicInfo
    partition: int
    old_partition: int
    bounds: Bounds
    decoder: Decoder | None
    form: str
    remembers: bool
    progress: Progress

    def has_begun(self) -> bool:
        """Whether an earlier run has copied records. Raises: PermissionNeeded, UnavailableError, AccessDenied."""
        return self._done() is not None

    def run(self, writer: ChangeWriter | None) -> Copied:
        """Copy, or continue a copy. ``writer``: takes all changes of a copy that has not begun.

        Raises: PermissionNeeded if the new changelog has records of others; InvalidError if a record cannot be adopted,
            or the copy took too long; RetryableError, OutcomeUnknownError, FencedError.
        """
        name = f"{self.store} {self.partition}"
        config = self.services.config
        announce(Phase.COPY, f"{task_name(self.partition)}/{self.store}", config.job_key)
        done = self._done()
        if writer is not None and done is not None:
            raise FencedError(
                "another run of the adoption has taken the job over, and copies",
                hint="wait until it has ended; then run it again to find out that the job is adopted",
                job=config.job_name,
                topic=self.target.name,
            )
        if done is None:
            done = _Progress(self.source.topic_id, self.bounds.start, self.services.changelog().time_ms())
        counts, total = Counts(), self.bounds.end - self.bounds.start
        for offset, changes in self._transactions(done.offset, counts):
            done = _Progress(done.topic_id, offset, done.began_ms)
            if writer is not None:
                writer.write(changes)
            self._send(changes, done)
            announce(Phase.COPIED, f"{task_name(self.partition)}/{self.store}", config.job_key)
            self.progress(f"copy {name}", offset - self.bounds.start, total)
        self._check_age(done)
        end = self.old.bounds(self.target.name, self.partition).end
        return Copied(ChangelogMarker(self.target.name, self.target.topic_id, self.partition, end), counts)

    def _transactions(self, start: int, counts: Counts) -> Iterator[tuple[int, list[Change]]]:
        """The changes of each transaction, and the offset of the old changelog after them."""
        changes: list[Change] = []
        size, offset, end = 0, start, start
        # Kafka may have deleted records since an earlier copy
        first = self.bounds.start if self.remembers else max(start, self.bounds.start)
        first = self.old.first(self.source, self.old_partition, first)
        for batch in self.old.records(self.source.name, self.old_partition, first, self.bounds.end):
            end = batch[-1].offset + 1
            with _place(self.store, self.source, self.old_partition):
                for after, change in counts.take(batch, self.decoder):
                    if after > start:
                        offset = after
                        changes.append(change)
                        size += len(change[0]) + len(change[1] or b"")
            if len(changes) >= _MOST_RECORDS or size >= _MOST_BYTES:
                yield offset, changes
                changes, size = [], 0
        counts.transactional = end < self.bounds.end
        if changes:
            yield offset, changes

    def _send(self, changes: list[Change], done: _Progress) -> None:
        *most, (key, value) = changes
        headers = [done.header(), (_FORM, self.form.encode())]
        with self.publisher.transaction() as transaction:
            transaction.send_changes(self.target.name, self.partition, most)
            transaction.send(self.target.name, key, value, partition=self.partition, headers=headers)

    def _done(self) -> _Progress | None:
        """How far an earlier copy has come; None if the new changelog has no records. Raises: PermissionNeeded."""
        bounds = self.old.bounds(self.target.name, self.partition)
        start, look_back = bounds.end, _LOOK_BACK
        while start > bounds.start:  # an aborted transaction may have left many offsets without a record
            start, look_back = max(bounds.start, start - look_back), 2 * look_back
            if last := deque(self.old.records(self.target.name, self.partition, start, bounds.end), 1):
                return self._progress_in(last[0][-1])
        return None

    def _progress_in(self, last: OldRecord) -> _Progress:
        headers = dict(last.headers)
        header, form = headers.get(HEADER), headers.get(_FORM, self.form.encode())
        if header is not None and form != self.form.encode():
            raise PermissionNeeded(
                f"an earlier run has begun the copy as {(form or b'').decode()}; this one would go on as {self.form}",
                hint="set what it had, or delete the new changelog and run it again",
                topic=self.target.name,
                partition=self.partition,
                store=self.store,
            )
        if header is not None:
            topic_id, offset, began_ms = json.loads(header)
            if topic_id == self.source.topic_id and offset <= self.bounds.end:
                return _Progress(topic_id, offset, began_ms)
        raise PermissionNeeded(
            "the new changelog has records that are no copy of the old one",
            hint=f"delete the topic if nobody needs it, or set stores.{self.store}.changelog.topic to another one",
            topic=self.target.name,
            partition=self.partition,
            store=self.store,
        )

    def _check_age(self, done: _Progress) -> None:
        """Raises: InvalidError if the old changelog may have lost deletes during the copy."""
        keeps_ms = int(self.source.config.get("delete.retention.ms", "0"))
        age_ms = self.services.changelog().time_ms() - done.began_ms
        if age_ms >= certain_ms(keeps_ms):
            raise InvalidError(
                f"the copy began {age_ms // 1000} s ago, and compaction may have removed deletes that are older than "
                f"{keeps_ms // 1000} s (delete.retention.ms) before the copy read them",
                hint="raise delete.retention.ms of the old topic, delete the new one, and run it again",
                topic=self.source.name,
                partition=self.old_partition,
            )
