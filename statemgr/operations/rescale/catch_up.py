"""Brings what a job has committed since a build into the new stores. Nothing here changes what is current.

Steps, for each store and group of tasks whose state has changed. If another machine has built the new stores, this one
restores them first.

1. read the changes since the build from a backend: segments, or records of a changelog. If no backend has them, because
   a snapshot has taken their place, restore both states of the old stores and compare them
2. apply them to copies of the new stores. The content hash of each goes from the old values to the new ones
3. store what is new: the files of the new stores that were not there before, and the changes for the new changelogs

The time depends on the number of changes only, unless states are compared (:mod:`statemgr.operations.rescale.tail`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from statemgr.errors import CorruptFile
from statemgr.ids import task_name
from statemgr.operations.rescale.built import STORED_AT_ONCE, Built, BuiltUnit, NewStore, Workshop
from statemgr.operations.rescale.one_store import Tail
from statemgr.operations.rescale.plan import RescalePlan
from statemgr.operations.rescale.tail import Found, apply_changes, find_changes, read_changes
from statemgr.phases import Phase, announce
from statemgr.ports import Moment, TopicInfo


class CatchUp:
    """One catching up, from a build to a later checkpoint.

    Args:
        plan: the plan of the later checkpoint.
        as_of: a moment before that checkpoint was read.

    Attributes:
        compared: whether states had to be compared.
    """

    def __init__(self, workshop: Workshop, plan: RescalePlan, as_of: Moment) -> None:
        self._workshop, self._plan, self._as_of = workshop, plan, as_of
        self.compared = False

    def run(self, built: Built, changelogs: Mapping[str, TopicInfo]) -> Built:
        """Returns: the new layout at the later checkpoint.

        Raises: as :meth:`statemgr.operations.rescale.build.Build.run`.
        """
        work = self._workshop
        later = partial(self._later, built, changelogs)
        units = work.services.in_parallel("rescale", later, built.units, work.processes + 1)
        return replace(built, plan=self._plan, as_of=self._as_of, units=units)

    def _later(self, built: Built, changelogs: Mapping[str, TopicInfo], before: BuiltUnit) -> BuiltUnit:
        work, unit = self._workshop, before.unit
        store = unit.store
        changed = [s for s in unit.sources if _state(built.plan, store, s) != _state(self._plan, store, s)]
        if not changed:
            return before
        announce(Phase.CATCH_UP, store, work.services.config.job_key)
        before = work.brought_here(before)
        found = self._changes(built, before, changed)  # 1
        files = [one.file for one in found]
        spread = built.spread(store)
        applying = {}
        for task in unit.tasks:  # 2
            path, old_path = work.new_directory(before.directory / f"later-{task}.note"), before.stores[task].path
            applying[task] = path, work.submit(apply_changes, spread, task, files, old_path, path)
        content, stores, count = before.content, dict[int, NewStore](), 0
        for task, (path, one) in applying.items():
            applied, old = one.result(), before.stores[task]
            count += applied.changes
            content += applied.content
            stores[task] = NewStore(path, applied.size, old.stored) if applied.changes else old
        if count != sum(one.changes for one in found):
            raise CorruptFile("changes of the old stores were lost", hint="run it again", store=store)

        def stored(task: int) -> NewStore:
            made = stores[task]
            if made is before.stores[task]:
                return made
            tail = Tail(spread, files, made.stored)
            assert made.path is not None
            return replace(made, stored=work.new_stores.store(store, task, made.path, changelogs.get(store), tail))

        done = work.services.in_parallel("store", stored, stores, STORED_AT_ONCE)
        return replace(before, content=content, stores=dict(zip(stores, done, strict=True)))

    def _changes(self, built: Built, before: BuiltUnit, changed: Sequence[int]) -> list[Found]:
        """Step 1, for those of the old tasks whose state has changed."""
        work, spread = self._workshop, built.spread(before.unit.store)
        note = before.directory / "changes.note"
        reading = {}
        for source in changed:
            states = [plan.targets[task_name(source)] for plan in (built.plan, self._plan)]
            into = work.new_directory(note)
            reading[source] = work.submit(read_changes, spread, source, *states, built.as_of, into)
        found: list[Found] = []
        for source, one in reading.items():
            read = one.result()
            found += self._compared(built, before, source) if read is None else [read]
        return found

    def _compared(self, built: Built, before: BuiltUnit, source: int) -> list[Found]:
        self.compared = True
        work, store, spread = self._workshop, before.unit.store, built.spread(before.unit.store)
        old, _ = work.restored(built.plan, store, source, before.directory)
        new, size = work.restored(self._plan, store, source, before.directory)
        if old == new:
            return []
        comparing = [
            work.submit(
                find_changes, spread, source, old, new, bounds, work.new_directory(before.directory / "changes.note")
            )
            for bounds in work.ranges(store, new, size)
        ]
        return [one.result() for one in comparing]


def _state(plan: RescalePlan, store: str, source: int) -> str:
    """The state ID of an old task's store."""
    return plan.targets[task_name(source)].stores[store]
