"""The backup part of ``kafka-changelog``: sends the changes of every commit to the changelog in the publishing
transaction.

``prepare`` and ``carry`` of a portable commit need no broker, because executors do not connect to Kafka. The process
that publishes asks the broker in ``stage``, before the transaction, whether the topic was created again.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from statemgr.backends.changelog.guard import FillGuard, OwnRecords, continues
from statemgr.backends.services import Services
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import InvalidError, MissingState
from statemgr.ids import task_index, task_path
from statemgr.local.change_buffer import ScratchChanges
from statemgr.model.checkpoint import ChangelogMarker, Marker
from statemgr.model.commit import Change, ChangeSet, PreparedChanges
from statemgr.model.segment import read_segment, verify_segment, write_segment
from statemgr.ports import (
    Delivered,
    PreparedBackup,
    StagedChanges,
    StoreIdentity,
    StoreSnapshot,
    TopicInfo,
    Transaction,
)
from statemgr.transfer.packs import PackedBlob

#: Up to this many bytes, a segment is inside the prepared commit.
INLINE_LIMIT = 16 * 1024
#: Seconds for which a broker's description of a topic is reused: one commit of many tasks asks once.
_DESCRIBED_FOR_S = 5.0
#: Bytes of keys that a fill remembers, so that it seldom deletes a key more than once.
_KEYS_BUDGET = 32 * 1024 * 1024


class ChangelogBackup:
    """Implements :class:`statemgr.ports.BackupManager`."""

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

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """Fills the changelog with the whole state if it does not continue ``base``.

        Raises: also DirectoryNeeded, if the whole state cannot be read from anywhere.
        """
        fill = base is None or not self._continues(snapshot.identity, base, ask=not portable)
        changes = snapshot.content if fill else snapshot.changes
        if not portable:
            return PreparedBackup(changes=PreparedChanges(fill, local=changes))
        return PreparedBackup(changes=self._portable(snapshot, changes, fill))

    def stage(self, identity: StoreIdentity, changes: PreparedChanges, base: Marker | None) -> StagedChanges:
        """Raises: MissingState if the changelog is gone, or is not the base's; PermissionNeeded if a fill would delete
        records that others wrote.
        """
        topic, partition = self._target(identity)
        info = self._describe(topic)
        if partition >= info.partitions:
            raise InvalidError(
                f"the changelog has {info.partitions} partitions, too few for the task",
                hint="run `statemgr topics check` to see how to fix it",
                task=identity.task,
                topic=topic,
            )
        if not changes.fill and not continues(base, topic, partition, info.topic_id):
            raise MissingState(
                "the changelog is not the one in the last checkpoint: it was deleted and created again",
                hint="open the job again: its next commit writes the whole state to the changelog",
                topic=topic,
                task=identity.task,
                store=identity.store,
            )
        target = ChangelogMarker(
            topic, info.topic_id, partition, base.offset if isinstance(base, ChangelogMarker) else 0
        )
        if not changes.fill:
            return _Staged(identity, self._own, target, (self._local(changes),))
        start, end = self._services.changelog().bounds(topic, partition)
        self._guard.check_fill(identity, info, partition, base, start, end)
        deletes = deletes_of(self._services, topic, partition, start, end)
        tombstones = ScratchChanges.write(self._services.scratch_file("tombstones"), chain.from_iterable(deletes))
        self._own.known_until(info, partition, end)
        target = ChangelogMarker(topic, info.topic_id, partition, end)
        return _Staged(identity, self._own, target, (tombstones, self._local(changes)))

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """Asks no broker: the next opening, or ``stage``, notices a changelog that was created again."""
        return base if self._continues(identity, base, ask=False) else None

    def has_tail(self, identity: StoreIdentity, marker: Marker) -> bool:
        """Also True if the topic is no longer the one in the marker, so that the next commit fills it again."""
        topic, partition = self._target(identity)
        self._described.pop(topic, None)
        if not isinstance(marker, ChangelogMarker) or not self._continues(identity, marker, ask=True):
            return True
        changelog = self._services.changelog()
        _, end = changelog.bounds(topic, partition)
        if marker.offset > end or any(changelog.read(topic, partition, marker.offset, end)):
            return True
        self._own.known_until(self._describe(topic), partition, end)
        return False

    def guard_fill(
        self, identity: StoreIdentity, current: Marker | None, retired: Sequence[Marker], *, overwrite: bool
    ) -> None:
        topic, partition = self._target(identity)
        info = self._describe(topic)
        self._guard.permit_fill(identity, info, partition, current, retired, overwrite=overwrite)

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """Does nothing: compaction cleans up a changelog."""

    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        """None: no checkpoint refers to the blobs that carry changes to the publisher."""
        return ()

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """None: the state is in Kafka."""
        return ()

    # --- parts ----------------------------------------------------------------------------------------

    def _target(self, identity: StoreIdentity) -> tuple[str, int]:
        return self._services.config.stores[identity.store].changelog_topic, task_index(identity.task)

    def _continues(self, identity: StoreIdentity, base: Marker, *, ask: bool) -> bool:
        topic, partition = self._target(identity)
        return continues(base, topic, partition, self._describe(topic).topic_id if ask else None)

    def _describe(self, topic: str) -> TopicInfo:
        now = self._services.clock.monotonic()
        asked, info = self._described.get(topic, (0.0, None))
        if info is None or now - asked > _DESCRIBED_FOR_S:
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
                f"{identity.job_name}/{identity.job_id}/{task_path(identity.task)}/_commit/"
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


class _Staged:
    """Changes that are ready to be sent, in order. ``target``: the marker if there is nothing to send."""

    def __init__(
        self, identity: StoreIdentity, own: OwnRecords, target: ChangelogMarker, parts: tuple[Iterable[Change], ...]
    ) -> None:
        self._identity = identity
        self._own = own
        self._target = target
        self._parts = parts

    def send(self, transaction: Transaction) -> None:
        for changes in self._parts:
            transaction.send_changes(self._target.topic, self._target.partition, changes)

    def marker(self, delivered: Mapping[tuple[str, int], Delivered]) -> Marker:
        target = self._target
        ours = delivered.get((target.topic, target.partition))
        if ours is None:
            return target
        offset = ours.end
        if offset <= target.offset:
            raise MissingState(
                f"the changelog has lost records: it continues at offset {offset}, below the offset {target.offset} of "
                "the last checkpoint",
                hint="open the job again: its next commit writes the whole state to the changelog",
                topic=target.topic,
                partition=target.partition,
                offset=offset,
            )
        self._own.check_delivered(self._identity, target, ours)
        return ChangelogMarker(target.topic, target.topic_id, target.partition, offset)
