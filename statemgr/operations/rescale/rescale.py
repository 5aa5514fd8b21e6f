"""Rescale: gives a job another number of tasks.

Steps:

1. read the topic, and plan (:mod:`statemgr.operations.rescale.plan`)
2. create the new changelogs
3. build the new tasks' stores from the checkpoint (:mod:`statemgr.operations.rescale.build`), and bring what has been
   committed meanwhile into them (:mod:`statemgr.operations.rescale.catch_up`); the job still runs
4. fence the job: all its tasks, of both layouts, and its whole-job owner
5. read the topic again, and bring the last changes into the new stores; check that no machine that has built some of
   them writes to their changelogs still
6. check that no input row that is left was written for the old number of tasks
7. publish the first checkpoint of all new tasks in one transaction, which also retires the old layout

Until step 7 has committed, the old layout is current. Garbage collection later deletes its records. Until then its
blobs and changelogs stay, and :mod:`statemgr.operations.rescale.undo` goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import (
    CorruptError,
    CorruptRecord,
    InvalidError,
    MissingError,
    MissingState,
    PermissionNeeded,
    RetryableError,
    UnavailableError,
)
from statemgr.flows.committing.limits import check_young
from statemgr.flows.committing.publish import age_in_store, publish_now
from statemgr.flows.opening.open_job import JobTopics
from statemgr.flows.opening.opening_checks import serdes_in_force
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published, common_serdes
from statemgr.ids import attachment_blob, attempt_millis, source_topic, task_name
from statemgr.kafka.input_topics import InputTopics
from statemgr.kafka.topics import TopicAdmin
from statemgr.local import durable
from statemgr.local.machine import moment
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.model.checkpoint import Checkpoint, Layout
from statemgr.model.commit import PreparedCommit
from statemgr.model.keys.partitioners import BY_INPUT_PARTITION, candidates, hash_of, is_by_input
from statemgr.model.keys.processor_keys import RECORD, grouping_types
from statemgr.operations.rescale.build import Build
from statemgr.operations.rescale.built import Built, Workshop
from statemgr.operations.rescale.catch_up import CatchUp
from statemgr.operations.rescale.orders import Elsewhere
from statemgr.operations.rescale.plan import RescalePlan, overtaken, plan_rescale
from statemgr.operations.rescale.publish import OfLayout, keep_blobs, newest_sequence, retiring
from statemgr.os_errors import disk_errors
from statemgr.ports import CheckpointLog, Moment, Progress, TopicInfo
from statemgr.services import Services, Submit

logger = logging.getLogger(__name__)
#: Times that a build begins again because the running job has dropped the checkpoint.
_BUILDS = 5
#: Times that a running job is caught up with by comparing states, before it is fenced all the same.
_CATCH_UPS = 3
_TOPICS, _BEGUN = "topics.note", "begun.note"
_NOTE_SIZE = 1024 * 1024
#: Most bytes of the record of a processor's state.
_RECORD_SIZE = 16 * 1024 * 1024


@dataclass(frozen=True)
class Rescaled:
    """The result of a rescale: what was built, and task → its first checkpoint."""

    built: Built
    checkpoints: Mapping[str, Checkpoint]


@dataclass(frozen=True)
class Workers:
    """How work is done in parallel: ``submit`` gives it to other ``processes``, ``open_new`` opens services of a
    configuration, ``elsewhere`` gives orders (``orders``) to other machines, which build what is not built yet.
    """

    submit: Submit
    processes: int
    open_new: Callable[[JobConfig], Services]
    elsewhere: Elsewhere | None = None


def rescale(
    services: Services,
    log: CheckpointLog,
    tasks: int,
    workers: Workers,
    progress: Progress,
    *,
    checkpoint_id: str | None = None,
    chosen: str | None = None,
) -> Rescaled:
    """Rescale the job to ``tasks`` tasks. After a crash at any step it can be run again, and continues.

    Args:
        services: those of the current layout.
        checkpoint_id: the retained checkpoint to begin with; None for the current one.
        chosen: the partitioner of the input's producers, where the state cannot show it.

    Raises: as :func:`plan_rescale` and :meth:`Build.run`; UnavailableError while another rescale of the job runs
        here; PermissionNeeded if a new changelog has records of others; FencedError, RetryableError: surely
        not published; OutcomeUnknownError: the topic says what is current.
    """
    plan = plan_rescale(services.config, log.read(), tasks, checkpoint_id)  # 1
    grouping = _grouping(services, plan)  # a processor's query never groups by other columns
    with _alone(services) as root, closing(workers.open_new(plan.new_config)) as new:
        if any(record.current.names_blobs for record in plan.records.values()):
            new.expect_blobs()  # also if the state comes from changelogs
        changelogs = _make_topics(new, plan, root)  # 2
        workshop = Workshop(services, new, root, workers.submit, workers.processes, progress, workers.elsewhere)

        def planned() -> tuple[RescalePlan, Moment]:
            as_of = moment(services.clock)
            now = plan_rescale(services.config, log.read(), tasks, checkpoint_id)
            _refuse_other_layout(services.config, plan.before, now.before)
            return replace(now, grouping=grouping), as_of

        with disk_errors(root):
            begun = _Begun(root, tasks, checkpoint_id)
            built = _built(workshop, planned, begun, chosen, changelogs)  # 3
        _check_age(new, built)
        with Owner.take(new, log, tasks=max(plan.before.tasks, tasks)) as owner:  # 4
            plan, as_of = planned()  # 5
            with disk_errors(root):
                built = CatchUp(workshop, plan, as_of).run(built, changelogs)
            workshop.check_changelogs(built, changelogs)
            _check_input(services, plan, built.partitioner, progress)  # 6
            epoch = new.ids.epoch(max(record.current.epoch for record in plan.records.values()))
            names = [task_name(number) for number in range(tasks)]
            owner.published = published = Published(dict.fromkeys(names), epoch, plan.after)
            published.sequence = newest_sequence(log, plan.records)
            published.along = (retiring(new, plan.before),)
            published.serdes = serdes_in_force(new, None) | common_serdes(plan.targets.values())
            owner.log = OfLayout(log, plan.after, {}, plan.records)
            keep_blobs(services, plan.records)
            commits = [_with_own_record(new, replace(commit, epoch=epoch)) for commit in built.commits()]
            _check_age(new, built)
            for error in new.transfer().remove_ttl_all(built.carried).values() if built.carried else ():
                raise error  # no opening would remove these: the commits have added others
            publish_now(owner, "the new layout", commits, batch=plan.output[1], evict=False)  # 7
        durable.remove_all_but(root, "lock")
    return Rescaled(built, published.checkpoints)


def _with_own_record(new: Services, commit: PreparedCommit) -> PreparedCommit:
    """A first commit whose record of a processor's state is in no blob of the old layout. A task deletes the blobs of
    its attachments with the checkpoint, and the job may go back to that layout.

    Raises: MissingBlob, CorruptBlob, RetryableError, AccessDenied.
    """
    old = next((one for one in commit.attachments if one.name == RECORD), None)
    if old is None or old.blob is None:
        return commit
    transfer = new.transfer()
    blob_id = attachment_blob(new.config.job_key, commit.task, new.ids.attempt_id(), RECORD)
    own = replace(old, blob=transfer.put(blob_id, transfer.get_bytes(old.blob, _RECORD_SIZE)))
    attachments = tuple(own if one is old else one for one in commit.attachments)
    return replace(commit, attachments=attachments, added_blobs=(*commit.added_blobs, blob_id))


def _refuse_other_layout(config: JobConfig, begun: Layout, now: Layout) -> None:
    """Raises: FencedError if somebody else has published another layout meanwhile."""
    if now != begun:
        raise overtaken(config)


def _check_age(new: Services, built: Built) -> None:
    """Raises: RetryableError if garbage collection may delete blobs that later commits of the stores carry on."""
    if built.carried:
        oldest = min(built.commits(), key=lambda commit: attempt_millis(commit.attempt) or 0)
        carrying = replace(oldest, added_blobs=tuple(built.carried))
        try:
            check_young(new.config, new.ids, carrying, partial(age_in_store, new))
        except RetryableError as error:
            raise RetryableError(
                f"the rescale takes too long: {error.message}",
                hint="nothing was published: run it again with more processes, or while the job commits less",
                job=new.config.job_name,
            ) from None


def check(
    services: Services,
    plan: RescalePlan,
    workers: Workers,
    progress: Progress,
    *,
    checkpoint_id: str | None = None,
    chosen: str | None = None,
) -> tuple[str, int]:
    """Check what :func:`rescale` would refuse at this moment: the keys of the state, the names of the new changelogs,
    and the rows that are left. Fences nobody, and writes only below ``state.dir``, where :func:`rescale` continues.

    Returns: the partitioner of the keys, and their number. Raises: as :func:`rescale`.
    """
    as_of = moment(services.clock)
    plan = replace(plan, grouping=_grouping(services, plan))
    with _alone(services) as root, closing(workers.open_new(plan.new_config)) as new:
        with TopicAdmin(new.config, new.clock) as admin:
            _refuse_used(admin, plan, root)
        with disk_errors(root):
            workshop = Workshop(services, new, root, workers.submit, workers.processes, progress)
            # what an interrupted rescale has built stays
            plan, as_of = _Begun(root, plan.tasks, checkpoint_id).continued(plan) or (plan, as_of)
            partitioner, keys = Build(workshop, plan, as_of, chosen).check()
        _check_input(services, plan, partitioner, progress)
    return partitioner, keys


def _grouping(services: Services, plan: RescalePlan) -> str | None:
    """Raises: CorruptError, MissingBlob, RetryableError, AccessDenied."""
    attachment = plan.processor
    if attachment is None:
        return None
    if attachment.blob is None:
        return grouping_types(attachment.inline or b"")
    return grouping_types(services.transfer().get_bytes(attachment.blob, _RECORD_SIZE))


def _built(
    workshop: Workshop,
    planned: Callable[[], tuple[RescalePlan, Moment]],
    begun: _Begun,
    chosen: str | None,
    changelogs: Mapping[str, TopicInfo],
) -> Built:
    """Step 3. It ends when the rest of the changes can be read from a backend, so that the job is soon over step 5."""
    plan, as_of = planned()
    plan, as_of = begun.continued(plan) or (plan, as_of)
    for left in reversed(range(_BUILDS)):
        begun.note(plan, as_of)
        try:
            built = Build(workshop, plan, as_of, chosen).run(changelogs)
            break
        except InvalidError:
            begun.forget()  # the job may commit other keys, and the next run begins with them
            raise
        except (MissingError, CorruptError):
            now, as_of = planned()
            if not left or now.targets == plan.targets:
                raise
            plan = now  # the running job has dropped the checkpoint meanwhile
    for left in reversed(range(_CATCH_UPS)):
        plan, as_of = planned()
        catch_up = CatchUp(workshop, plan, as_of)
        try:
            built = catch_up.run(built, changelogs)
        except (MissingError, CorruptError):
            if not left:
                raise
            continue  # as above
        if not catch_up.compared:
            break
    return built


@contextmanager
def _alone(services: Services) -> Iterator[Path]:
    """The directory of the job's rescales, locked for this process. Raises: UnavailableError."""
    config = services.config
    with ExitStack() as stack:
        with disk_errors(config.state_dir):
            root = durable.make_private(config.state_dir, config.job_name, config.job_id, "rescale")
            is_free = stack.enter_context(exclusive_if_free(root / "lock"))
        if not is_free:
            raise UnavailableError(
                "another rescale of the job runs on this machine", hint="wait until it has ended", path=root
            )
        yield root


@dataclass(frozen=True)
class _Begun:
    """The note of the checkpoints that a build began with: one that was killed goes on with them, as long as they are
    retained, although the job has committed since. There is none if ``checkpoint_id`` says what to begin with."""

    root: Path
    tasks: int
    checkpoint_id: str | None

    def note(self, plan: RescalePlan, as_of: Moment) -> None:
        """Raises: OSError."""
        if self.checkpoint_id is not None:
            self.forget()
            return
        targets = {task: str(target.checkpoint_id) for task, target in plan.targets.items()}
        told = {"tasks": self.tasks, "layout": asdict(plan.before), "as_of": asdict(as_of), "targets": targets}
        durable.write_note(self.root / _BEGUN, told)

    def forget(self) -> None:
        """Raises: OSError."""
        durable.remove(self.root / _BEGUN)

    def continued(self, plan: RescalePlan) -> tuple[RescalePlan, Moment] | None:
        """The plan of an earlier run, and a moment at which its checkpoints were the newest."""
        if self.checkpoint_id is not None:
            return None
        try:
            told = durable.read_note(self.root / _BEGUN, _NOTE_SIZE)
            as_of, wanted = Moment(**told["as_of"]), told["targets"]
            if (told["tasks"], told["layout"]) != (self.tasks, asdict(plan.before)):
                return None
            targets = {
                task: next(one for one in plan.records[task].checkpoints if str(one.checkpoint_id) == wanted[task])
                for task in plan.targets
            }
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            return None
        if any(set(target.stores) != set(plan.stores) for target in targets.values()):
            return None
        return replace(plan, targets=targets), as_of


def _make_topics(new: Services, plan: RescalePlan, root: Path) -> Mapping[str, TopicInfo]:
    """Step 2: the job's topics, and store → its new changelog, which has no records of others.

    If a store has no changelog now, an earlier run with another configuration may have left records in the topic, which
    no checkpoint would explain to whoever writes a changelog again.

    Raises: PermissionNeeded, TopicMisconfigured, UnavailableError, AccessDenied.
    """
    topics = plan.new_topics
    written = {topics[name] for name in topics if KAFKA_CHANGELOG in new.config.stores[name].backup_factories}
    with TopicAdmin(new.config, new.clock) as admin:
        for name, partitions in _refuse_used(admin, plan, root).items():
            if partitions != plan.tasks or name not in written:
                admin.delete(name)
                admin.wait_until_gone(name)
    JobTopics(new).ensure(allow_empty_start=False)
    found_topics = {store: new.changelog().describe(topic) for store, topic in topics.items()}
    with disk_errors(root):
        durable.write_note(root / _TOPICS, {info.name: info.topic_id for info in found_topics.values()})
    return found_topics


def _refuse_used(admin: TopicAdmin, plan: RescalePlan, root: Path) -> dict[str, int]:
    """The topics that exist already and are to be changelogs → their numbers of partitions.

    Raises: PermissionNeeded for one with records of others; UnavailableError, AccessDenied.
    """
    try:
        known = durable.read_note(root / _TOPICS, _NOTE_SIZE)
    except (OSError, ValueError):
        known = {}
    partitions = {}
    for name, found in admin.describe(list(plan.new_topics.values())).items():
        partitions[name] = len(found.partitions)
        used = any(admin.bounds(name, partition)[1] for partition in range(partitions[name]))
        if used and known.get(name) != str(found.topic_id):
            raise PermissionNeeded(
                f"topic {name} is to be the new changelog, and has records that no rescale on this machine wrote",
                hint="delete the topic if nobody needs it, and run this again",
                topic=name,
            )
    return partitions


def _check_input(services: Services, plan: RescalePlan, partitioner: str, progress: Progress) -> None:
    """Step 6, where the task is the partition of the input. Reads the keys of the rows that are left; those of a
    partition without an offset, which no task has processed, begin at its first one.

    Rows of a topic that has left ``task.inputs`` do not count: nobody reads them, although checkpoints still have its
    offsets. If no topic with offsets is in ``task.inputs``, all count: the key may have a typing error, or the job
    names its topics elsewhere.

    Raises: InvalidError if a row's key belongs to another task than its partition's.
    """
    if not is_by_input(plan.before.partitioner):
        return
    of_messages = hash_of(partitioner)
    hashes = candidates(BY_INPUT_PARTITION, "bytes", of_messages)[of_messages]
    changelog = services.changelog()
    listed = services.config.inputs
    offsets = {source: offset for inputs in plan.inputs for source, offset in inputs.offsets.items()}
    known, skipped = {source_topic(source) for source in offsets}, set[str]()
    of_spark = any(target.batch is not None for target in plan.targets.values())
    counted = known.union(listed) if of_spark or known.isdisjoint(listed) else set(listed)
    with closing(InputTopics(services.config, services.clock)) as topics:
        offsets |= dict.fromkeys(topics.added(offsets, listed), 0)
    for source, offset in sorted(offsets.items()):
        topic, number = source_topic(source), int(source.rpartition("-")[2])
        assert topic is not None
        try:
            start, end = changelog.bounds(topic, number)
        except MissingState:
            continue  # the topic is gone, or these credentials do not see it
        if topic not in counted:
            skipped |= {topic} if max(start, offset) < end else set()
            continue
        try:
            for batch in changelog.changes(topic, number, max(start, min(offset, end)), end):
                if {found % plan.tasks for found in hashes([key for key, _ in batch.changes])} - {number}:
                    raise _rows_left(plan, source, offset, end)
                progress(f"look at {source}", batch.end - offset, end - offset)
        except CorruptRecord as error:
            raise _rows_left(plan, source, offset, end) from error
    for topic in sorted(skipped):
        logger.info("the rows that are left in %s do not count, because it is not in task.inputs", topic)


def _rows_left(plan: RescalePlan, source: str, offset: int, end: int) -> InvalidError:
    return InvalidError(
        f"{source} has rows from offset {offset} to {end} that were written for {plan.before.tasks} partitions: with "
        f"{plan.tasks} tasks they would reach another task than the one with the state of their key",
        hint=f"run the job with job.tasks = {plan.before.tasks} until it has processed them, while nobody writes to "
        "the topic; then change the number of partitions, and run this again",
        source=source,
        offset=offset,
    )
