"""Builds the state of a store's newest checkpoint from its changelog while the job runs.

Steps of :meth:`ChangelogBuild.run`:

1. continue at the offset that a killed build had noted, or begin with an empty directory
2. bulk-load the changelog up to the marker of the newest checkpoint; note the offset now and then, after a flush, and
   tell the caller which files are final
3. read the newest checkpoint again and load the records up to its marker, until this takes little time
4. check that the directory has exactly the state of that checkpoint

A replay may apply records a second time: those after a noted offset may already be in the directory. In the end each
key has its last value all the same, because the replay passes all of these records again, in order.

Why the state is exact although the cleaner works meanwhile:

- A value from before the last marker may be gone because of a record after that marker. The cleaner leaves a record
  alone for ``min.compaction.lag.ms``. All records after the marker belong to transactions that were not committed yet
  when the checkpoint was read in step 3, so little time has passed since they were written (step 4).
- A delete may be gone before the replay reaches it, although the replay has read the value before it. The cleaner keeps
  a delete for ``delete.retention.ms`` after it has dropped that value. So the whole build, all its tries together, must
  take less time than that (step 4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from statemgr.backends.changelog.integrity import MARGIN_MS, certain_ms, deletes_kept_ms
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import AccessDenied, InvalidError, MissingState
from statemgr.ids import CheckpointId, task_index
from statemgr.local import bulk_writer
from statemgr.local.machine import moment
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint
from statemgr.operations.materialize.build_place import REPLAYED, BuildPlace
from statemgr.phases import Phase
from statemgr.ports import Moment, Progress, StoreIdentity, TopicInfo
from statemgr.services import Services

log = logging.getLogger(__name__)
#: Seconds between two notes. Each note needs a flush.
NOTE_S = 15.0
#: Seconds between two looks for files that are final.
LOOK_S = 0.5
#: A checkpoint that was read at most this many seconds ago is new enough.
_NEW_S = 30.0
#: The longest transaction of a job, which is the longest that brokers allow by default.
_TRANSACTION_MS = 900_000
#: A checkpoint that was published so many milliseconds ago is recent.
_RECENT_MS = 3600 * 1000
#: Seconds for which a finished directory may wait for its upload.
_KEPT_S = 6 * 3600


@dataclass(frozen=True, slots=True)
class BuiltState:
    """What a build has made.

    Attributes:
        checkpoint_id: the checkpoint whose state it is; ``state_id``: the store's state in it.
        marker: the changelog, with its topic ID, and the offset after the last record of the state.
        as_of_ms: a time by the broker's clock (epoch milliseconds). All records after the marker are younger.
        records: how many records this process has replayed.
    """

    checkpoint_id: CheckpointId
    state_id: str
    marker: ChangelogMarker
    as_of_ms: int
    delete_retention_ms: int
    records: int


class ChangelogBuild:
    """Builds the state of one store of one task in a place that this process holds."""

    def __init__(
        self, services: Services, identity: StoreIdentity, place: BuildPlace, newest: Callable[[], Checkpoint]
    ) -> None:
        self._services = services
        self._identity = identity
        self._place = place
        self._newest = newest
        self._topic = services.config.stores[identity.store].changelog_topic
        self._partition = task_index(identity.task)

    def run(self, progress: Progress, final: Callable[[Sequence[tuple[str, int]]], None]) -> BuiltState:
        """All steps. ``final``: called with names and bytes of files that nothing will rewrite, also of the same again.

        Raises: MissingState if the changelog cannot supply exactly the state of a checkpoint; CorruptRecord,
            UnavailableError, AccessDenied, DiskFull.
        """
        asked_s = self._services.clock.monotonic()
        checkpoint = self._newest()
        info = self._services.changelog().describe(self._topic)
        marker = self.marker_of(checkpoint, info)
        if (finished := self._finished(info, marker)) is not None:
            return finished
        began, start = self._begin(info, marker)  # 1
        store = self._services.config.stores[self._identity.store]
        filled, position, records = marker.start, max(start, marker.start), 0
        with bulk_writer(store.type, self._place.directory, store.rocksdb, continued=start > 0) as writer:
            noted_s = looked_s = self._services.clock.monotonic()
            while True:
                self._identity.announce(Phase.REPLAY)
                batches = self._services.changelog().changes(self._topic, self._partition, position, marker.offset)
                for batch in batches:  # 2
                    writer.write(batch.changes)
                    position = batch.end
                    records += len(batch.changes)
                    progress("replay", position, marker.offset)
                    now_s = self._services.clock.monotonic()
                    if now_s - looked_s >= LOOK_S:
                        final(writer.final_tables(position / marker.offset))
                        looked_s = now_s
                    if now_s - noted_s >= NOTE_S:
                        writer.flush()
                        self._note(info, began, marker, position)
                        noted_s = now_s
                position = marker.offset
                if self._services.clock.monotonic() - asked_s < _NEW_S:
                    break
                asked_s = self._services.clock.monotonic()
                checkpoint = self._newest()  # 3
                marker = self.marker_of(checkpoint, info)
                if marker.start != filled:
                    why = "the job has written its whole state to the changelog again during the replay"
                    raise self._refused(why, "run the command again")
        self._check(marker, checkpoint, info, began, asked_s)  # 4
        built = BuiltState(
            checkpoint.checkpoint_id, checkpoint.stores[self._identity.store], marker,
            self._as_of_ms(checkpoint, asked_s), int(info.config.get("delete.retention.ms", "0")), records,
        )  # fmt: skip
        self._note(info, moment(self._services.clock), marker, position, built)
        return built

    def marker_of(self, checkpoint: Checkpoint, info: TopicInfo) -> ChangelogMarker:
        """The checkpoint's marker, with the topic's ID. Raises: MissingState if the changelog does not supply it."""
        marker = checkpoint.marker(KAFKA_CHANGELOG, self._identity.store)
        if not isinstance(marker, ChangelogMarker):
            raise self._refused("its newest checkpoint has no changelog", "only a job that writes a changelog has one")
        if (marker.topic, marker.partition) != (self._topic, self._partition):
            raise self._refused(
                f"its newest checkpoint names partition {marker.partition} of {marker.topic}, and the configuration "
                f"partition {self._partition} of {self._topic}",
                "use the configuration of the running job",
            )
        if marker.topic_id not in (None, info.topic_id):
            raise self._refused(
                "its changelog was deleted and created again after the checkpoint",
                "restart the job: its first commit writes the whole state to the changelog",
            )
        return replace(marker, topic_id=info.topic_id)

    # --- step 1 --------------------------------------------------------------------------------------------------

    def _begin(self, info: TopicInfo, newest: ChangelogMarker) -> tuple[Moment, int]:
        """When the build began, and where it continues."""
        note, now = self._note_of(info, newest), moment(self._services.clock)
        if note is not None and note["built"] is None:
            began = Moment(*note["began"])
            age_s = now.seconds_since(began)
            if age_s is not None and age_s * 1000 < deletes_kept_ms(info.config):
                log.info("%s: the build continues at offset %d", self._identity, note["offset"])
                return began, note["offset"]
        self._place.clear()
        return now, 0

    def _finished(self, info: TopicInfo, newest: ChangelogMarker) -> BuiltState | None:
        """What a killed build had finished, if it is new enough to be uploaded."""
        note = self._note_of(info, newest)
        if note is None or note["built"] is None:
            return None
        age_s = moment(self._services.clock).seconds_since(Moment(*note["began"]))
        if age_s is None or age_s > _KEPT_S or note["offset"] > newest.offset:
            return None
        checkpoint_id, state_id, as_of_ms = note["built"]
        marker = replace(newest, offset=note["offset"], newest_ms=None, newest_deletes=False)
        retention_ms = int(info.config.get("delete.retention.ms", "0"))
        return BuiltState(CheckpointId.parse(checkpoint_id), state_id, marker, as_of_ms, retention_ms, 0)

    def _note_of(self, info: TopicInfo, newest: ChangelogMarker) -> dict[str, Any] | None:
        """The note of a killed build, if no fill has followed: one of a changelog that has lost records does not delete
        their keys."""
        note = self._place.note(REPLAYED)
        if not isinstance(note, dict):
            return None
        return note if (note.get("topic_id"), note.get("start")) == (info.topic_id, newest.start) else None

    def _note(
        self, info: TopicInfo, began: Moment, marker: ChangelogMarker, offset: int, built: BuiltState | None = None
    ) -> None:
        done = None if built is None else (str(built.checkpoint_id), built.state_id, built.as_of_ms)
        note = {"topic_id": info.topic_id, "start": marker.start, "offset": offset, "began": astuple(began)}
        self._place.write_note(REPLAYED, {**note, "built": done})

    # --- step 4 --------------------------------------------------------------------------------------------------

    def _check(
        self, marker: ChangelogMarker, checkpoint: Checkpoint, info: TopicInfo, began: Moment, asked_s: float
    ) -> None:
        """Raises: MissingState unless the directory has exactly the state of the checkpoint."""
        # the topic, its beginning, and the records after the marker that are still there
        ChangelogRestore(self._services).exactly(self._identity.task, marker, None, lambda *_: None)
        if self._newest().checkpoint_id != checkpoint.checkpoint_id:
            lag_ms = int(info.config.get("min.compaction.lag.ms", "0"))
            age_ms = (self._services.clock.monotonic() - asked_s) * 1000 + _TRANSACTION_MS
            if checkpoint.published_ms is not None:
                age_ms = min(age_ms, self._services.changelog().time_ms() - checkpoint.published_ms)
            if age_ms >= certain_ms(lag_ms):
                raise self._refused(
                    f"compaction may already have changed records that its checkpoint needs: they are older than "
                    f"{lag_ms} ms (min.compaction.lag.ms)",
                    "raise min.compaction.lag.ms of the changelog topic",
                )
        age_s = moment(self._services.clock).seconds_since(began)
        if age_s is None or age_s * 1000 >= deletes_kept_ms(info.config):
            self._place.clear()
            raise self._refused(
                "the replay took so long that compaction may have removed deletes before it read them",
                "raise delete.retention.ms of the changelog topic, and run the command again",
            )

    def _as_of_ms(self, checkpoint: Checkpoint, asked_s: float) -> int:
        """A time before the first record after the checkpoint's marker was written.

        That is the checkpoint's own time. For an older checkpoint, it is a while before the topic was read, when no
        later one was there.
        """
        clock, own_ms = self._services.clock, checkpoint.published_ms
        if own_ms is not None and clock.time_ns() // 1_000_000 - own_ms < _RECENT_MS:
            return own_ms
        try:
            now_ms = self._services.changelog().time_ms()
        except (AccessDenied, InvalidError):
            if own_ms is None:
                raise
            return own_ms
        read_ms = now_ms - int((clock.monotonic() - asked_s) * 1000)
        return max(own_ms or 0, read_ms - _TRANSACTION_MS - MARGIN_MS)

    def _refused(self, why: str, hint: str) -> MissingState:
        return MissingState(
            f"no first snapshot can be built from the changelog: {why}",
            hint=hint,
            topic=self._topic,
            partition=self._partition,
            **self._identity.where,
        )
