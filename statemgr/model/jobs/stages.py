"""The stages of a migration from changelogs to blobs, and where the stores of a job are. Pure.

The checkpoints say which stage a store is in: each records the factories that applied when it was made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.keys.partitioners import is_by_input


class Stage(IntEnum):
    """A stage; the next higher number is the next stage."""

    CHANGELOG = 1
    DUAL_COMMIT = 2
    BLOBS_FIRST = 3
    BLOBS = 4

    @property
    def backup(self) -> tuple[str, ...]:
        return _FACTORIES[self][0]

    @property
    def restore(self) -> tuple[str, ...]:
        """The restore factories, in order of preference."""
        return _FACTORIES[self][1]

    @property
    def title(self) -> str:
        """For people: its number, and the factories for backups and for restores."""
        return f"{self.value} ({', '.join(self.backup)} / {', '.join(self.restore)})"


_FACTORIES = {
    Stage.CHANGELOG: ((KAFKA_CHANGELOG,), (KAFKA_CHANGELOG,)),
    Stage.DUAL_COMMIT: ((KAFKA_CHANGELOG, BLOB_STORE), (KAFKA_CHANGELOG,)),
    Stage.BLOBS_FIRST: ((KAFKA_CHANGELOG, BLOB_STORE), (BLOB_STORE, KAFKA_CHANGELOG)),
    Stage.BLOBS: ((BLOB_STORE,), (BLOB_STORE,)),
}


def stage_of(backup: Collection[str], restore: Sequence[str]) -> Stage | None:
    """The stage that factories make: the backup factories, and the first restore factory. None for any others."""
    for stage in Stage:
        if set(stage.backup) == set(backup) and restore[:1] == stage.restore[:1]:
            return stage
    return None


@dataclass(frozen=True, slots=True)
class BackendPosition:
    """A backend of a store: the newest retained checkpoint with its marker (None: there is none).

    ``behind``: the number of newer checkpoints without its marker.
    """

    factory: str
    newest: Checkpoint | None
    behind: int


@dataclass(frozen=True, slots=True)
class StorePosition:
    """Where one store of one task is.

    Attributes:
        stage: of its current checkpoint. None if that has other factories than the stages have.
        configured: the stage that the configuration asks for; None likewise.
        missing: backup factories of the current checkpoint that have no marker in it.
    """

    record: CheckpointRecord
    store: str
    stage: Stage | None
    configured: Stage | None
    missing: tuple[str, ...]
    backends: tuple[BackendPosition, ...]


def position_of(record: CheckpointRecord, store: str, configured: Stage | None) -> StorePosition:
    """Where a store is, by the retained checkpoints of its task."""
    current = record.current
    backup = current.backup_factories.get(store, ())
    # version 1 checkpoints do not record the factories: they know changelogs only
    backup = backup or tuple(sorted(name for name, has in current.state_checkpoint_markers.items() if store in has))
    restore = current.restore_factories.get(store, backup)
    names = dict.fromkeys((*backup, *(f for f, has in current.state_checkpoint_markers.items() if store in has)))
    return StorePosition(
        record,
        store,
        stage_of(backup, restore),
        configured,
        tuple(name for name in backup if current.marker(name, store) is None),
        tuple(_backend(record, store, name) for name in names),
    )


def _backend(record: CheckpointRecord, store: str, factory: str) -> BackendPosition:
    for behind, checkpoint in enumerate(record.checkpoints):
        if checkpoint.marker(factory, store) is not None:
            return BackendPosition(factory, checkpoint, behind)
    return BackendPosition(factory, None, len(record.checkpoints))


@dataclass(frozen=True, slots=True)
class Step:
    """A step from the lowest stage of all stores to the next one, or from the highest to the one before.

    ``written``: the configuration asks for ``target`` already, and the job has to be restarted.
    """

    stage: Stage
    target: Stage
    written: bool


def step_forward(positions: Iterable[StorePosition]) -> Step | None:
    """The next stage; the one of the configuration if that is ahead of a checkpoint. None at the last stage."""
    stages, configured = _stages(positions)
    stage, asked = min(stages), min(configured)
    target = asked if asked > stage else Stage(min(stage + 1, Stage.BLOBS))
    return None if target == stage else Step(stage, target, asked >= target)


def step_back(positions: Iterable[StorePosition]) -> Step | None:
    """The stage before the highest of all checkpoints and the configuration. None at the first stage.

    If some tasks are already back in the stage before, that stage is the target: the interrupted step back continues.
    """
    stages, configured = _stages(positions)
    stage = max(*stages, *configured)
    if stage is Stage.CHANGELOG:
        return None
    return Step(stage, Stage(stage - 1), max(configured) < stage)


def _stages(positions: Iterable[StorePosition]) -> tuple[list[Stage], list[Stage]]:
    found = [position for position in positions if position.stage is not None and position.configured is not None]
    return [p.stage for p in found if p.stage], [p.configured for p in found if p.configured]


def changed_keys(step: Step, overridden: Mapping[str, bool], stores: Collection[str]) -> dict[str, list[str]]:
    """Key → its new list of factories.

    Args:
        overridden: store → whether the configuration has factories of its own for it.
        stores: the stores to move; all keys of the task are changed if it is empty.
    """
    moved = list(stores) or [store for store, own in overridden.items() if own]
    prefixes = [] if stores else ["task"]
    prefixes += [f"stores.{store}" for store in moved]
    return {
        f"{prefix}.{kind}.factories": list(factories)
        for prefix in prefixes
        for kind, factories in (("backup", step.target.backup), ("restore", step.target.restore))
    }


def published_together(records: Sequence[CheckpointRecord]) -> bool:
    """Whether all tasks are published together (Spark) and not each by its own owner. A command such as a rescale also
    publishes the tasks of a consumer loop together: these are the partitions of the input."""
    current = [record.current for record in records]
    together = len({one.checkpoint_id for one in current}) == 1 and len(current) > 1
    by_input = any(is_by_input(record.layout.partitioner) for record in records)
    return (together and not by_input) or any(one.batch is not None for one in current)


def stage_text(position: StorePosition) -> str:
    """For example ``2``, or ``1, asks for 2`` where the configuration is ahead."""
    stage = "other factories" if position.stage is None else str(position.stage.value)
    if position.configured is None or position.configured == position.stage:
        return stage
    return f"{stage}, configured {position.configured.value}"
