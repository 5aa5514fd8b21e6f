"""Opening, the part that a task and a whole job share: topics, fencing, reading, and what must be filled anew.

Steps (DESIGN of the protocol: fence, then read):

1. verify the topics, creating those that may be created
2. fence: the own transactional ID first, then every ID of the other kind that covers the same tasks
3. read the checkpoint topic to the end captured after the fencing
4. check the layout, and that nothing starts empty silently
5. look at the changelogs: refuse those that hold what no checkpoint of the job explains; one with a tail after the
   job's own marker is filled by the next commit
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce

from statemgr.errors import LayoutMismatch, MissingError, PermissionNeeded
from statemgr.flows.commit import Refill
from statemgr.flows.empty_start import refuse_lost_checkpoint, refuse_lost_job
from statemgr.flows.parts import Parts
from statemgr.flows.record_limits import check_config
from statemgr.kafka.publisher import TransactionalPublisher
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
from statemgr.model.checkpoint import CheckpointRecord, Layout, Marker
from statemgr.model.permissions import NO_PERMISSIONS, Permissions, Permit
from statemgr.phases import Phase, announce
from statemgr.ports import CheckpointLog, GuardedBackupManager, Publisher, StoreIdentity

log = logging.getLogger(__name__)
_FENCE_PARALLELISM = 8


def prepare_topics(parts: Parts, *, allow_empty_start: bool) -> None:
    """Step 1. Raises: ConfigError when the records cannot fit; TopicMisconfigured with the mending command;
    PermissionNeeded when the checkpoint topic is
    gone while state exists."""
    config = parts.config
    check_config(config)
    with TopicAdmin(config) as admin:
        specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
        if not allow_empty_start and not admin.exists(config.checkpoint_topic):
            try:
                refuse_lost_job(parts)
            except PermissionNeeded:
                if not admin.exists(config.checkpoint_topic):
                    raise  # else another process has made it meanwhile, and published
        admin.create_missing(specs)
        admin.verify(specs)


def fence(parts: Parts, own: Publisher, others: Sequence[str]) -> None:
    """Step 2. ``others`` are the transactional IDs of the other kind of owner."""
    announce(Phase.FENCE, parts.config.job_name, parts.config.job_key)
    own.fence()
    fence_ids(parts, others)


def fence_ids(parts: Parts, transactional_ids: Sequence[str]) -> None:
    """Take transactional IDs over and let them go: whoever holds them is fenced."""

    def fence_one(transactional_id: str) -> None:
        other = TransactionalPublisher(parts.config, transactional_id, parts.clock)
        try:
            other.fence()
        finally:
            other.close()

    in_parallel(fence_one, transactional_ids)


def in_parallel(fence_one: Callable[[str], None], names: Sequence[str]) -> None:
    """Fence several owners at once. Raises: the first error, when all have ended."""
    with ThreadPoolExecutor(_FENCE_PARALLELISM, thread_name_prefix="statemgr-fence") as pool:
        list(pool.map(fence_one, names))


@dataclass(frozen=True)
class Found:
    """What the topic has: the records of tasks, the layout with its generation, and what each task's opening may do."""

    records: dict[str, CheckpointRecord | None]
    layout: Layout
    permissions: Mapping[str, Permissions]
    permits: tuple[Permit, ...]

    @property
    def permitted(self) -> Permissions:
        """What the opening of any of the tasks may do."""
        return reduce(operator.or_, self.permissions.values(), NO_PERMISSIONS)


def read_records(parts: Parts, log: CheckpointLog, layout: Layout, tasks: Collection[str], given: Permissions) -> Found:
    """Steps 3 and 4. The layout of every task is checked, not only of those that are asked for.

    Args:
        given: what the caller permits; what waits on the topic for a task is added.

    Raises: LayoutMismatch, PermissionNeeded, CorruptRecord, UnavailableError.
    """
    announce(Phase.READ_TOPIC, ", ".join(tasks), parts.config.job_key)
    found = log.read()
    try:
        return _checked(parts, log, found, layout, tasks, given)
    except PermissionNeeded:
        # what says that there was state may be newer than the read: the first publish of another process
        now = log.read()
        if now.keys() == found.keys():
            raise
        return _checked(parts, log, now, layout, tasks, given)


def _checked(
    parts: Parts,
    log: CheckpointLog,
    found: Mapping[str, CheckpointRecord],
    layout: Layout,
    tasks: Collection[str],
    given: Permissions,
) -> Found:
    for published in found.values():
        check_layout(parts, published, layout)
    records = {task: found.get(task) for task in tasks}
    permits = tuple(permit for permit in log.permits() if permit.task in records)
    permissions = dict.fromkeys(tasks, given)
    for permit in permits:
        permissions[permit.task] |= permit.permissions
    lost = [task for task in tasks if records[task] is None and not permissions[task].allow_empty_start]
    if lost and not found:
        refuse_lost_job(parts)
    for task in lost:
        refuse_lost_checkpoint(parts, log, task, look_at_blobs=bool(found))
    generations = {record.layout.generation for record in found.values()}
    layout = replace(layout, generation=max(generations, default=layout.generation))
    return Found(records, layout, permissions, permits)


def check_layout(parts: Parts, record: CheckpointRecord, layout: Layout) -> None:
    """Raises: LayoutMismatch when the checkpoint was made with another number of tasks or partitioner."""
    was = record.layout
    if was.tasks == 0:
        return  # older software (version 1) did not record it
    if (was.tasks, was.partitioner) == (layout.tasks, layout.partitioner):
        return
    raise LayoutMismatch(
        f"checkpoint {record.current.checkpoint_id} was made with {was.tasks} tasks partitioned by "
        f"{was.partitioner!r}; the job now has {layout.tasks} and {layout.partitioner!r}",
        hint=f"set job.tasks = {was.tasks} and keep the partitioner; keys would be looked for in the wrong task",
        job=parts.config.job_name,
        task=record.task,
    )


def guard_targets(
    parts: Parts, records: Mapping[str, CheckpointRecord | None], permissions: Mapping[str, Permissions]
) -> dict[str, Refill]:
    """Step 5: task → backends and stores that hold committed changes beyond the checkpoint.

    They are left out of the restored state and overwritten by the fill, tombstones included.

    Raises: PermissionNeeded when a fill would delete what no checkpoint of the job explains.
    """
    found: dict[str, Refill] = {}
    for task, record in records.items():
        pairs = set()
        for store in parts.config.stores.values():
            for factory in store.backup_factories:
                marker = record.current.marker(factory, store.name) if record else None
                has_tail = marker is not None and _has_tail(parts, task, store.name, factory, marker)
                if has_tail:
                    pairs.add((factory, store.name))
                if has_tail or marker is None:
                    _guard_fill(parts, parts.identity(task, store.name), factory, record, permissions[task])
        found[task] = frozenset(pairs)
    return found


def _guard_fill(
    parts: Parts, identity: StoreIdentity, factory: str, record: CheckpointRecord | None, permissions: Permissions
) -> None:
    """The backend is filled by the next commit. Raises: PermissionNeeded."""
    manager = parts.backup_manager(factory)
    if not isinstance(manager, GuardedBackupManager):
        return
    current = record.current if record else None
    try:
        manager.guard_fill(
            identity,
            current.marker(factory, identity.store) if current else None,
            current.retired_changelogs.get(identity.store, ()) if current else (),
            overwrite=permissions.overwrite_changelog,
        )
    except MissingError:
        return  # there is nothing yet


def _has_tail(parts: Parts, task: str, store: str, factory: str, marker: Marker) -> bool:
    try:
        return parts.backup_manager(factory).has_tail(parts.identity(task, store), marker)
    except MissingError as error:
        log.warning("task %s store %s: %s is filled anew: %s", task, store, factory, error)
        return True
