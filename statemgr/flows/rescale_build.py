"""Builds the stores of a new layout from a checkpoint while the job runs. Nothing here changes what is current.

Steps, for each store and each group of tasks that exchange keys only with one another (:class:`Unit`):

1. restore the old tasks' stores into a directory of the rescale
2. once for the job: find the partitioner that put their keys where they are
3. split each of them by the partitioner into sorted tables, range by range, and add up the content hash of all keys
4. make each new store of its tables
5. upload the new stores as the first snapshots of the new tasks, and write them to the new changelogs; meanwhile read
   them again: the hashes over all keys must be equal

For a later checkpoint of the job, a second build continues a first one: it restores the old stores next to those of the
first, and brings only the changes between them into the new stores (:mod:`statemgr.flows.rescale_tail`).

The parts run in processes (:mod:`statemgr.flows.rescale_work`), while other groups upload. The result of each step
stays in the directory, with a note, so that a rescale that is run again continues. The directory of a group is named
after the states that it is made from, so it is never used for another checkpoint.

Disk: the groups in progress need room for their old state and twice their new state.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from statemgr.backends.services import Services
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import CorruptFile, InvalidError, MissingBlob
from statemgr.flows.grace_period import shortest_grace_ms
from statemgr.flows.rescale_plan import RescalePlan
from statemgr.flows.rescale_tail import apply_changes, extend_changelog, find_changes
from statemgr.flows.rescale_work import (
    Split,
    Spread,
    check_range,
    fill_changelog,
    fitting,
    make_store,
    restore_source,
    split_range,
)
from statemgr.flows.verify import Submit
from statemgr.ids import attempt_millis, task_name
from statemgr.local import durable, key_ranges, remove, scan_in_batches
from statemgr.local.change_buffer import FrozenChanges
from statemgr.local.directories import StoreDirectories
from statemgr.model.checkpoint import ChangelogMarker, Layout, Marker
from statemgr.model.codecs import decode_prepared, encode_prepared
from statemgr.model.commit import Change, PreparedChanges, PreparedCommit, PreparedStore, StoreSession
from statemgr.model.content import Content
from statemgr.model.hashing import content_hash
from statemgr.model.partitioners import candidates
from statemgr.phases import Phase, announce
from statemgr.ports import BranchingBackupManager, Progress, StoreSnapshot, TopicInfo

log = logging.getLogger(__name__)
#: Smaller stores are not worth several processes.
_WORTH_SPLITTING = 32 * 1024 * 1024
#: Notes of a unit: its new stores, and that they were read again.
_MADE, _CHECKED = "made.note", "checked.note"
_NOTE_SIZE = 64 * 1024 * 1024


@dataclass(frozen=True)
class Unit:
    """A store, and the old and the new tasks that exchange its keys: those that are equal modulo the common divisor."""

    store: str
    sources: Sequence[int]
    tasks: Sequence[int]


@dataclass(frozen=True)
class Counted:
    """What a rescale has read and written: keys, and bytes of the new stores."""

    keys: int = 0
    size: int = 0


class Build:
    """Builds what a plan says. Safe to run again after a crash.

    Args:
        services: those of the old layout; ``new``: those of the new one.
        root: the directory of the rescale, which this process alone uses.
        submit: gives work to ``processes`` other processes.
        chosen: the name of the producers' partitioner, if somebody says it.
        base: the build of an earlier checkpoint that this one continues; it has run.

    Attributes:
        partitioner: the partitioner that was found, when it has run.
        carried: the blobs that the base has uploaded and that this build's commits need.
    """

    def __init__(
        self,
        services: Services,
        new: Services,
        plan: RescalePlan,
        root: Path,
        submit: Submit,
        processes: int,
        chosen: str | None,
        progress: Progress,
        base: Build | None = None,
    ) -> None:
        self._services, self._new, self._plan, self._root = services, new, plan, root
        self._submit, self._processes, self._chosen, self._progress = submit, processes, chosen, progress
        self._base = base
        self._done = 0
        self.partitioner = ""
        self.carried: set[str] = set()

    def run(self, changelogs: Mapping[str, TopicInfo]) -> tuple[Sequence[PreparedCommit], str, Counted]:
        """All steps. ``changelogs``: store → its new changelog.

        Returns: the first commits of the new tasks, without the parts of their publisher; the partitioner; what was
        counted. Raises: InvalidError, ConfigError if the keys do not suit; MissingError, CorruptError if the old state
        cannot be restored, or the new one is not equal; RetryableError, AccessDenied, DiskFull.
        """
        plan = self._plan
        divisor = plan.divisor
        units = [
            Unit(store, range(part, plan.before.tasks, divisor), range(part, plan.tasks, divisor))
            for store in plan.stores
            for part in range(divisor)
        ]
        if self._base is None:
            self._tidy(units)
        self.partitioner = partitioner = self._base.partitioner if self._base else self._partitioner(units)  # 2
        done = partial(self._unit, partitioner, changelogs, len(units))
        with self._services.executors.pool("rescale", self._processes + 1) as pool:
            built = list(pool.map(done, units))
        stored = {place: commit for commits, _ in built for place, commit in commits.items()}
        counted = Counted(sum(c.keys for _, c in built), sum(c.size for _, c in built))
        return [self._commit(task, stored) for task in range(plan.tasks)], partitioner, counted

    # --- notes ----------------------------------------------------------------------------------------------------

    def _directory(self, unit: Unit) -> Path:
        """The directory of a unit, named after everything that decides its content."""
        plan = self._plan
        states = [plan.targets[task_name(source)].stores[unit.store] for source in unit.sources]
        told = [
            unit.store,
            states,
            list(unit.tasks),
            plan.tasks,
            plan.after.generation,
            self._chosen,
            durable.boot_id(),
        ]
        return self._root / content_hash(json.dumps(told).encode()).hex()

    def _tidy(self, units: Sequence[Unit]) -> None:
        """Remove what earlier rescales of other states have left."""
        wanted = {self._directory(unit).name for unit in units}
        for path in sorted(self._root.iterdir()):
            if path.is_dir() and path.name not in wanted:
                remove(path)

    def _once(self, note: Path, make: Callable[[], Any]) -> Any:
        """The result of a step, as JSON: noted by an earlier run, or made now."""
        try:
            return durable.read_note(note, _NOTE_SIZE)
        except (OSError, ValueError):
            made = make()
            durable.write_note(note, made)
            return made

    # --- steps ----------------------------------------------------------------------------------------------------

    def _restored(self, unit: Unit, source: int, within: Path | None = None) -> tuple[Path, int]:
        """Step 1. ``within``: next to the stores of another checkpoint, whose files are used."""
        record = self._plan.records[task_name(source)]
        directory = (within or self._directory(unit)) / f"restored-{source}"
        directory.mkdir(parents=True, exist_ok=True)
        target = self._plan.targets[task_name(source)]
        return self._submit(restore_source, record, target, unit.store, directory).result()

    def _partitioner(self, units: Sequence[Unit]) -> str:
        """Step 2. Raises: InvalidError if none fits, or several do."""
        plan = self._plan
        names: list[str] | None = None
        for unit in units:
            known = candidates(
                plan.before.partitioner, self._services.config.stores[unit.store].key_serde, self._chosen
            )
            names = [name for name in known if names is None or name in names]
            directory = self._directory(unit)
            directory.mkdir(parents=True, exist_ok=True)
            for source in unit.sources:
                if len(names) == 1:
                    break
                look = partial(self._fitting, unit, source, tuple(names))
                fit = self._once(directory / f"fitting-{source}.note", look)
                names = [name for name in names if name in fit]
            if not names:
                raise InvalidError(
                    f"no known partitioner put the keys of store {unit.store!r} into their tasks: {', '.join(known)}",
                    hint="a job can be rescaled if its state has the keys of its input; start a new job (another "
                    "job.id) otherwise",
                    store=unit.store,
                )
        assert names is not None
        if len(names) > 1:
            raise InvalidError(
                f"the state does not show how the producers of the input choose a partition: {' and '.join(names)} fit",
                hint="say it with `statemgr rescale --partitioner`: murmur2 (Java clients, Kafka Streams) or crc32 "
                "(librdkafka's default)",
                job=plan.config.job_name,
            )
        return names[0]

    def _fitting(self, unit: Unit, source: int, names: Sequence[str]) -> list[str]:
        path, _ = self._restored(unit, source)
        recorded, tasks = self._plan.before.partitioner, self._plan.before.tasks
        return self._submit(fitting, unit.store, path, recorded, names, source, tasks).result()

    def _unit(
        self, partitioner: str, changelogs: Mapping[str, TopicInfo], units: int, unit: Unit
    ) -> tuple[Mapping[tuple[int, str], PreparedCommit], Counted]:
        """Steps 1 and 3 to 5. Returns: (task, store) → a commit of this store alone."""
        directory, plan = self._directory(unit), self._plan
        directory.mkdir(parents=True, exist_ok=True)
        spread = Spread(unit.store, plan.before.partitioner, partitioner, plan.before.tasks, plan.tasks)
        changelog = changelogs.get(unit.store)
        if self._base is not None and self._base._directory(unit) != directory:
            commits, counted = self._continued(self._base, unit, spread, directory, changelog)
        else:
            found = self._once(directory / _MADE, partial(self._made, unit, spread, directory))
            kept = {Path(store).name for store, _ in found["stores"].values()}
            for path in sorted(directory.iterdir()):
                if path.is_dir() and path.name not in kept and not path.name.startswith("restored-"):
                    remove(path)
            counted = Counted(found["keys"], sum(size for _, size in found["stores"].values()))
            checking = self._begin_check(spread, directory, found)
            commits = {
                (task, unit.store): self._stored(unit, task, Path(found["stores"][str(task)][0]), changelog)
                for task in unit.tasks
            }  # 5
            self._end_check(unit, directory, found, checking)
        self._done += 1
        self._progress("rescale", self._done, units)
        return commits, counted

    def _made(self, unit: Unit, spread: Spread, directory: Path) -> dict[str, Any]:
        """Steps 1, 3 and 4. Returns: the content of the old stores, and task → its new store's directory and bytes."""
        with self._services.executors.pool("restore", len(unit.sources)) as pool:
            restored = list(pool.map(partial(self._restored, unit), unit.sources))  # 1
        announce(Phase.SPLIT, unit.store, self._services.config.job_key)
        running = []
        for source, (path, size) in zip(unit.sources, restored, strict=True):  # 3
            for number, bounds in enumerate(self._ranges(unit.store, path, size)):
                note = directory / f"split-{source}-{number}-of-{self._processes}.note"
                into = self._new_directory(note)
                running.append((note, self._begin(note, split_range, spread, source, path, bounds, into)))
        splits = [_split(self._ended(note, one, _told)) for note, one in running]
        announce(Phase.MAKE_STORES, unit.store, self._services.config.job_key)
        stores, making = {}, {}
        for task in unit.tasks:  # 4
            tables = [table for split in splits for table in split.tables.get(task, ())]
            path = self._new_directory(directory / f"new-{task}.note")
            making[task] = path, self._submit(make_store, unit.store, tables, path)
        for task, (path, one) in making.items():
            stores[str(task)] = str(path), one.result()
        before = sum((split.content for split in splits), Content())
        return {"keys": before.keys, "total": before.total, "stores": stores}

    def _new_directory(self, note: Path) -> Path:
        """A new directory for each try of a step, because the process of an earlier try may still write to the old
        one."""
        return note.with_name(f"{note.stem}-try-{self._services.ids.token()[:16]}")

    def _begin(self, note: Path, work: Callable[..., Any], *arguments: object) -> Any:
        """Start a step in another process, unless its result is noted."""
        try:
            return durable.read_note(note, _NOTE_SIZE)
        except (OSError, ValueError):
            return self._submit(work, *arguments)

    def _ended(self, note: Path, begun: Any, told: Callable[[Any], Any]) -> Any:
        if isinstance(begun, dict):
            return begun
        found = told(begun.result())
        durable.write_note(note, found)
        return found

    def _ranges(self, store: str, path: Path, size: int) -> list[tuple[bytes | None, bytes | None]]:
        count = self._processes if size > _WORTH_SPLITTING else 1
        return key_ranges(self._services.config.stores[store].type, path, count)

    def _begin_check(self, spread: Spread, directory: Path, found: Mapping[str, Any]) -> list[Future[Content]]:
        """Start to read the new stores again; nothing if they are checked."""
        if durable.exists(directory / _CHECKED):
            return []
        return [
            self._submit(check_range, spread, int(task), Path(path), *bounds)
            for task, (path, size) in found["stores"].items()
            for bounds in self._ranges(spread.store, Path(path), size)
        ]

    def _end_check(
        self, unit: Unit, directory: Path, found: Mapping[str, Any], checking: Sequence[Future[Content]]
    ) -> None:
        """Raises: CorruptFile if the new stores do not have exactly the items of the old ones."""
        if not checking:
            return
        before = Content(found["keys"], found["total"])
        after = sum((part.result() for part in checking), Content())
        if before != after:
            remove(directory)
            raise CorruptFile(
                f"the new stores have {after.keys} keys with the hash {after.hash}, and the old ones {before.keys} "
                f"with {before.hash}",
                hint="nothing was published: run it again",
                store=unit.store,
            )
        durable.write_note(directory / _CHECKED, after.hash)

    # --- a later checkpoint ---------------------------------------------------------------------------------------

    def _continued(
        self, base: Build, unit: Unit, spread: Spread, directory: Path, changelog: TopicInfo | None
    ) -> tuple[dict[tuple[int, str], PreparedCommit], Counted]:
        """The commits of a unit whose old stores have changed since the base was built."""
        found = durable.read_note(base._directory(unit) / _MADE, _NOTE_SIZE)
        with self._services.executors.pool("restore", len(unit.sources)) as pool:
            before = list(pool.map(partial(base._restored, unit), unit.sources))
            after = list(pool.map(partial(self._restored, unit, within=base._directory(unit)), unit.sources))
        comparing = [
            self._submit(
                find_changes, spread, source, old, new, bounds, self._new_directory(directory / "changes.note")
            )
            for source, (old, _), (new, size) in zip(unit.sources, before, after, strict=True)
            if old != new
            for bounds in self._ranges(unit.store, new, size)
        ]
        changes = [one.result() for one in comparing]
        files = [one.file for one in changes]
        applying = {}
        for task in unit.tasks:
            path = self._new_directory(directory / f"new-{task}.note")
            store, _ = found["stores"][str(task)]
            applying[task] = path, self._submit(apply_changes, spread, task, files, Path(store), path)
        applied = {task: one.result() for task, (_, one) in applying.items()}
        if sum(count for count, _ in applied.values()) != sum(one.changes for one in changes):
            raise CorruptFile("changes of the old stores were lost", hint="run it again", store=unit.store)
        commits = {}
        for task, (path, _) in applying.items():
            commit = base._stored(unit, task, Path(found["stores"][str(task)][0]), changelog)
            if applied[task][0]:
                self.carried.update(commit.added_blobs)
                commit = self._store(unit.store, task, path, changelog, _Tail(spread, files, commit))
            commits[task, unit.store] = commit
        keys = found["keys"] + sum(one.grown for one in changes)
        return commits, Counted(keys, sum(size for _, size in applied.values()))

    # --- step 5 ---------------------------------------------------------------------------------------------------

    def _stored(self, unit: Unit, task: int, path: Path, changelog: TopicInfo | None) -> PreparedCommit:
        """Make a new store durable in all its backends, unless that is noted and young enough to be published."""
        note = self._directory(unit) / f"stored-{task}.note"
        try:
            commit = decode_prepared(bytes.fromhex(durable.read_note(note, _NOTE_SIZE)))
        except (OSError, ValueError):
            commit = None
        if commit is not None and self._is_usable(commit, changelog):
            return commit
        announce(Phase.STORE, f"{task_name(task)}/{unit.store}", self._new.config.job_key)
        made = self._store(unit.store, task, path, changelog)
        durable.write_note(note, encode_prepared(made).hex())
        announce(Phase.STORED, f"{task_name(task)}/{unit.store}", self._new.config.job_key)
        return made

    def _is_usable(self, commit: PreparedCommit, changelog: TopicInfo | None) -> bool:
        """Whether all uploads of an earlier run exist, and are so young that they cannot be deleted as garbage before
        the publish."""
        began_ms = attempt_millis(commit.attempt) or 0
        age_ms = self._services.clock.time_ns() // 1_000_000 - began_ms
        if not 0 <= age_ms < shortest_grace_ms(self._services.config) // 4:
            return False
        for store in commit.stores.values():
            marker = store.markers.get(KAFKA_CHANGELOG)
            if isinstance(marker, ChangelogMarker) and (changelog is None or marker.topic_id != changelog.topic_id):
                return False
        for error in self._new.transfer().absent(commit.added_blobs).values() if commit.added_blobs else ():
            if not isinstance(error, MissingBlob):
                raise error
            return False
        return True

    def _store(
        self, store: str, task: int, path: Path, changelog: TopicInfo | None, tail: _Tail | None = None
    ) -> PreparedCommit:
        """Make a new store durable. ``tail``: only what is new since a commit of it."""
        services, config = self._new, self._new.config
        attempt, name = services.ids.attempt_id(), task_name(task)
        filling = None
        factories = config.stores[store].backup_factories
        if KAFKA_CHANGELOG in factories:
            assert changelog is not None
            marker = tail.commit.stores[store].markers.get(KAFKA_CHANGELOG) if tail else None
            if tail is not None and isinstance(marker, ChangelogMarker):
                filling = self._submit(extend_changelog, tail.spread, changelog, task, tail.files, marker, path)
            else:
                filling = self._submit(fill_changelog, store, changelog, task, path)
        made = StoreDirectories(path.with_name(f"{path.name}-unused"), services.clock, services.ids).finished(path)
        snapshot = StoreSnapshot(
            identity=services.identity(name, store),
            state_id=f"{attempt}-{store}",
            attempt=attempt,
            made=made,
            changes=FrozenChanges(StoreSession(), 0, 0, ()),
            whole=_Whole(services, store, path),
            materialize=True,
        )
        markers: dict[str, Marker] = {}
        changes: dict[str, PreparedChanges] = {}
        added: list[str] = []
        for factory in factories:
            if factory == KAFKA_CHANGELOG:
                continue
            manager = services.backup_manager(factory)
            base = tail.commit.stores[store].markers.get(factory) if tail else None
            if base is not None and isinstance(manager, BranchingBackupManager):
                # a lineage of its own: nothing that follows is taken for what followed the base
                base = manager.branch(snapshot.identity, base, together=True).marker
            else:
                base = None
            backup = manager.prepare(snapshot, base, portable=True)
            added += backup.added_blobs
            if backup.marker is not None:
                markers[factory] = backup.marker
            if backup.changes is not None:
                changes[factory] = backup.changes
        if filling is not None:
            markers[KAFKA_CHANGELOG] = filling.result()
        return PreparedCommit(
            config.job_name,
            config.job_id,
            name,
            Layout(0, config.tasks, ""),
            0,
            attempt,
            None,
            None,
            {store: PreparedStore(snapshot.state_id, markers, changes)},
            added_blobs=tuple(added),
        )

    def _commit(self, task: int, stored: Mapping[tuple[int, str], PreparedCommit]) -> PreparedCommit:
        """The first commit of a new task, with all its stores. Its age is that of the oldest store."""
        parts = [stored[task, store] for store in self._plan.stores]
        oldest = min(parts, key=lambda part: attempt_millis(part.attempt) or 0)
        inputs, (attachments, _) = self._plan.inputs[task], self._plan.output
        return replace(
            oldest,
            layout=self._plan.after,
            stores={store: found for part in parts for store, found in part.stores.items()},
            added_blobs=tuple(dict.fromkeys(blob for part in parts for blob in part.added_blobs)),
            input_offsets=inputs.offsets,
            input_topic_ids=inputs.topic_ids,
            attachments=attachments[task],
        )


@dataclass(frozen=True)
class _Tail:
    """The changes of a store since it was made durable in ``commit``."""

    spread: Spread
    files: Sequence[str]
    commit: PreparedCommit


class _Whole:
    """The whole content of a finished store as a change set, read during iteration."""

    def __init__(self, services: Services, store: str, directory: Path) -> None:
        self._config, self._directory = services.config.stores[store], directory

    @property
    def count(self) -> int:
        return sum(1 for _ in self)

    @property
    def size(self) -> int:
        """Bytes on disk: an estimate of the bytes of keys and values."""
        return sum(file.stat().st_size for file in self._directory.iterdir())

    def __iter__(self) -> Iterator[Change]:
        for batch in scan_in_batches(self._directory, self._config.rocksdb, None, None, 1000):
            yield from batch


def _told(split: Split) -> dict[str, Any]:
    """A split as JSON."""
    return {"keys": split.content.keys, "total": split.content.total, "tables": dict(split.tables)}


def _split(told: Mapping[str, Any]) -> Split:
    tables = {int(task): tuple(paths) for task, paths in told["tables"].items()}
    return Split(Content(told["keys"], told["total"]), tables)
