"""``kafka-changelog``, the restore part: replay the changelog up to the marker, exactly; from its beginning, or onto a
local directory of an older checkpoint where nothing between the two can be missing.

Reads Kafka and writes the staging directory that it is given. An adopted changelog may have a tail beyond the marker,
written by software that publishes its checkpoints later: it is left out, and the next commit overwrites
it. That is exact only while the cleaner cannot have used the tail to drop a value from before the marker.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NoReturn

from statemgr.backends.changelog_base import CLOCK_MARGIN_MS, newest_base
from statemgr.backends.context import BackendContext
from statemgr.backends.files import disk_errors
from statemgr.config import StoreConfig
from statemgr.errors import CorruptError, MissingError, MissingState
from statemgr.ids import task_index
from statemgr.local import ChangeWriter, bulk_writer, cloned, open_store, remove
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.phases import Phase, announce
from statemgr.ports import Restored, RestoreRequest, TopicInfo

log = logging.getLogger(__name__)
_BLOB_INSTEAD = (
    "put blob-store in front in task.restore.factories; "
    "`statemgr restore --checkpoint ID --into DIR` reads an older checkpoint"
)
_LAG = "min.compaction.lag.ms"


class ChangelogRestore:
    """Implements :class:`statemgr.ports.RestoreManager`."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context

    def restore(self, request: RestoreRequest) -> Restored:
        """See the port."""
        marker = request.marker
        store = self._context.config.stores[request.identity.store]
        if not isinstance(marker, ChangelogMarker) or marker.partition != task_index(request.identity.task):
            raise MissingState("the marker names no changelog partition of this task", hint=_BLOB_INSTEAD)
        info = self._checked(marker)
        start, end = self._checked_bounds(marker)
        announce(Phase.REPLAY, f"{request.identity.task}/{request.identity.store}", request.identity.job_key)
        restored = self._continued(request, store, marker, info) or self._replayed(request, store, marker, start)
        oldest_ms = self._oldest_of_tail(marker, end)
        if oldest_ms is not None:
            self._check_rewind(marker, info, oldest_ms)
        self._checked(marker, info.topic_id)
        return restored

    def _checked(self, marker: ChangelogMarker, topic_id: str | None = None) -> TopicInfo:
        """The topic, if it is the one that the marker was made for (and that was read meanwhile)."""
        info = self._context.changelog().describe(marker.topic)
        expected = marker.topic_id or topic_id or info.topic_id
        if info.topic_id != expected:
            _lost(marker, "it was deleted and made anew since the checkpoint")
        if marker.partition >= info.partitions:
            _lost(marker, f"it has only {info.partitions} partitions")
        return info

    def _checked_bounds(self, marker: ChangelogMarker) -> tuple[int, int]:
        start, end = self._context.changelog().bounds(marker.topic, marker.partition)
        if marker.offset > end:
            _lost(marker, f"it ends at {end}: records of the checkpoint are gone")
        if start > 0:
            _lost(marker, f"it begins at {start}: records were deleted, which compaction never does")
        return start, end

    def _replayed(self, request: RestoreRequest, store: StoreConfig, marker: ChangelogMarker, start: int) -> Restored:
        """Into a new store, from the beginning."""
        with bulk_writer(store.type, request.staging, store.rocksdb) as writer:
            return self._apply(request, marker, start, writer)

    def _continued(
        self, request: RestoreRequest, store: StoreConfig, marker: ChangelogMarker, info: TopicInfo
    ) -> Restored | None:
        """Onto a copy of the newest local directory that can be continued; None when there is none."""
        base = newest_base(marker, request.reusable, request.older, info.config, self._now_ms())
        if base is None or not cloned(base.directory, request.staging):
            return None
        try:
            opened = open_store(store.type, request.staging, store.rocksdb)
            try:
                restored = self._apply(request, marker, base.offset, opened)
                opened.flush()
            finally:
                opened.close()
        except (MissingError, CorruptError) as error:
            log.warning("the local directory of state %s is not continued: %s", base.directory.state_id, error)
        else:
            if self._now_ms() < base.usable_until_ms:
                reused = sum(size for size, _ in base.directory.files.values())
                return replace(restored, bytes_reused=reused)
            log.warning("the replay took so long that deletes may have been compacted away meanwhile: it starts anew")
        with disk_errors(request.staging):
            remove(request.staging)
        return None

    def _apply(self, request: RestoreRequest, marker: ChangelogMarker, start: int, writer: ChangeWriter) -> Restored:
        records = size = 0
        what = f"replay {request.identity.store}"
        for batch in self._context.changelog().changes(marker.topic, marker.partition, start, marker.offset):
            writer.write(batch.changes)
            records += len(batch.changes)
            size += batch.size
            request.progress(what, batch.end - start, marker.offset - start)
        return Restored(None, bytes_fetched=size, records=records)

    def _now_ms(self) -> int:
        return self._context.clock.time_ns() // 1_000_000

    def _oldest_of_tail(self, marker: ChangelogMarker, end: int) -> int | None:
        """The time (epoch milliseconds) of the oldest committed record beyond the marker; None without a tail."""
        oldest_ms: int | None = None
        for batch in self._context.changelog().read(marker.topic, marker.partition, marker.offset, end):
            in_batch = min(record.timestamp_ms for record in batch)
            oldest_ms = in_batch if oldest_ms is None else min(oldest_ms, in_batch)
        return oldest_ms

    def _check_rewind(self, marker: ChangelogMarker, info: TopicInfo, oldest_ms: int) -> None:
        """After the replay: what is still too young for the cleaner was so all the time.

        Raises: MissingState when the cleaner may have dropped a value that the checkpoint had.
        """
        lag_ms = int(info.config.get(_LAG, "0"))
        age_ms = self._now_ms() - oldest_ms
        if age_ms >= lag_ms - min(CLOCK_MARGIN_MS, lag_ms // 10):
            raise MissingState(
                f"an exact rewind is impossible: the changelog has records beyond the checkpoint that are "
                f"{age_ms} ms old, and records older than {lag_ms} ms may have been compacted with them",
                hint=_BLOB_INSTEAD,
                topic=marker.topic,
                partition=marker.partition,
                offset=marker.offset,
            )


def _lost(marker: ChangelogMarker, why: str) -> NoReturn:
    raise MissingState(
        f"the changelog cannot supply the checkpoint: {why}",
        hint=_BLOB_INSTEAD,
        topic=marker.topic,
        partition=marker.partition,
        offset=marker.offset,
    )
