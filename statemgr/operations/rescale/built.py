"""What a rescale has built: the new stores of a layout, and where they are durable. Also what building takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from statemgr.errors import MissingState, RetryableError
from statemgr.ids import attempt_millis, task_name
from statemgr.local import key_ranges
from statemgr.model.commit import PreparedCommit
from statemgr.model.content import Content
from statemgr.operations.rescale.one_store import NewStores, StoredStore
from statemgr.operations.rescale.plan import RescalePlan
from statemgr.operations.rescale.work import Spread, restore_source, restore_stored
from statemgr.ports import Moment, Progress, TopicInfo
from statemgr.services import Services, Submit

#: Smaller stores are not worth several processes.
_WORTH_SPLITTING = 32 * 1024 * 1024
#: New stores of a unit that are stored at a time.
STORED_AT_ONCE = 4
#: New changelogs that are checked at a time.
_CHECKED_AT_ONCE = 8


@dataclass(frozen=True)
class Unit:
    """A store, and the old and the new tasks that exchange its keys: those that are equal modulo the common divisor."""

    store: str
    sources: Sequence[int]
    tasks: Sequence[int]


@dataclass(frozen=True)
class NewStore:
    """The finished directory of a new task's store (None: it is on another machine), its bytes, and where it is
    durable."""

    path: Path | None
    size: int
    stored: StoredStore


@dataclass(frozen=True)
class BuiltUnit:
    """The new stores of a unit by task, what they have together, the directory of everything that they are made of,
    and whether another machine has built them."""

    unit: Unit
    directory: Path
    content: Content
    stores: Mapping[int, NewStore]
    elsewhere: bool = False


@dataclass(frozen=True)
class Built:
    """A whole new layout at the checkpoint of a plan.

    Attributes:
        as_of: a moment at which that checkpoint was the newest one.
        partitioner: the partitioner that was found.
    """

    plan: RescalePlan
    as_of: Moment
    partitioner: str
    units: Sequence[BuiltUnit]

    @property
    def keys(self) -> int:
        return sum(built.content.keys for built in self.units)

    @property
    def size(self) -> int:
        """Bytes of the new stores."""
        return sum(store.size for built in self.units for store in built.stores.values())

    @property
    def carried(self) -> set[str]:
        """The blobs that the commits need and do not add."""
        return {blob for built in self.units for store in built.stores.values() for blob in store.stored.carried}

    def spread(self, store: str) -> Spread:
        """How the keys of a store are spread."""
        before = self.plan.before
        return Spread(store, before.partitioner, self.partitioner, before.tasks, self.plan.tasks, self.plan.grouping)

    def commits(self) -> list[PreparedCommit]:
        """The first commits of the new tasks with all their stores, without the parts of their publisher."""
        return [self._commit(task) for task in range(self.plan.tasks)]

    @cached_property
    def _stored(self) -> Mapping[tuple[int, str], PreparedCommit]:
        return {
            (task, built.unit.store): store.stored.commit
            for built in self.units
            for task, store in built.stores.items()
        }

    def _commit(self, task: int) -> PreparedCommit:
        """Its age is that of the oldest store."""
        parts = [self._stored[task, store] for store in self.plan.stores]
        oldest = min(parts, key=lambda part: attempt_millis(part.attempt) or 0)
        inputs, (attachments, _) = self.plan.inputs[task], self.plan.output
        return replace(
            oldest,
            layout=self.plan.after,
            stores={store: found for part in parts for store, found in part.stores.items()},
            added_blobs=tuple(dict.fromkeys(blob for part in parts for blob in part.added_blobs)),
            input_offsets=inputs.offsets,
            input_topic_ids=inputs.topic_ids,
            attachments=attachments[task],
        )


@dataclass(frozen=True)
class Workshop:
    """What building takes: the services of both layouts, processes, and a directory that this process alone uses.

    Attributes:
        services: those of the old layout; ``new``: those of the new one.
        submit: gives work to ``processes`` other processes.
        elsewhere: gives orders (``orders``) to other machines; None: all work is done here.
    """

    services: Services
    new: Services
    root: Path
    submit: Submit
    processes: int
    progress: Progress
    elsewhere: Callable[[str], str] | None = None

    @property
    def new_stores(self) -> NewStores:
        return NewStores(self.new, self.submit)

    def restored(self, plan: RescalePlan, store: str, source: int, directory: Path) -> tuple[Path, int]:
        """Restore an old store at the checkpoint of a plan, next to its other states in ``directory``.

        Returns: the finished directory, and its bytes.
        """
        target, within = plan.targets[task_name(source)], directory / f"restored-{source}"
        within.mkdir(parents=True, exist_ok=True)
        return self.submit(restore_source, plan.records[task_name(source)], target, store, within).result()

    def brought_here(self, built: BuiltUnit) -> BuiltUnit:
        """A unit with all its new stores on this machine: those of another machine are restored, and hashed again."""

        def restored(task: int, made: NewStore) -> NewStore:
            within = built.directory / f"here-{task}"
            within.mkdir(exist_ok=True)
            path = self.submit(restore_stored, built.unit.store, made.stored.commit, within).result()
            return NewStore(path, made.size, replace(made.stored, tables={}))

        with self.services.executors.pool("restore", max(len(built.stores), 1)) as pool:
            running = {task: pool.submit(restored, task, one) for task, one in built.stores.items() if one.path is None}
        return replace(built, stores={**built.stores, **{task: one.result() for task, one in running.items()}})

    def check_changelogs(self, built: Built, changelogs: Mapping[str, TopicInfo]) -> None:
        """Check that the new changelogs are the topics that this rescale has made, and that they end with the stores
        that other machines have built. One of these may have been given up while it still ran, and another one have
        built the same.

        Raises: RetryableError, UnavailableError, AccessDenied.
        """
        for name, made in changelogs.items():
            try:
                found = self.new.changelog().describe(made.name)
            except MissingState:
                found = None
            if found is None or found.topic_id != made.topic_id:
                raise RetryableError(
                    "another rescale has deleted the new changelog; nothing was published",
                    hint="run it again when no other rescale of the job runs, also on other machines",
                    store=name,
                    topic=made.name,
                )

        def check(store: str, task: int, stored: StoredStore) -> None:
            if not self.new_stores.is_at_end(stored, changelogs.get(store)):
                raise RetryableError(
                    "another try to build a new store has written to its changelog; nothing was published",
                    hint="run it again: it builds this store again",
                    task=task_name(task),
                    store=store,
                )

        with self.services.executors.pool("check", _CHECKED_AT_ONCE) as pool:
            checking = [
                pool.submit(check, unit.unit.store, task, made.stored)
                for unit in built.units
                for task, made in unit.stores.items()
                if unit.elsewhere
            ]
        for one in checking:
            one.result()

    def ranges(self, store: str, path: Path, size: int) -> list[tuple[bytes | None, bytes | None]]:
        """Ranges of keys of a finished store, one for each process if it is large."""
        count = self.processes if size > _WORTH_SPLITTING else 1
        return key_ranges(self.services.config.stores[store].type, path, count)

    def new_directory(self, note: Path) -> Path:
        """A new directory for each try of a step, because the process of an earlier try may still write to the old
        one."""
        return note.with_name(f"{note.stem}-try-{self.services.ids.token()[:16]}")
