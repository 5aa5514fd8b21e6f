"""Where a replay can start: a local directory of an older retained checkpoint. Decides only; reads no file.

Replaying the offsets after an older marker onto its state gives exactly the newer state, as long as no delete between
the two can have been compacted away: a cleaner keeps a delete for ``delete.retention.ms`` at least, and it was written
after the older checkpoint was. So that one must be younger when the replay has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from statemgr.model.checkpoint import ChangelogMarker
from statemgr.model.plan import OlderState
from statemgr.ports import CommittedDirectory

_RETENTION = "delete.retention.ms"
#: The clocks of this machine, of the one that made the checkpoint and of the broker may differ by this much.
CLOCK_MARGIN_MS = 60_000


@dataclass(frozen=True, slots=True)
class ReplayBase:
    """A local directory, the offset that it is the state at, and until when (epoch milliseconds) it may be used."""

    directory: CommittedDirectory
    offset: int
    usable_until_ms: int


def newest_base(
    marker: ChangelogMarker,
    local: Sequence[CommittedDirectory],
    older: Mapping[str, OlderState],
    settings: Mapping[str, str],
    now_ms: int,
) -> ReplayBase | None:
    """The local directory with the shortest replay to ``marker``; None where all of the changelog must be replayed.

    Args:
        older: state ID → what the older retained checkpoints say of it.
        settings: the changelog topic's.
    """
    retention_ms = int(settings.get(_RETENTION, "0"))
    found: list[ReplayBase] = []
    for directory in local:
        state = older.get(directory.state_id)
        if state is None or not _is_before(state, marker):
            continue
        assert isinstance(state.marker, ChangelogMarker)
        until_ms = state.checkpoint_ms + retention_ms - min(CLOCK_MARGIN_MS, retention_ms // 10)
        if now_ms < until_ms:
            found.append(ReplayBase(directory, state.marker.offset, until_ms))
    return max(found, key=lambda base: base.offset, default=None)


def _is_before(state: OlderState, marker: ChangelogMarker) -> bool:
    """Whether a state is of the same changelog for sure, not after ``marker``."""
    of, same = state.marker, (marker.topic, marker.topic_id, marker.partition)
    return (
        isinstance(of, ChangelogMarker)
        and marker.topic_id is not None
        and (of.topic, of.topic_id, of.partition) == same
        and of.offset <= marker.offset
    )
