"""The layouts that a rescale has replaced: which ones a collection collects, and which changelogs they leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from statemgr.flows.replaced_layouts import collect_layouts, kept_by
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.ports import CheckpointLog
from statemgr.services import Services


@dataclass(frozen=True, slots=True)
class RetiredReport:
    """A layout that a rescale has replaced.

    Attributes:
        retired_ms: since when, in epoch milliseconds.
        kept: the checkpoints that it keeps, which protect it.
        collectable: whether a deletion collects it now; ``collected``: whether this one has.
        lost: a blob that it has lost. None if all are there.
        changelogs: if it is collectable, the topics that the job needs no more without it.
    """

    generation: int
    tasks: int
    retired_ms: int
    kept: tuple[str, ...]
    collectable: bool
    collected: bool
    lost: str | None
    changelogs: tuple[str, ...]


def collect_old_layouts(
    services: Services, log: CheckpointLog, before_ms: int, lost: Mapping[int, str], *, delete: bool
) -> list[RetiredReport]:
    """Report the replaced layouts. With ``delete``, collect those that were replaced before a time (epoch milliseconds)
    and keep no checkpoint.

    Args:
        lost: generation → a blob that the layout has lost.

    Raises: as :func:`collect_layouts`; CorruptRecord, MissingState, UnavailableError while the topic is read.
    """
    layouts = {one.layout.generation: one for one in log.retired()}
    if not layouts:
        return []
    kept = {generation: kept_by(log, generation) for generation in layouts}
    old = {number for number, one in layouts.items() if one.retired_ms < before_ms and not kept[number]}
    changelogs = {generation: _changelogs(log, generation) for generation in old}
    if delete and old:
        collect_layouts(services, log, before_ms)
    # somebody may have gone back to one of them meanwhile, or keeps a checkpoint there
    current = _changelogs(log, None)
    there = {one.layout.generation for one in log.retired()}
    stay = there if delete else there - old
    configured = {store.changelog_topic for store in services.config.stores.values()}
    in_use = current.union(configured, *(_changelogs(log, generation) for generation in stay))
    return [
        RetiredReport(
            generation,
            one.layout.tasks,
            one.retired_ms,
            kept[generation],
            collectable=generation in old,
            collected=generation in old - stay and delete,
            lost=lost.get(generation),
            changelogs=tuple(sorted(changelogs[generation] - in_use)) if generation in old else (),
        )
        for generation, one in layouts.items()
    ]


def _changelogs(log: CheckpointLog, generation: int | None) -> set[str]:
    """The topics that the checkpoints of a layout (None: of the current one) name, also those that a store has left."""
    checkpoints = [one for record in log.read(generation=generation).values() for one in record.checkpoints]
    groups = [
        markers
        for checkpoint in checkpoints
        for markers in (
            *(of_store.values() for of_store in checkpoint.state_checkpoint_markers.values()),
            *checkpoint.retired_changelogs.values(),
        )
    ]
    return {marker.topic for markers in groups for marker in markers if isinstance(marker, ChangelogMarker)}
