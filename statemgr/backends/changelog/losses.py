"""Whether a changelog still has what a checkpoint needs of it.

Compaction never moves the beginning of a compacted topic. So a changelog that begins after the last fill was cut: by
another ``cleanup.policy``, or by deleted records. Another topic ID shows that it was deleted and created again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from statemgr.model.checkpoint import ChangelogMarker
from statemgr.ports import Changelog, Clock, TopicBounds

#: Seconds for which an answer of the brokers is used again, for many tasks and stores.
_FRESH_S = 10.0


def loss_of(marker: ChangelogMarker, found: TopicBounds | None) -> str | None:
    """What a restore from the marker would lack; None if nothing, or if the partition cannot be asked at present.

    ``found``: the topic of the marker; None if it does not exist.
    """
    if found is None:
        return "it does not exist"
    if marker.topic_id not in (None, found.topic_id):
        return "it was deleted and created again after the checkpoint"
    if marker.partition >= found.partitions:
        return f"it has only {found.partitions} partitions"
    if marker.partition not in found.bounds:
        return None
    start, end = found.bounds[marker.partition]
    if marker.offset > end:
        return f"it ends at offset {end}: records of the checkpoint are gone"
    if marker.start < start:
        return f"it begins at offset {start}: records were deleted, and not by compaction"
    return None


class Losses:
    """Asks about all changelogs of a job at once, in three requests. Safe to use from many threads."""

    def __init__(self, changelog: Callable[[], Changelog], topics: Collection[str], clock: Clock) -> None:
        self._changelog = changelog
        self._topics = frozenset(topics)
        self._clock = clock
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._found: Mapping[str, TopicBounds] = {}

    def of(self, marker: ChangelogMarker) -> str | None:
        """What a restore from the marker would lack; None if nothing. Raises: UnavailableError, AccessDenied."""
        with self._lock:
            was_asked = self._clock.monotonic() - self._asked > _FRESH_S and self._ask(marker.topic)
            loss = loss_of(marker, self._found.get(marker.topic))
            if loss is not None and not was_asked:  # the marker may be newer than the answer
                self._ask(marker.topic)
                loss = loss_of(marker, self._found.get(marker.topic))
            return loss

    def _ask(self, topic: str) -> bool:
        asked = self._clock.monotonic()
        self._found = self._changelog().survey(self._topics | {topic})
        self._asked = asked
        return True
