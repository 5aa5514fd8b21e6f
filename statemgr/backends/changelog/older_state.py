"""Where a replay can start: a local directory of an older retained checkpoint. Decides only; reads no file.

Replaying the offsets after an older marker onto its state gives exactly the newer state, as long as no delete between
the two can have been compacted away. A cleaner keeps a delete for ``delete.retention.ms`` at least after it was
written, and it was written after the moment at which the directory's state was known to be the newest. How long ago
that was is counted by this machine's monotonic clock, within one run of the operating system. Wall clocks decide
nothing: where they contradict the monotonic one, all of the changelog is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statemgr.model.checkpoint import ChangelogMarker, Marker
from statemgr.ports import CommittedDirectory, Moment

_RETENTION = "delete.retention.ms"
#: This much of a time that the cleaner waits is left unused, or a tenth where that is less.
MARGIN_MS = 60_000


@dataclass(frozen=True, slots=True)
class ReplayBase:
    """A local directory, the offset that it is the state at, and for how many seconds after its moment it is usable."""

    directory: CommittedDirectory
    offset: int
    as_of: Moment
    usable_s: float

    def is_usable(self, now: Moment) -> bool:
        """Whether every delete that was written after the directory's state is certainly still there."""
        age_s = now.seconds_since(self.as_of)
        return age_s is not None and age_s < self.usable_s


def newest_base(
    marker: ChangelogMarker,
    local: Sequence[CommittedDirectory],
    older: Mapping[str, Marker],
    settings: Mapping[str, str],
    now: Moment,
) -> ReplayBase | None:
    """The local directory with the shortest replay to ``marker``; None where all of the changelog must be replayed.

    Args:
        older: state ID → the marker that older retained checkpoints have of it.
        settings: the changelog topic's.
    """
    usable_s = certain_ms(int(settings.get(_RETENTION, "0"))) / 1000
    found: list[ReplayBase] = []
    for directory in local:
        of = older.get(directory.state_id)
        if directory.as_of is None or not isinstance(of, ChangelogMarker) or not _is_before(of, marker):
            continue
        base = ReplayBase(directory, of.offset, directory.as_of, usable_s)
        if base.is_usable(now):
            found.append(base)
    return max(found, key=lambda base: base.offset, default=None)


def certain_ms(waited_ms: int) -> int:
    """What of a time that the cleaner waits can be relied on."""
    return waited_ms - min(MARGIN_MS, waited_ms // 10)


def _is_before(of: ChangelogMarker, marker: ChangelogMarker) -> bool:
    """Whether a marker is of the same changelog for sure, not after ``marker``."""
    same = (marker.topic, marker.topic_id, marker.partition)
    return marker.topic_id is not None and (of.topic, of.topic_id, of.partition) == same and of.offset <= marker.offset
