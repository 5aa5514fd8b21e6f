"""Changelogs that a store no longer writes: what explains their records when the store turns to them again. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, Markers

#: Topics that are remembered for a store: the newest.
_MOST = 8


def retired_changelogs(before: Checkpoint | None, now: Markers) -> Mapping[str, tuple[ChangelogMarker, ...]]:
    """Store → the last marker of each topic that the store has left, newest first.

    Args:
        before: the checkpoint that the new one follows.
        now: factory → store → marker of the new one.
    """
    if before is None:
        return {}
    left: dict[str, list[ChangelogMarker]] = {}
    for store, marker in _changelogs(before.state_checkpoint_markers):
        left.setdefault(store, []).append(marker)
    for store, earlier in before.retired_changelogs.items():
        left.setdefault(store, []).extend(earlier)
    in_use = {(store, *_topic(marker)) for store, marker in _changelogs(now)}
    found = {}
    for store, markers in left.items():
        kept = {_topic(m): m for m in reversed(markers) if (store, *_topic(m)) not in in_use}
        if kept:
            found[store] = tuple(reversed(kept.values()))[:_MOST]
    return found


def _changelogs(markers: Markers) -> list[tuple[str, ChangelogMarker]]:
    return [
        (store, marker)
        for of_store in markers.values()
        for store, marker in of_store.items()
        if isinstance(marker, ChangelogMarker)
    ]


def _topic(marker: ChangelogMarker) -> tuple[str, str | None]:
    return marker.topic, marker.topic_id
