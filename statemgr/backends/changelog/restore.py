"""The restore part of ``kafka-changelog``: replays the changelog exactly up to the marker.

The replay starts from the beginning of the changelog, or on a local directory of an older retained checkpoint
(:func:`newest_base`). Replaying the offsets after an older marker onto its state gives exactly the newer state, as long
as no fill is between the two, and no delete between them can have been compacted away. The cleaner keeps a delete for
at least ``delete.retention.ms`` after it was written. Every such delete was written after the moment at which the
directory's state was known to be the newest. The monotonic clock of this machine measures the time since that moment,
within one run of the operating system. Wall clocks decide nothing: if they contradict the monotonic clock, the whole
changelog is replayed.

The same may happen to a replay whose process stands still: the value was read, and its delete is gone when the process
goes on. So a replay that took as long as the cleaner keeps deletes fails, and counts as an unreachable backend.

A changelog may have records beyond the marker: those of newer checkpoints, or a tail. A tail was written by other
software that writes its changelog before its checkpoint. The replay leaves them out. This is exact only while the
cleaner cannot have used them to drop a value from before the marker. The broker's time decides this, because a delete
that caused such a drop is itself removed after a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

from statemgr.backends.changelog.integrity import certain_ms, deletes_kept_ms, loss_of, read_tail
from statemgr.config import StoreConfig
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import AccessDenied, CorruptError, InvalidError, MissingError, MissingState, UnavailableError
from statemgr.ids import task_index
from statemgr.local import ChangeWriter, bulk_writer, cloned, open_store, remove
from statemgr.local.machine import moment
from statemgr.model.checkpoint import ChangelogMarker, Marker
from statemgr.model.commit import Change
from statemgr.model.plan import Successor
from statemgr.os_errors import disk_errors
from statemgr.phases import Phase
from statemgr.ports import (
    CommittedDirectory,
    Moment,
    Restored,
    RestoreManager,
    RestoreRequest,
    StoreIdentity,
    TopicBounds,
    TopicInfo,
)
from statemgr.services import Services

T = TypeVar("T")
log = logging.getLogger(__name__)
_BLOB_INSTEAD = (
    "put blob-store first in task.restore.factories, or restore an older checkpoint with "
    "`statemgr restore --checkpoint ID --into DIR`"
)
_COPY_INSTEAD = (
    "no other backend has the state: open the task on the machine where it ran last, whose local copy below state.dir "
    "may be whole; its next commit then writes the whole state to the changelog"
)
_LAG = "min.compaction.lag.ms"
_NEWER_INSTEAD = (
    "choose a newer checkpoint: `statemgr checkpoints list` shows them; no other backend has this one. If a read of "
    f"the newest one takes too long each time, raise stores.<name>.changelog.{_LAG}"
)


class ChangelogRestore(RestoreManager):
    """Replays the changelog up to the marker."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def restore(self, request: RestoreRequest) -> Restored:
        marker = request.marker
        store = self._services.config.stores[request.identity.store]

        def replay(changelog: ChangelogMarker, info: TopicInfo, start: int) -> Restored:
            request.identity.announce(Phase.REPLAY)
            continued = self._continued(request, store, changelog, info, start)
            return continued or self.in_time(changelog, info, lambda: self._replayed(request, store, changelog, start))

        try:
            return self.exactly(request.identity.task, marker, request.successor, replay)
        except BaseException:
            with disk_errors(request.staging):
                remove(request.staging)  # the next try could use nothing of it
            raise

    def changes_between(
        self, identity: StoreIdentity, older: Marker, newer: Marker, as_of: Moment
    ) -> Iterator[Sequence[Change]] | None:
        """None if the markers are of different changelogs, if a fill is between them, or if compaction may have removed
        deletes between them.

        The iterator also raises MissingState at its end, if the changes were read too slowly to be complete.
        """
        if not isinstance(older, ChangelogMarker) or not isinstance(newer, ChangelogMarker):
            return None
        info = self._checked(newer)
        usable_s = deletes_kept_ms(info.config) / 1000
        if not _is_before(older, newer) or not self._is_since(as_of, usable_s):
            return None
        return self._changes_between(identity.task, older, newer, as_of, usable_s)

    def _changes_between(
        self, task: str, older: ChangelogMarker, newer: ChangelogMarker, as_of: Moment, usable_s: float
    ) -> Iterator[Sequence[Change]]:
        changelog = self._services.changelog()
        for batch in changelog.changes(newer.topic, newer.partition, older.offset, newer.offset):
            yield batch.changes
        self.exactly(task, newer, None, lambda *_: None)
        if not self._is_since(as_of, usable_s):
            raise self._impossible(
                newer, f"the changes were read more than {usable_s:.0f} s after the state before them"
            )

    def _is_since(self, as_of: Moment, usable_s: float) -> bool:
        """Whether less than ``usable_s`` seconds have passed since a moment."""
        age_s = moment(self._services.clock).seconds_since(as_of)
        return age_s is not None and age_s < usable_s

    def exactly(
        self,
        task: str,
        marker: Marker,
        successor: Successor | None,
        read: Callable[[ChangelogMarker, TopicInfo, int], T],
    ) -> T:
        """Call ``read``, which reads the changelog up to the marker, with the offset at which the changelog begins.

        Raises: also MissingState, if the changelog cannot supply exactly the state of the marker.
        """
        if not isinstance(marker, ChangelogMarker) or marker.partition != task_index(task):
            hint = self._instead()
            raise MissingState("the marker does not name this task's partition of a changelog", hint=hint)
        info = self._checked(marker)
        began = moment(self._services.clock)
        start, end = self._checked_bounds(marker)
        self._check_successor(successor, marker, info)
        found = read(marker, info, start)
        if self._passed_s(began) * 1000 >= certain_ms(int(info.config.get(_LAG, "0"))):
            # what was written since the beginning of the read may have been compacted before its end
            end = self._checked_bounds(marker)[1]
        self._check_successor(successor, marker, info)
        self._check_tail(marker, info, end)
        self._checked(marker, info.topic_id)
        return found

    def in_time(self, marker: ChangelogMarker, info: TopicInfo, read: Callable[[], T]) -> T:
        """Call ``read``, which reads the changelog from its beginning.

        Raises: also UnavailableError, if that took so long that a delete may have gone after the value that it deletes
            was read. A delete from beyond the marker may also have taken a value with it, and be gone.
        """
        began = moment(self._services.clock)
        found = read()
        took_s, usable_s = self._passed_s(began), deletes_kept_ms(info.config) / 1000
        if took_s >= usable_s:
            raise UnavailableError(
                f"the changelog was read for {took_s:.0f} s, and compaction may remove deletes after {usable_s:.0f} s "
                "(delete.retention.ms)",
                hint="read it again; if it takes that long each time, raise delete.retention.ms of the topic",
                topic=marker.topic,
                partition=marker.partition,
            )
        return found

    def _passed_s(self, since: Moment) -> float:
        """Seconds since a moment, at most. Monotonic time may stand still while the machine is suspended."""
        now = moment(self._services.clock)
        return max(now.monotonic_s - since.monotonic_s, (now.wall_ms - since.wall_ms) / 1000)

    def start(self, marker: ChangelogMarker) -> int:
        """The offset at which the changelog of a marker begins.

        Raises: MissingState if it is not the topic of the marker any more, or records of the checkpoint are gone.
        """
        self._checked(marker)
        return self._checked_bounds(marker)[0]

    def _checked(self, marker: ChangelogMarker, topic_id: str | None = None) -> TopicInfo:
        """The topic, if it is the marker's (and has the ID ``topic_id`` that was read before). Raises: MissingState."""
        try:
            info = self._services.changelog().describe(marker.topic)
        except MissingState as error:
            raise self._refused(marker, error.message) from error
        known = replace(marker, topic_id=marker.topic_id or topic_id)
        self._refuse_lost(known, TopicBounds(info.topic_id, info.partitions, {}))
        return info

    def _checked_bounds(self, marker: ChangelogMarker) -> tuple[int, int]:
        bounds = self._services.changelog().bounds(marker.topic, marker.partition)
        found = TopicBounds(marker.topic_id or "", marker.partition + 1, {marker.partition: bounds})
        self._refuse_lost(marker, found)
        return bounds

    def _refuse_lost(self, marker: ChangelogMarker, found: TopicBounds) -> None:
        if (loss := loss_of(marker, found)) is not None:
            raise self._refused(marker, f"the changelog cannot supply the checkpoint: {loss}")

    def _impossible(self, marker: ChangelogMarker, why: str) -> MissingState:
        return self._refused(marker, f"an exact rewind is impossible: {why}", _NEWER_INSTEAD)

    def _refused(self, marker: ChangelogMarker, message: str, otherwise: str = _COPY_INSTEAD) -> MissingState:
        where = {"topic": marker.topic, "partition": marker.partition, "offset": marker.offset}
        hint = self._instead(otherwise)
        return MissingState(message, hint=hint, **where)

    def _instead(self, otherwise: str = _COPY_INSTEAD) -> str:
        """What to do if the changelog cannot supply a state; ``otherwise`` if no blob store has it."""
        factories = {f for store in self._services.config.stores.values() for f in store.backup_factories}
        return _BLOB_INSTEAD if BLOB_STORE in factories else otherwise

    def _replayed(self, request: RestoreRequest, store: StoreConfig, marker: ChangelogMarker, start: int) -> Restored:
        """Replay into a new store, from the beginning."""
        with bulk_writer(store.type, request.staging, store.rocksdb) as writer:
            return self._apply(request, marker, start, writer)

    def _continued(
        self, request: RestoreRequest, store: StoreConfig, marker: ChangelogMarker, info: TopicInfo, start: int
    ) -> Restored | None:
        """Replay onto a copy of the newest local directory that can be continued; None if there is none."""
        base = newest_base(marker, request.reusable, request.older, info.config, moment(self._services.clock))
        if base is None or base.offset < start or not cloned(base.directory, request.staging):
            return None
        try:
            opened = open_store(store.type, request.staging, store.rocksdb)
            try:
                restored = self._apply(request, marker, base.offset, opened)
                opened.flush()
            finally:
                opened.close()
        except (MissingError, CorruptError) as error:
            log.warning("the local directory of state %s cannot be used: %s", base.directory.state_id, error)
        else:
            if base.is_usable(moment(self._services.clock)):
                reused = sum(size for size, _ in base.directory.files.values())
                return replace(restored, bytes_reused=reused)
            log.warning(
                "the replay starts again: it took so long that compaction may have removed deletes in the meantime"
            )
        with disk_errors(request.staging):
            remove(request.staging)
        return None

    def _apply(self, request: RestoreRequest, marker: ChangelogMarker, start: int, writer: ChangeWriter) -> Restored:
        records = size = 0
        what = f"replay {request.identity.store}"
        changelog = self._services.changelog()
        for batch in changelog.changes(marker.topic, marker.partition, start, marker.offset, checked=True):
            writer.write(batch.changes)
            records += len(batch.changes)
            size += batch.size
            request.progress(what, batch.end - start, marker.offset - start)
        return Restored(None, bytes_fetched=size, records=records)

    def _broker_ms(self) -> int:
        """The broker's time. Raises: MissingState if the broker does not tell it; UnavailableError."""
        try:
            return self._services.changelog().time_ms()
        except (AccessDenied, InvalidError) as error:
            raise MissingState(
                f"the records after the checkpoint cannot be checked without the time of the broker: {error}",
                hint="allow this user to create, write and delete topics that start with __statemgr_doctor_, or "
                + self._instead(),
            ) from error

    def _check_tail(self, marker: ChangelogMarker, info: TopicInfo, end: int) -> None:
        """Check the newest record of the checkpoint, and the age of the oldest committed one beyond the marker.

        Records of an open transaction do not count, and nobody waits for its end: the cleaner stops before the first
        open one (LogCleanerManager.cleanableOffsets), so it has dropped no value for them.

        Raises: MissingState if the changelog may not have had exactly the state.
        """
        changelog = self._services.changelog()
        settled = changelog.settled_end(marker.topic, marker.partition)
        if settled < marker.offset:
            self._checked_bounds(marker)
        loss, tail = read_tail(changelog, marker, min(end, settled), checked=True)
        oldest_ms = min((record.timestamp_ms for batch in tail for record in batch), default=None)
        if oldest_ms is not None:
            self._check_rewind(marker, info, oldest_ms)
        if loss is not None:
            raise self._refused(marker, f"the changelog cannot supply the checkpoint: {loss}")

    def _check_successor(self, successor: Successor | None, marker: ChangelogMarker, info: TopicInfo) -> None:
        """For an older checkpoint: check the time of the checkpoint that followed it, whose records may be gone. The
        check before the replay avoids a useless replay, and the check after it decides.

        Raises: MissingState if the cleaner may have dropped a value that the checkpoint had, or if a later fill took
            the offsets of its records.
        """
        if successor is None:
            return
        for later in successor.markers:
            if _is_same_changelog(later, marker) and marker.start != later.start < marker.offset:
                why = f"it ended at offset {later.start} when it was filled: records of the checkpoint are gone"
                raise self._refused(marker, f"the changelog cannot supply the checkpoint: {why}")
        if successor.published_ms is None:
            why = f"checkpoint {successor.checkpoint_id} followed, but the checkpoint topic does not say when"
            raise self._impossible(marker, why)
        self._check_rewind(marker, info, successor.published_ms)

    def _check_rewind(self, marker: ChangelogMarker, info: TopicInfo, oldest_ms: int) -> None:
        """Called after the replay: if the records beyond the marker are still too young for the cleaner, they were so
        all the time.

        Raises: MissingState if the cleaner may have dropped a value that the checkpoint had.
        """
        lag_ms = int(info.config.get(_LAG, "0"))
        age_ms = self._broker_ms() - oldest_ms
        if age_ms >= certain_ms(lag_ms):
            raise self._impossible(
                marker,
                f"the changelog has had records after the checkpoint for {age_ms} ms, and compaction may have changed "
                f"records that are older than {lag_ms} ms ({_LAG})",
            )


# --- the beginning of a replay -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayBase:
    """A local directory, the changelog offset of its state, and for how many seconds after ``moment`` a replay may
    start from it."""

    directory: CommittedDirectory
    offset: int
    as_of: Moment
    usable_s: float

    def is_usable(self, now: Moment) -> bool:
        """Whether the topic certainly still has every delete that was written after the directory's state."""
        age_s = now.seconds_since(self.as_of)
        return age_s is not None and age_s < self.usable_s


def newest_base(
    marker: ChangelogMarker,
    local: Sequence[CommittedDirectory],
    older: Mapping[str, Marker],
    settings: Mapping[str, str],
    now: Moment,
) -> ReplayBase | None:
    """The local directory with the shortest replay to ``marker``; None if the whole changelog must be replayed.

    Args:
        older: state ID → its marker in the older retained checkpoints.
        settings: the settings of the changelog topic.
    """
    usable_s = deletes_kept_ms(settings) / 1000
    found: list[ReplayBase] = []
    for directory in local:
        of = older.get(directory.state_id)
        if directory.as_of is None or not isinstance(of, ChangelogMarker) or not _is_before(of, marker):
            continue
        base = ReplayBase(directory, of.offset, directory.as_of, usable_s)
        if base.is_usable(now):
            found.append(base)
    return max(found, key=lambda base: base.offset, default=None)


def _is_before(of: ChangelogMarker, marker: ChangelogMarker) -> bool:
    """Whether a marker certainly belongs to the same changelog and is not after ``marker``, without a fill in between.

    A fill deletes the keys that the changelog has. If it has lost records, an older state may have more keys.
    """
    return _is_same_changelog(of, marker) and of.start == marker.start and of.offset <= marker.offset


def _is_same_changelog(one: Marker, marker: ChangelogMarker) -> TypeGuard[ChangelogMarker]:
    """Whether a marker certainly belongs to the changelog of another one."""
    same = (marker.topic, marker.topic_id, marker.partition)
    if not isinstance(one, ChangelogMarker) or marker.topic_id is None:
        return False
    return (one.topic, one.topic_id, one.partition) == same
