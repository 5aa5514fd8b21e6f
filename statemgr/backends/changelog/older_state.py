"""Chooses a local directory of an older retained checkpoint that a replay can start from. Reads no file.

Replaying the offsets after an older marker onto its state gives exactly the newer state, as long as no delete between
the two can have been compacted away. The cleaner keeps a delete for at least ``delete.retention.ms`` after it was
written. Every such delete was written after the moment at which the directory's state was known to be the newest. The
monotonic clock of this machine measures the time since that moment, within one run of the operating system. Wall clocks
decide nothing: if they contradict the monotonic clock, the whole changelog is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statemgr.model.checkpoint import ChangelogMarker, Marker
from statemgr.ports import CommittedDirectory, Moment

_RETENTION = "delete.retention.ms"
#: Part of the cleaner's waiting time that is left unused as a margin; a tenth of the time if that is less.
MARGIN_MS = 60_000


@dataclass(frozen=True, slots=True)
class ReplayBase:
    """A local directory, the changelog offset of its state, and the seconds after its moment for which it is usable."""

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
    """The part of the cleaner's waiting time that is safe to rely on, in milliseconds."""
    return waited_ms - min(MARGIN_MS, waited_ms // 10)


def _is_before(of: ChangelogMarker, marker: ChangelogMarker) -> bool:
    """Whether a marker certainly belongs to the same changelog and is not after ``marker``."""
    same = (marker.topic, marker.topic_id, marker.partition)
    return marker.topic_id is not None and (of.topic, of.topic_id, of.partition) == same and of.offset <= marker.offset
