"""The backup part of ``kafka-changelog``: sends the changes of every commit to the changelog in the publishing
transaction.

``prepare`` and ``carry`` need no broker, because executors do not connect to Kafka. The process that publishes asks the
broker in ``stage``, before the transaction, whether the topic was created again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, TypeVar

from statemgr.backends.changelog.integrity import FillGuard, Losses, OwnRecords, continues, extended, loss_of, read_tail
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import InvalidError, MissingState
from statemgr.ids import task_index, task_prefix
from statemgr.local.change_buffer import FrozenChanges, ScratchChanges
from statemgr.model.checkpoint import ChangelogMarker, Marker
from statemgr.model.commit import Change, ChangeSet, PreparedChanges
from statemgr.model.segment import read_segment, verify_segment, write_segment
from statemgr.ports import (
    BackupLost,
    BackupManager,
    Delivered,
    PreparedBackup,
    StagedChanges,
    StoreIdentity,
    StoreSnapshot,
    TopicBounds,
    TopicInfo,
    Transaction,
)
from statemgr.services import Services
from statemgr.transfer.packs import PackedBlob

T = TypeVar("T")
#: Up to this many bytes, a segment is inside the prepared commit.
INLINE_LIMIT = 16 * 1024
#: Seconds for which a broker's description of a topic is reused: one commit of many tasks asks once.
_DESCRIBED_FOR_S = 5.0
#: The same for an opening. The description of a topic with 1,000 partitions is large, and each task asks for it.
_OPENED_WITHIN_S = 1.0
#: Bytes of keys that a fill remembers, so that it seldom deletes a key more than once.
_KEYS_BUDGET = 32 * 1024 * 1024


class ChangelogBackup(BackupManager):
    """Sends changes in the publishing transaction. Compaction cleans up; no checkpoint refers to blobs."""

    needs_changes = True
    needs_directory = False
    fills_from_changes = True
    #: Seconds between local copies. Without a copy, a restart on the same machine replays the changelog. With a copy at
    #: every commit, frequent commits of many changes would wait for the disk.
    local_copy_interval_s: float | None = 10.0

    def __init__(self, services: Services) -> None:
        self._services = services
        self._described: dict[str, tuple[float, TopicInfo]] = {}
        self._guard = FillGuard(services.changelog)
        self._own = OwnRecords(services.changelog)
        stores = services.config.stores.values()
        topics = {store.changelog_topic for store in stores if KAFKA_CHANGELOG in store.backup_factories}
        self._losses = Losses(services.changelog, topics, services.clock)

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """Fills the changelog with the whole state if it does not continue ``base``.

        Raises: also DirectoryNeeded, if the whole state cannot be read from anywhere.
        """
        fill = base is None or not self._continues(snapshot.identity, base)
        changes: ChangeSet = snapshot.content if fill else snapshot.changes
        if isinstance(changes, FrozenChanges):
            changes = changes.net()  # a value that Kafka refuses must not come again after it was replaced
        if not portable:
            return PreparedBackup(changes=PreparedChanges(fill, local=changes, check=snapshot.check))
        return PreparedBackup(changes=self._portable(snapshot, changes, fill))

    def stage(self, identity: StoreIdentity, changes: PreparedChanges, base: Marker | None) -> StagedChanges:
        """Raises: BackupLost if the changelog is gone, or is not the base's; PermissionNeeded if a fill would delete
        records that others wrote.
        """
        topic, partition = self._target(identity)
        # after offset 0, the offset of the first record does not tell that the changelog was created again
        if changes.fill or (isinstance(base, ChangelogMarker) and base.offset == 0):
            self._described.pop(topic, None)
        try:
            info = self._describe(topic)
        except MissingState as error:
            raise _lost(identity, topic, partition, error.message) from error
        if partition >= info.partitions:
            raise InvalidError(
                f"the changelog has {info.partitions} partitions, too few for the task",
                hint="run `statemgr topics check` to see how to fix it",
                task=identity.task,
                topic=topic,
            )
        if not changes.fill and not continues(base, topic, partition, info.topic_id):
            why = "the changelog is not the one in the last checkpoint: it was deleted and created again"
            raise _lost(identity, topic, partition, why)
        if not changes.fill:
            assert isinstance(base, ChangelogMarker)
            target = replace(base, topic_id=info.topic_id)
            return _Staged(identity, self._own, target, (self._local(changes),))
        start, end = self._services.changelog().bounds(topic, partition)
        self._guard.check_fill(identity, info, partition, base, start, end)
        deletes = _Checked(deletes_of(self._services, topic, partition, start, end), changes.check)
        tombstones = ScratchChanges.write(self._services.scratch_file("tombstones"), chain.from_iterable(deletes))
        self._own.known_until(info, partition, end)
        # every key from before the end gets a tombstone, so a replay may begin there
        target = ChangelogMarker(topic, info.topic_id, partition, end, start=end)
        parts = [_Checked(part, changes.check) for part in (tombstones, self._local(changes))]
        return _Staged(identity, self._own, target, parts)

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """Asks no broker: :meth:`loss_of` notices a changelog that was created again, and so does the next opening."""
        return base if self._continues(identity, base) else None

    def has_tail(self, identity: StoreIdentity, marker: Marker) -> bool:
        """Also True if the configuration names another topic by now. Raises: MissingState if the changelog has lost
        something.
        """
        topic, partition = self._target(identity)
        if not isinstance(marker, ChangelogMarker) or (marker.topic, marker.partition) != (topic, partition):
            return True
        info, changelog = self._describe(topic, _OPENED_WITHIN_S), self._services.changelog()
        start, end = changelog.bounds(topic, partition)
        loss = loss_of(marker, TopicBounds(info.topic_id, info.partitions, {partition: (start, end)}))
        if loss is None:
            loss, tail = read_tail(changelog, marker, end, checked=True)
            if any(tail):
                return True
        if loss is not None:
            raise MissingState(f"the changelog has lost state: {loss}", topic=topic, partition=partition)
        self._own.known_until(info, partition, end)
        return False

    def loss_of(self, marker: Marker) -> str | None:
        return self._losses.of(marker) if isinstance(marker, ChangelogMarker) else None

    def guard_fill(
        self, identity: StoreIdentity, current: Marker | None, retired: Sequence[Marker], *, overwrite: bool
    ) -> None:
        topic, partition = self._target(identity)
        info = self._describe(topic)
        self._guard.permit_fill(identity, info, partition, current, retired, overwrite=overwrite)

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """None: the state is in Kafka."""
        return ()

    # --- parts ----------------------------------------------------------------------------------------

    def _target(self, identity: StoreIdentity) -> tuple[str, int]:
        return self._services.config.stores[identity.store].changelog_topic, task_index(identity.task)

    def _continues(self, identity: StoreIdentity, base: Marker) -> bool:
        return continues(base, *self._target(identity), None)

    def _describe(self, topic: str, for_s: float = _DESCRIBED_FOR_S) -> TopicInfo:
        now = self._services.clock.monotonic()
        asked, info = self._described.get(topic, (0.0, None))
        if info is None or now - asked > for_s:
            info = self._services.changelog().describe(topic)
            self._described[topic] = (now, info)
        return info

    def _portable(self, snapshot: StoreSnapshot, changes: ChangeSet, fill: bool) -> PreparedChanges:
        """The changes as a segment, inline or in a blob."""
        identity = snapshot.identity
        with closing(PackedBlob(self._services.scratch_file("changes"))) as packed:
            packed.section(lambda sink: write_segment(changes, sink))
            body = packed.body()
            if isinstance(body, bytes) and len(body) <= INLINE_LIMIT:
                return PreparedChanges(fill, inline=body)
            blob_id = (
                f"{task_prefix(identity.job_key, identity.task)}_commit/"
                f"{snapshot.attempt}/changes-{identity.store}-{KAFKA_CHANGELOG}"
            )
            return PreparedChanges(fill, blob=self._services.transfer().put(blob_id, body))

    def _local(self, changes: PreparedChanges) -> Iterable[Change]:
        """The changes, fetched to this machine and verified before anything is sent."""
        if changes.local is not None:
            return changes.local
        if changes.inline is not None:
            verify_segment(io.BytesIO(changes.inline))
            return _Inline(changes.inline)
        assert changes.blob is not None
        path = self._services.scratch_file("staged")
        try:
            self._services.transfer().fetch_blob(changes.blob, path)
            return ScratchChanges.verified(path)
        finally:
            path.unlink(missing_ok=True)


def deletes_of(services: Services, topic: str, partition: int, start: int, end: int) -> Iterator[Sequence[Change]]:
    """A delete for every key in a part of a changelog, in batches. If there are very many, keys may repeat."""
    seen: set[bytes] = set()
    size = 0
    for batch in services.changelog().read(topic, partition, start, end):
        new = dict.fromkeys(record.key for record in batch if record.key not in seen)
        yield [(key, None) for key in new]
        seen.update(new)
        size += sum(map(len, new)) + 100 * len(new)
        if size > _KEYS_BUDGET:
            seen.clear()
            size = 0


@dataclass(frozen=True)
class _Inline:
    """The changes of a segment in memory."""

    data: bytes

    def __iter__(self) -> Iterator[Change]:
        return read_segment(io.BytesIO(self.data))


@dataclass(frozen=True)
class _Checked(Generic[T]):
    """Items, with a call of ``check`` before each."""

    items: Iterable[T]
    check: Callable[[], None]

    def __iter__(self) -> Iterator[T]:
        for item in self.items:
            self.check()
            yield item


class _Staged:
    """Changes that are ready to be sent, in order. ``target``: the marker if there is nothing to send."""

    def __init__(
        self, identity: StoreIdentity, own: OwnRecords, target: ChangelogMarker, parts: Sequence[Iterable[Change]]
    ) -> None:
        self._identity = identity
        self._own = own
        self._target = target
        self._parts = parts
        self._expected: int | None = None

    def send(self, transaction: Transaction) -> None:
        self._expected = self._own.sends(self._target)
        for changes in self._parts:
            transaction.send_changes(self._target.topic, self._target.partition, changes)

    def marker(self, delivered: Mapping[tuple[str, int], Delivered]) -> Marker:
        target = self._target
        ours = delivered.get((target.topic, target.partition))
        if ours is None:
            return target
        if ours.start < target.offset:
            why = (
                f"the changelog was deleted and created again, or has lost records: it continues at offset "
                f"{ours.start}, below the offset {target.offset} of the last checkpoint"
            )
            raise _lost(self._identity, target.topic, target.partition, why)
        try:
            self._own.check_delivered(self._identity, target, ours, self._expected)
        except MissingState as error:  # also if nobody can say what the deleted records were
            raise _lost(self._identity, target.topic, target.partition, error.message) from error
        return extended(target, ours)


def _lost(identity: StoreIdentity, topic: str, partition: int, why: str) -> BackupLost:
    return BackupLost(
        why,
        hint="commit again: the next commit writes the whole state to the changelog",
        **identity.where,
        backend=KAFKA_CHANGELOG,
        topic=topic,
        partition=partition,
    )
