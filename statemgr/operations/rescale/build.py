"""Builds the stores of a new layout from a checkpoint while the job runs. Nothing here changes what is current.

Steps, for each store and each group of tasks that exchange keys only with one another (:class:`Unit`):

1. restore the old tasks' stores into a directory of the rescale
2. once for the job: find the partitioner that put their keys where they are
3. split each of them by the partitioner into sorted tables, range by range, and add up the content hash of all keys
4. make each new store of its tables
5. upload the new stores as the first snapshots of the new tasks, and write them to the new changelogs
   (:mod:`statemgr.operations.rescale.one_store`); meanwhile read them again: the hashes over all keys must be equal

What the job commits later is brought into the new stores by ``catch_up``.

The parts run in processes (``work``), while other groups upload; or another machine takes all these steps for a group
(``orders``). The result of each step stays in the directory, with a note, so that a rescale that is run again
continues, whichever of the two ways it takes. The directory of a group is named after the states that it is made
from, so it is never used for another checkpoint.

Disk: the groups in progress need room for their old state and twice their new state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from statemgr.errors import CorruptError, CorruptFile, InvalidError
from statemgr.ids import task_name
from statemgr.local import durable, remove
from statemgr.model.content import Content
from statemgr.model.hashing import content_hash
from statemgr.model.keys.partitioners import Hashes, candidates
from statemgr.operations.rescale.built import STORED_AT_ONCE, Built, BuiltUnit, NewStore, Unit, Workshop
from statemgr.operations.rescale.one_store import StoredStore
from statemgr.operations.rescale.orders import Order, answered
from statemgr.operations.rescale.plan import RescalePlan
from statemgr.operations.rescale.work import Split, Spread, check_keys, check_range, fitting, make_store, split_range
from statemgr.phases import Phase, announce
from statemgr.ports import Moment, TopicInfo

#: Notes of a unit: its new stores; that they were read again; and the answer of another machine that has built it.
_MADE, _CHECKED, _ANSWER = "made.note", "checked.note", "answer.note"
_NOTE_SIZE = 64 * 1024 * 1024
#: The errors of a note that is not there, is damaged, or is that of another version.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, CorruptError)


class Build:
    """Builds what a plan says. Safe to run again after a crash.

    Args:
        as_of: a moment before the plan's checkpoint was read.
        chosen: the name of the producers' partitioner, if somebody says it.
    """

    def __init__(self, workshop: Workshop, plan: RescalePlan, as_of: Moment, chosen: str | None) -> None:
        self._workshop, self._plan, self._as_of, self._chosen = workshop, plan, as_of, chosen
        self._services, self._submit = workshop.services, workshop.submit
        self._done = 0

    def run(self, changelogs: Mapping[str, TopicInfo]) -> Built:
        """All steps. ``changelogs``: store → its new changelog.

        Raises: InvalidError, ConfigError if the keys do not suit; MissingError, CorruptError if the old state
        cannot be restored, or the new one is not equal; RetryableError, AccessDenied, DiskFull.
        """
        plan, units = self._plan, self._units
        self._tidy(units)
        threads = self._workshop.processes + 1
        if self._workshop.elsewhere is not None:
            self._services.in_parallel("rescale", self._look, units, threads)
        nothing = Built(plan, self._as_of, self._partitioner(units), ())  # 2

        def built(unit: Unit) -> BuiltUnit:
            made = self._unit(unit, nothing.spread(unit.store), changelogs.get(unit.store))
            self._done += 1
            self._workshop.progress("rescale", self._done, len(units))
            return made

        return replace(nothing, units=self._services.in_parallel("rescale", built, units, threads))

    def check(self) -> tuple[str, int]:
        """Steps 1 and 2, and that the partitioner puts every key where it is. :meth:`run` continues with what is
        restored.

        Returns: the partitioner, and the number of keys. Raises: as :meth:`run`.
        """
        units, work = self._units, self._workshop
        self._tidy(units)
        nothing = Built(self._plan, self._as_of, self._partitioner(units), ())

        def checked(unit: Unit, source: int) -> int:
            directory = self._directory(unit)
            directory.mkdir(parents=True, exist_ok=True)
            path, size = work.restored(self._plan, unit.store, source, directory)
            looking = [
                self._submit(check_keys, nothing.spread(unit.store), source, path, *bounds)
                for bounds in work.ranges(unit.store, path, size)
            ]
            return sum(one.result() for one in looking)

        sources = [(unit, source) for unit in units for source in unit.sources]
        counts = work.services.in_parallel("rescale", lambda one: checked(*one), sources, work.processes + 1)
        return nothing.partitioner, sum(counts)

    @property
    def _units(self) -> Sequence[Unit]:
        plan, divisor = self._plan, self._plan.divisor
        return [
            Unit(store, range(part, plan.before.tasks, divisor), range(part, plan.tasks, divisor))
            for store in plan.stores
            for part in range(divisor)
        ]

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
        return self._workshop.root / content_hash(json.dumps(told).encode()).hex()

    def _tidy(self, units: Sequence[Unit]) -> None:
        """Remove what earlier rescales of other states have left."""
        wanted = {self._directory(unit).name for unit in units}
        for path in sorted(self._workshop.root.iterdir()):
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

    def _partitioner(self, units: Sequence[Unit]) -> str:
        """Step 2. Raises: InvalidError if none fits, or several do."""
        plan = self._plan
        names: list[str] | None = None
        effects: dict[str, tuple[str, ...]] = {}
        for unit in units:
            known = self._candidates(unit)
            names = [name for name in known if names is None or name in names]
            directory = self._directory(unit)
            directory.mkdir(parents=True, exist_ok=True)
            for source in unit.sources:
                if len(names) == 1:
                    break
                look = partial(self.fitting, unit, source, tuple(names))
                fit = self._once(directory / _fitting_note(source), look)
                names = [name for name in names if name in fit]
                effects |= {name: (*effects.get(name, ()), fit[name]) for name in names}
            if not names:
                raise InvalidError(
                    f"no known partitioner put the keys of store {unit.store!r} into their tasks: {', '.join(known)}",
                    hint="a job can be rescaled if its state has the keys of its input; start a new job (another "
                    "job.id) otherwise",
                    store=unit.store,
                )
        assert names is not None
        # several may compute the same: the simplest of these counts
        names = list({effects.get(name): name for name in reversed(names)}.values())[::-1]
        if len(names) > 1:
            raise InvalidError(
                f"the state does not show how the producers of the input choose a partition: {' and '.join(names)} fit",
                hint="say it with `statemgr rescale --partitioner`: murmur2 (Java clients, Kafka Streams) or crc32 "
                "(librdkafka's default), with quix- before it for the keys of a store that Quix Streams wrote",
                job=plan.config.job_name,
            )
        return names[0]

    def _candidates(self, unit: Unit) -> Mapping[str, Hashes]:
        config = self._services.config.stores[unit.store]
        return candidates(self._plan.before.partitioner, config.key_serde, self._chosen, self._plan.grouping)

    def _look(self, unit: Unit) -> None:
        """For step 2: note which partitioners fit, as another machine sees it, if there are several."""
        names, directory = tuple(self._candidates(unit)), self._directory(unit)
        directory.mkdir(parents=True, exist_ok=True)
        unknown = [source for source in unit.sources if not durable.exists(directory / _fitting_note(source))]
        if len(names) > 1 and unknown:
            for source, fit in self._ordered(replace(unit, sources=unknown), names).items():
                durable.write_note(directory / _fitting_note(int(source)), fit)

    def fitting(self, unit: Unit, source: int, names: Sequence[str]) -> dict[str, str]:
        """Which of several partitioners put the keys of an old task into it (``work.fitting``)."""
        path, _ = self._workshop.restored(self._plan, unit.store, source, self._directory(unit))
        recorded, tasks = self._plan.before.partitioner, self._plan.before.tasks
        return self._submit(fitting, unit.store, path, recorded, names, source, tasks).result()

    def _unit(self, unit: Unit, spread: Spread, changelog: TopicInfo | None) -> BuiltUnit:
        """Steps 1 and 3 to 5: done by an earlier run, by another machine, or here."""
        directory, found = self._directory(unit), self._noted(unit, changelog)
        if found is not None:
            return found
        if self._workshop.elsewhere is None or durable.exists(directory / _MADE):
            return self.unit(unit, spread, changelog)
        announce(Phase.SPLIT, unit.store, self._services.config.job_key)
        told = self._ordered(unit, [spread.partitioner], changelog)
        durable.write_note(directory / _ANSWER, told)
        for task in unit.tasks:
            announce(Phase.STORED, f"{task_name(task)}/{unit.store}", self._workshop.new.config.job_key)
        return answered(unit, directory, told)

    def _ordered(self, unit: Unit, partitioners: Sequence[str], changelog: TopicInfo | None = None) -> Any:
        """The answer of another machine, from JSON."""
        assert self._workshop.elsewhere is not None
        order = Order(self._plan, self._workshop.new.config, unit, partitioners, changelog)
        return json.loads(self._workshop.elsewhere(order.to_json()))

    def _noted(self, unit: Unit, changelog: TopicInfo | None) -> BuiltUnit | None:
        """A unit that another machine has built for an earlier run, if it is young enough to be published."""
        directory, stores = self._directory(unit), self._workshop.new_stores
        try:
            found = answered(unit, directory, durable.read_note(directory / _ANSWER, _NOTE_SIZE))
        except _UNUSABLE:
            return None
        return found if all(stores.is_usable(one.stored, changelog) for one in found.stores.values()) else None

    def unit(self, unit: Unit, spread: Spread, changelog: TopicInfo | None) -> BuiltUnit:
        """Steps 1 and 3 to 5 on this machine. ``changelog``: the store's new one. Raises: as :meth:`run`."""
        directory = self._directory(unit)
        directory.mkdir(parents=True, exist_ok=True)
        found = self._once(directory / _MADE, partial(self._made, unit, spread, directory))
        kept = {Path(store).name for store, _ in found["stores"].values()}
        for path in sorted(directory.iterdir()):
            if path.is_dir() and path.name not in kept and not path.name.startswith("restored-"):
                remove(path)
        checking = self._begin_check(spread, directory, found)

        def stored(task: int) -> NewStore:
            path, size = found["stores"][str(task)]
            return NewStore(Path(path), size, self._stored(unit, task, Path(path), changelog))

        made = self._services.in_parallel("store", stored, unit.tasks, STORED_AT_ONCE)
        stores = dict(zip(unit.tasks, made, strict=True))
        self._end_check(unit, directory, found, checking)
        return BuiltUnit(unit, directory, Content(found["keys"], found["total"]), stores)

    def _made(self, unit: Unit, spread: Spread, directory: Path) -> dict[str, Any]:
        """Steps 1, 3 and 4. Returns: the content of the old stores, and task → its new store's directory and bytes."""
        work = self._workshop
        restore = partial(work.restored, self._plan, unit.store, directory=directory)
        restored = self._services.in_parallel("restore", restore, unit.sources, len(unit.sources))  # 1
        announce(Phase.SPLIT, unit.store, self._services.config.job_key)
        running = []
        for source, (path, size) in zip(unit.sources, restored, strict=True):  # 3
            for number, bounds in enumerate(work.ranges(unit.store, path, size)):
                note = directory / f"split-{source}-{number}-of-{work.processes}.note"
                into = work.new_directory(note)
                running.append((note, self._begin(note, split_range, spread, source, path, bounds, into)))
        splits = [_split(self._ended(note, one, _told)) for note, one in running]
        announce(Phase.MAKE_STORES, unit.store, self._services.config.job_key)
        stores, making = {}, {}
        for task in unit.tasks:  # 4
            tables = [table for split in splits for table in split.tables.get(task, ())]
            path = work.new_directory(directory / f"new-{task}.note")
            making[task] = path, self._submit(make_store, unit.store, tables, path)
        for task, (path, one) in making.items():
            stores[str(task)] = str(path), one.result()
        before = sum((split.content for split in splits), Content())
        return {"keys": before.keys, "total": before.total, "stores": stores}

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

    def _stored(self, unit: Unit, task: int, path: Path, changelog: TopicInfo | None) -> StoredStore:
        """Step 5 of a new store, unless it is noted and young enough to be published."""
        note, stores = self._directory(unit) / f"stored-{task}.note", self._workshop.new_stores
        try:
            stored = StoredStore.from_json(durable.read_note(note, _NOTE_SIZE))
        except _UNUSABLE:
            stored = None
        if stored is not None and stores.is_usable(stored, changelog):
            return stored
        subject, job = f"{task_name(task)}/{unit.store}", self._workshop.new.config.job_key
        announce(Phase.STORE, subject, job)
        made = stores.store(unit.store, task, path, changelog)
        durable.write_note(note, made.to_json())
        announce(Phase.STORED, subject, job)
        return made

    def _begin_check(self, spread: Spread, directory: Path, found: Mapping[str, Any]) -> list[Future[Content]]:
        """Start to read the new stores again; nothing if they are checked."""
        if durable.exists(directory / _CHECKED):
            return []
        return [
            self._submit(check_range, spread, int(task), Path(path), *bounds)
            for task, (path, size) in found["stores"].items()
            for bounds in self._workshop.ranges(spread.store, Path(path), size)
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


def _fitting_note(source: int) -> str:
    return f"fitting-{source}.note"


def _told(split: Split) -> dict[str, Any]:
    """A split as JSON."""
    return {"keys": split.content.keys, "total": split.content.total, "tables": dict(split.tables)}


def _split(told: Mapping[str, Any]) -> Split:
    tables = {int(task): tuple(paths) for task, paths in told["tables"].items()}
    return Split(Content(told["keys"], told["total"]), tables)
