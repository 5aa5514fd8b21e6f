"""Opening: the part that a task and a whole job share.

Steps (fence first, then read):

1. verify the topics, and create missing ones if that is allowed
2. fence older owners (:meth:`statemgr.flows.owner.Owner.take`)
3. read the checkpoint topic to the end that it had after the fencing
4. check the layout, that nothing starts empty silently, and that no change of the configuration loses state
5. check the changelogs: refuse one with records that no checkpoint of the job explains; let the next commit fill one
   that has a tail after the job's own marker
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import reduce

from statemgr.errors import LayoutMismatch, MissingError, PermissionNeeded
from statemgr.flows.committing.commit import Refill
from statemgr.flows.committing.limits import check_config
from statemgr.flows.opening.opening_checks import (
    check_changes,
    refuse_lost_checkpoint,
    refuse_lost_job,
    refuse_unrestorable,
)
from statemgr.flows.owner import WAITING_AT_ONCE, Owner
from statemgr.flows.published import Published
from statemgr.kafka.topics import TopicAdmin, TopicProblem, changelog_topic_specs, checkpoint_topic_spec
from statemgr.local.machine import moment
from statemgr.model.checkpoint import CheckpointRecord, Layout, Marker
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions, Permit
from statemgr.model.keys.partitioners import is_by_input
from statemgr.phases import Phase, announce
from statemgr.ports import CheckpointLog, Moment, StoreIdentity
from statemgr.services import Services

log = logging.getLogger(__name__)
#: Settings with which brokers may lose checkpoints.
_MAY_LOSE = frozenset({"cleanup.policy", "unclean.leader.election.enable"})


class JobTopics:
    """The job's own topics. Safe to use from many threads.

    Attributes:
        wrong: the problems of the last look.
        unsafe: why the brokers may lose checkpoints, the only record of what is current, as of the last look; None if
            they do not. Nobody publishes then.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock = threading.Lock()
        self._ready = False
        self._looking: TopicAdmin | None = None
        self.wrong: tuple[TopicProblem, ...] = ()
        self.unsafe: TopicProblem | None = None

    def ensure(self, *, allow_empty_start: bool) -> None:
        """Step 1, once per process.

        Raises: ConfigError if the records cannot fit; TopicMisconfigured with the command that fixes the topic;
        PermissionNeeded if the checkpoint topic is gone while state exists.
        """
        with self._lock:
            if not self._ready:
                self._ensure(allow_empty_start)
                self._ready = True

    def look(self) -> None:
        """Check the settings again, of topics that are in use. Logs what is wrong at every look, until it is right, and
        creates changelogs that were deleted.

        Raises: UnavailableError, AccessDenied.
        """
        config = self._services.config
        if self._looking is None:
            self._looking = TopicAdmin(config, self._services.clock)
        found = self._looking.check([checkpoint_topic_spec(config), *changelog_topic_specs(config)])
        for problem in found:
            log.error("topic %s: %s. Fix: %s", problem.topic, problem.message, problem.fix_command)
        if self.wrong and not found:
            log.info("the settings of the job's topics are right again")
        self.wrong = tuple(found)
        of_checkpoints = (problem for problem in found if problem.topic == config.checkpoint_topic)
        self.unsafe = next((one for one in of_checkpoints if not _MAY_LOSE.isdisjoint(one.settings)), None)
        if any(problem.missing and problem.topic != config.checkpoint_topic for problem in found):
            self.create_changelogs()

    def create_changelogs(self) -> None:
        """Create the changelogs that were deleted. The next commits write the whole state there.

        Raises: UnavailableError, AccessDenied, InvalidError.
        """
        with TopicAdmin(self._services.config, self._services.clock) as admin:
            for topic in admin.create_missing(changelog_topic_specs(self._services.config)):
                log.warning("the changelog %s was deleted while the job was running, and is created again", topic)

    def _ensure(self, allow_empty_start: bool) -> None:
        config = self._services.config
        check_config(config)
        with TopicAdmin(config, self._services.clock) as admin:
            specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
            problems = admin.check(specs)
            missing = {problem.topic for problem in problems if problem.missing}
            if not allow_empty_start and config.checkpoint_topic in missing:
                try:
                    refuse_lost_job(self._services)
                except PermissionNeeded:
                    if not admin.exists(config.checkpoint_topic):
                        raise  # otherwise another process has created the topic meanwhile, and published
            if missing:
                admin.create_missing(specs)
                problems = admin.check(specs)
            for problem in problems:
                raise problem.error()


@dataclass(frozen=True)
class Opening:
    """What an opening has read from the topic.

    ``as_of``: a moment before the topic was read. ``refill``: task → backends and stores that the next commit fills.
    ``permissions``: task → permissions of its opening, including those that wait for it on the topic. ``has_blobs``:
    whether a checkpoint of any task names blobs.
    """

    as_of: Moment
    refill: Mapping[str, Refill]
    permissions: Mapping[str, Permissions]
    has_blobs: bool

    @property
    def permitted(self) -> Permissions:
        """The permissions of all tasks together."""
        return reduce(operator.or_, self.permissions.values(), NO_PERMISSIONS)


def read_published(
    owner: Owner,
    layout: Layout,
    tasks: Collection[str],
    given: Permissions,
    *,
    serdes_follow: bool = False,
    adopting: bool = False,
) -> Opening:
    """Steps 3 to 5, which set what the owner has published. The new epoch is a fencing token: higher than all published
    ones, and different from any other owner's.

    Args:
        given: permissions from the caller; those that wait on the topic for a task are added.
        serdes_follow: whether the application may later choose other serdes than the configured ones.
        adopting: whether the caller is the adoption that tasks may be reserved for.

    Raises: LayoutMismatch, PermissionNeeded, ConfigError, CorruptRecord, MissingState, UnavailableError.
    """
    services, log = owner.services, owner.log
    as_of = moment(services.clock)
    announce(Phase.READ_TOPIC, ", ".join(tasks), services.config.job_key)
    found, permissions = look_at_published(
        services, log, layout, tasks, given, serdes_follow=serdes_follow, adopting=adopting
    )
    if not adopting:
        refuse_unrestorable(services, found.values())
    records = {task: found.get(task) for task in tasks}
    has_blobs = any(record.current.names_blobs for record in found.values())
    if has_blobs:
        services.expect_blobs()  # also for tasks that are new
    generations = {record.layout.generation for record in found.values()}
    # an adoption may have recorded more than the job says
    partitioners = {record.layout.partitioner for record in found.values() if record.layout.tasks}
    layout = replace(
        layout,
        generation=max(generations, default=layout.generation),
        partitioner=next(iter(partitioners), layout.partitioner),
    )
    epoch = services.ids.epoch(max((record.current.epoch for record in records.values() if record), default=0))
    owner.published = Published(records, epoch, layout, permits=_permits(log, tasks))
    if owner.of_job:
        owner.published.job_records = set(log.job_records())
    with owner.explaining():
        refill = guard_targets(services, records, permissions)  # 5
    return Opening(as_of, refill, permissions, has_blobs)


def look_at_published(
    services: Services,
    log: CheckpointLog,
    layout: Layout,
    tasks: Collection[str],
    given: Permissions,
    *,
    serdes_follow: bool = False,
    adopting: bool = False,
    only_settled: bool = False,
) -> tuple[Mapping[str, CheckpointRecord], Mapping[str, Permissions]]:
    """Steps 3 and 4, for owners and for those who only look. The arguments are those of :func:`read_published`.

    Args:
        only_settled: wait for no open transaction.

    Returns: task → its newest record, of the tasks that have one; and task → the permissions of its opening.
    Raises: as :func:`read_published`.
    """
    found = _read(log, tasks, only_settled)  # 3
    if not adopting:
        _refuse_reserved(services, log, tasks)
    permissions: Mapping[str, Permissions] | None = None
    while permissions is None:
        try:
            permissions = _checked(services, log, found, layout, tasks, given)  # 4
        except PermissionNeeded:
            # the signs of state may be newer than the read: first publishes of another process, one for each task
            before, found = found, _read(log, tasks, only_settled)
            if found.keys() == before.keys():
                raise
    records = {task: found.get(task) for task in tasks}
    check_changes(services, records, permissions, application_may_choose=serdes_follow)
    return found, permissions


def _read(log: CheckpointLog, tasks: Collection[str], only_settled: bool) -> Mapping[str, CheckpointRecord]:
    """The records of these tasks. Of the job's other tasks, of which there may be thousands, only what is current."""
    mine = log.read(tasks, only_settled=only_settled)
    return {**log.current(), **mine}


def _checked(
    services: Services,
    log: CheckpointLog,
    found: Mapping[str, CheckpointRecord],
    layout: Layout,
    tasks: Collection[str],
    given: Permissions,
) -> dict[str, Permissions]:
    """Step 4, without the configuration. Checks the layout of every task, not only of those that are opened.

    Returns: task → the permissions of its opening.
    """
    for published in found.values():
        check_layout(services, published, layout)
    permissions = dict.fromkeys(tasks, given)
    for permit in _permits(log, tasks):
        permissions[permit.task] |= permit.permissions
    lost = [task for task in tasks if task not in found and not permissions[task].allow_empty_start]
    if lost and not found:
        refuse_lost_job(services)

    def refuse(task: str) -> None:
        refuse_lost_checkpoint(services, log, task, look_at_blobs=bool(found))

    services.in_parallel("open", refuse, lost, WAITING_AT_ONCE)
    return permissions


def _refuse_reserved(services: Services, log: CheckpointLog, tasks: Collection[str]) -> None:
    """Raises: PermissionNeeded if an adoption has begun and not ended (the task would start without the old state), or
    for a permission of newer software, which this opening would use up."""
    for permit in _permits(log, tasks):
        if permit.adoption:
            message = "an adoption of this job has begun and has not ended"
            hint = (
                "continue it with `statemgr adopt --write`; to give it up, run `statemgr permit --revoke`, and delete "
                "the changelogs that it created. With `--in-place` it created none: delete no topic, they are the old "
                "job's"
            )
        elif permit.unknown:
            message = f"this version does not know the permission {permit.unknown[0]!r}"
            hint = "open the task with the version that gave it, or take it back with `statemgr permit --revoke`"
        else:
            continue
        raise PermissionNeeded(message, hint=hint, job=services.config.job_name, task=permit.task)


def _permits(log: CheckpointLog, tasks: Collection[str]) -> tuple[Permit, ...]:
    return tuple(permit for permit in log.permits() if permit.task in tasks)


def check_layout(services: Services, record: CheckpointRecord, layout: Layout) -> None:
    """Raises: LayoutMismatch if the checkpoint has another number of tasks or another partitioner."""
    was = record.layout
    if was.tasks == 0:
        return  # older software (version 1) did not record it
    same = was.partitioner == layout.partitioner or (is_by_input(was.partitioner) and is_by_input(layout.partitioner))
    if was.tasks == layout.tasks and same:
        return
    raise LayoutMismatch(
        f"checkpoint {record.current.checkpoint_id} was made with {was.tasks} tasks partitioned by "
        f"{was.partitioner!r}, but the job now has {layout.tasks} and {layout.partitioner!r}",
        hint=f"set job.tasks = {was.tasks} and keep the partitioner: otherwise keys are looked up in the wrong task; "
        "`statemgr rescale --tasks` changes the number of tasks",
        job=services.config.job_name,
        task=record.task,
    )


def guard_targets(
    services: Services, records: Mapping[str, CheckpointRecord | None], permissions: Mapping[str, Permissions]
) -> dict[str, Refill]:
    """Step 5. Returns: task → (backend, store) pairs with committed changes beyond the checkpoint.

    The restored state leaves these changes out, and the fill overwrites them, tombstones included.

    Raises: PermissionNeeded if a fill would delete records that no checkpoint of the job explains.
    """
    found: dict[str, Refill] = {}

    def guard(task: str) -> None:
        record, pairs = records[task], set()
        for store in services.config.stores.values():
            for factory in store.backup_factories:
                marker = record.current.marker(factory, store.name) if record else None
                has_tail = marker is not None and _has_tail(services, task, store.name, factory, marker)
                if has_tail:
                    pairs.add((factory, store.name))
                if has_tail or marker is None:
                    _guard_fill(services, services.identity(task, store.name), factory, record, permissions[task])
        found[task] = frozenset(pairs)

    services.in_parallel("open", guard, records, WAITING_AT_ONCE)
    return found


def _guard_fill(
    services: Services, identity: StoreIdentity, factory: str, record: CheckpointRecord | None, permissions: Permissions
) -> None:
    """Let the next commit fill the backend. Raises: PermissionNeeded."""
    current = record.current if record else None
    try:
        services.backup_manager(factory).guard_fill(
            identity,
            current.marker(factory, identity.store) if current else None,
            current.retired_changelogs.get(identity.store, ()) if current else (),
            overwrite=permissions.overwrite_changelog,
        )
    except MissingError:
        return  # the changelog has no topic yet


def _has_tail(services: Services, task: str, store: str, factory: str, marker: Marker) -> bool:
    try:
        return services.backup_manager(factory).has_tail(services.identity(task, store), marker)
    except MissingError as error:
        log.warning("%s/%s: the next commit writes the whole state to %s: %s", task, store, factory, error)
        return True
