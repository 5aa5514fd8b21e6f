"""Rescale: gives a job another number of tasks, and goes back.

Steps of :func:`rescale`:

1. read the topic, and plan (:mod:`statemgr.flows.rescale_plan`)
2. create the new changelogs
3. build the new tasks' stores from the checkpoint (:mod:`statemgr.flows.rescale_build`), and bring what has been
   committed meanwhile into them (:mod:`statemgr.flows.rescale_catch_up`); the job still runs
4. fence the job: all its tasks, of both layouts, and its whole-job owner
5. read the topic again, and bring the last changes into the new stores
6. check that no input row that is left was written for the old number of tasks
7. publish the first checkpoint of all new tasks in one transaction, which also retires the old layout

Until step 7 has committed, the old layout is in force. Garbage collection later deletes its records. Until then its
blobs and changelogs stay. Steps of :func:`undo`:

1. read the topic, and find the layout that was in force before
2. fence the job
3. in one transaction, publish the last checkpoint of each of its tasks under a new generation, delete its old records,
   and retire the layout that was in force
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from statemgr.backends.services import Services
from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import (
    CorruptError,
    CorruptRecord,
    FencedError,
    InvalidError,
    MissingBlob,
    MissingError,
    MissingState,
    OutcomeUnknownError,
    PermissionNeeded,
    UnavailableError,
)
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.commit import CommitBase
from statemgr.flows.open_job import JobTopics, fence_ids, guard_targets, take_over
from statemgr.flows.ownership import Published, explained, settle_now
from statemgr.flows.publish import publish
from statemgr.flows.repair import repeated_attachments
from statemgr.flows.rescale_build import Build
from statemgr.flows.rescale_built import Built, Workshop
from statemgr.flows.rescale_catch_up import CatchUp
from statemgr.flows.rescale_plan import RescalePlan, changelog_key, plan_rescale, topic_of_generation
from statemgr.flows.rollback import plan_rollback, prepare_rollback
from statemgr.flows.verify import Submit
from statemgr.ids import source_topic, task_name
from statemgr.kafka.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.kafka.topics import TopicAdmin
from statemgr.local import durable, levels, remove
from statemgr.local.clock import moment
from statemgr.local.owners import exclusive_if_free
from statemgr.local.transfer_files import disk_errors
from statemgr.model.checkpoint import (
    Attachment,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Layout,
    MicroBatch,
)
from statemgr.model.commit import PreparedCommit
from statemgr.model.layouts import RetiredLayout
from statemgr.model.offers import Offer, OfferKey
from statemgr.model.partitioners import BY_INPUT_PARTITION, candidates
from statemgr.model.permissions import NO_PERMISSIONS, Permit
from statemgr.ports import CheckpointLog, Moment, Progress, TopicInfo

#: Times that a build begins again because the running job has dropped the checkpoint.
_BUILDS = 5
#: Times that a running job is caught up with by comparing states, before it is fenced all the same.
_CATCH_UPS = 3
_TOPICS = "topics.note"
_NOTE_SIZE = 1024 * 1024
_PARALLELISM = 8


@dataclass(frozen=True)
class Rescaled:
    """The result of a rescale: what was built, and task → its first checkpoint."""

    built: Built
    checkpoints: Mapping[str, Checkpoint]


@dataclass(frozen=True)
class Workers:
    """How work is done in parallel: ``submit`` gives it to other ``processes``, ``open_new`` opens services of a
    configuration."""

    submit: Submit
    processes: int
    open_new: Callable[[JobConfig], Services]


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
        services: those of the layout in force.
        checkpoint_id: the retained checkpoint to begin with; None for the current one.
        chosen: the partitioner of the input's producers, where the state cannot show it.

    Raises: as :func:`plan_rescale` and :meth:`Build.run`; UnavailableError while another rescale of the job runs
        here; PermissionNeeded if a new changelog has records of others; FencedError, RetryableError: surely
        not published; OutcomeUnknownError: the topic says what is in force.
    """
    plan = plan_rescale(services.config, log.read(), tasks, checkpoint_id)  # 1
    with _alone(services) as root, closing(workers.open_new(plan.new_config)) as new:
        changelogs = _make_topics(new, plan, root)  # 2
        workshop = Workshop(services, new, root, workers.submit, workers.processes, progress)

        def planned() -> tuple[RescalePlan, Moment]:
            as_of = moment(services.clock)
            return plan_rescale(services.config, log.read(), tasks, checkpoint_id), as_of

        with disk_errors(root):
            built = _built(workshop, planned, chosen, changelogs)  # 3
        with _fenced(new, plan.before.tasks) as (publisher, fence_others):  # 4
            plan, as_of = planned()  # 5
            with disk_errors(root):
                built = CatchUp(workshop, plan, as_of).run(built, changelogs)
            _check_input(services, plan, built.partitioner, progress)  # 6
            epoch = new.ids.epoch(max(record.current.epoch for record in plan.records.values()))
            names = [task_name(number) for number in range(tasks)]
            published = Published(dict.fromkeys(names), epoch, plan.after, fence_others)
            published.sequence = _newest_sequence(plan.records)
            published.along = (_retired(new, plan.before),)
            published.serdes = _serdes(plan.targets)
            of_layout = _OfLayout(log, plan.after, {}, plan.records)
            _keep_blobs(services, log, plan.records)
            commits = [replace(commit, epoch=epoch) for commit in built.commits()]
            for error in new.transfer().remove_ttl_all(built.carried).values() if built.carried else ():
                raise error  # no opening would remove these: the commits have added others
            _publish(new, publisher, of_layout, published, commits, plan.output[1])  # 7
        for name in sorted(path.name for path in root.iterdir()):
            if name != "lock":
                remove(root / name)
    return Rescaled(built, _current(published))


def _built(
    workshop: Workshop,
    planned: Callable[[], tuple[RescalePlan, Moment]],
    chosen: str | None,
    changelogs: Mapping[str, TopicInfo],
) -> Built:
    """Step 3. It ends when the rest of the changes can be read from a backend, so that the job is soon over step 5."""
    plan, as_of = planned()
    for left in reversed(range(_BUILDS)):
        try:
            built = Build(workshop, plan, as_of, chosen).run(changelogs)
            break
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


# --- back ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UndoPlan:
    """The layout to go back to, the records of its tasks, and those of the layout in force."""

    config: JobConfig
    retired: RetiredLayout
    records: Mapping[str, CheckpointRecord]
    current: Mapping[str, CheckpointRecord]

    @property
    def after(self) -> Layout:
        """The layout to come."""
        return replace(self.retired.layout, generation=self.before.generation + 1)

    @property
    def before(self) -> Layout:
        """The layout in force."""
        return next(iter(self.current.values())).layout

    @property
    def targets(self) -> Mapping[str, Checkpoint]:
        """Task → its last checkpoint."""
        return {task: record.current for task, record in self.records.items()}

    @property
    def changes(self) -> Mapping[str, int | str]:
        """Configuration key → its new value."""
        found: dict[str, int | str] = {"job.tasks": self.retired.layout.tasks}
        for store, config in self.config.stores.items():
            if config.durable:
                markers = [target.marker(KAFKA_CHANGELOG, store) for target in self.targets.values()]
                used = next((marker.topic for marker in markers if isinstance(marker, ChangelogMarker)), None)
                new = topic_of_generation(store, config.changelog_topic, self.after.generation)
                found[changelog_key(store)] = used or new
        return found

    @property
    def new_config(self) -> JobConfig:
        """The configuration of the layout to come."""
        return JobConfig.from_mapping(self.config.to_mapping(), self.changes)


def plan_undo(config: JobConfig, log: CheckpointLog) -> UndoPlan:
    """Find the layout that was in force before. Raises: MissingState if garbage collection has collected it."""
    current = log.read()
    retired = log.retired()
    if not current or not retired:
        raise MissingState(
            "the checkpoint topic has no earlier layout of the job",
            hint="only the layout before a rescale can be brought back, until `statemgr gc` collects it; use "
            "`statemgr rescale --tasks` instead",
            job=config.job_name,
        )
    newest = retired[-1]
    return UndoPlan(config, newest, log.read(generation=newest.layout.generation), current)


def undo(
    services: Services, log: CheckpointLog, open_new: Callable[[JobConfig], Services], progress: Progress
) -> tuple[UndoPlan, Mapping[str, Checkpoint]]:
    """Put the layout before the last rescale in force again, at its last checkpoint.

    Returns: what was done, and task → its new checkpoint. Raises: as :func:`plan_undo`; TopicMisconfigured if an old
    changelog is gone; MissingState, CorruptError if nothing can supply a state; FencedError, RetryableError,
    OutcomeUnknownError as :func:`rescale`.
    """
    plan = plan_undo(services.config, log)
    with closing(open_new(plan.new_config)) as new:
        JobTopics(new).ensure(allow_empty_start=False)
        with _fenced(new, plan.before.tasks) as (publisher, fence_others):
            plan = plan_undo(services.config, log)
            epoch = new.ids.epoch(max(record.current.epoch for record in plan.current.values()))
            records = {task: replace(of_task, checkpoints=(of_task.current,)) for task, of_task in plan.records.items()}
            published = Published(dict(records), epoch, plan.after, fence_others)
            published.sequence = _newest_sequence(plan.current)
            old_keys = log.record_keys(plan.retired.layout.generation)
            deletes = ((key, None) for key in (*old_keys, plan.retired.key))
            published.along = (_retired(new, plan.before), *deletes)
            published.serdes = _serdes(plan.targets)
            of_layout = _OfLayout(log, plan.after, records, plan.current)
            _keep_blobs(new, log, plan.current)
            tails = guard_targets(new, dict(plan.records), dict.fromkeys(plan.records, NO_PERMISSIONS))

            def prepared(task: str) -> PreparedCommit:
                record = plan.records[task]
                rollback = plan_rollback(new, record, record.current, tail=tails[task])
                base = CommitBase(task, plan.after, epoch, record.current)
                attached = _attached(new, record.current)
                return prepare_rollback(new, rollback, base, together=True, attachments=attached, progress=progress)[1]

            with explained(new, of_layout, published), new.executors.pool("undo", _PARALLELISM) as pool:
                commits = list(pool.map(prepared, plan.records))
            batches = {target.batch for target in plan.targets.values()}
            _publish(new, publisher, of_layout, published, commits, batches.pop() if len(batches) == 1 else None)
    return plan, _current(published)


def _attached(services: Services, checkpoint: Checkpoint) -> tuple[Attachment, ...]:
    """The last output, if it still exists: the newer layout has delivered it, and may have deleted it."""
    attachments = repeated_attachments(checkpoint)
    blobs = [one.blob.blob_id for one in attachments if one.blob is not None]
    gone = services.transfer().absent(blobs) if blobs else {}
    for error in gone.values():
        if not isinstance(error, MissingBlob):
            raise error
    return tuple(one for one in attachments if one.blob is None or one.blob.blob_id not in gone)


# --- parts --------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(services: Services) -> Iterator[Path]:
    """The directory of the job's rescales, locked for this process. Raises: UnavailableError."""
    config = services.config
    with ExitStack() as stack:
        with disk_errors(config.state_dir):
            root = levels.make(config.state_dir, config.job_name, config.job_id, "rescale")
            is_free = stack.enter_context(exclusive_if_free(root / "lock"))
        if not is_free:
            raise UnavailableError(
                "another rescale of the job runs on this machine", hint="wait until it has ended", path=root
            )
        yield root


@contextmanager
def _fenced(new: Services, tasks_before: int) -> Iterator[tuple[TransactionalPublisher, Callable[[], None]]]:
    """Own the whole job: fence every task of both layouts. Yields: the publisher, and a function that fences the tasks
    again."""
    config = new.config
    ids = [task_transactional_id(config, task_name(number)) for number in range(max(tasks_before, config.tasks))]
    with closing(take_over(new, job_transactional_id(config), config.job_name)) as publisher:
        fence_ids(new, ids)
        yield publisher, partial(fence_ids, new, ids)


def _publish(
    services: Services,
    publisher: TransactionalPublisher,
    log: CheckpointLog,
    published: Published,
    commits: Sequence[PreparedCommit],
    batch: MicroBatch | None,
) -> None:
    try:
        publish(services, publisher, log, published, commits, batch=batch, evict=False)
    except OutcomeUnknownError:
        settle_now(services, publisher, log, published, "the new layout")
    added = [blob for commit in commits for blob in commit.added_blobs]
    if added:
        # what fails is tried again by the next opening
        services.transfer().remove_ttl_all(added)


def _retired(services: Services, layout: Layout) -> tuple[bytes, bytes]:
    config, now_ms = services.config, services.clock.time_ns() // 1_000_000
    made = RetiredLayout(config.job_name, config.job_id, layout, now_ms)
    return made.key, made.value


def _newest_sequence(records: Mapping[str, CheckpointRecord]) -> int:
    return max(record.current.sequence for record in records.values())


def _current(published: Published) -> Mapping[str, Checkpoint]:
    return {task: record.current for task, record in published.records.items() if record is not None}


def _serdes(targets: Mapping[str, Checkpoint]) -> dict[str, tuple[str, str]]:
    """Store → the serdes of its keys and values. Raises: InvalidError if the tasks differ."""
    found = {tuple(sorted(target.serdes.items())) for target in targets.values()}
    if len(found) > 1:
        raise InvalidError("the tasks' checkpoints were written with different serdes", hint="commit with every task")
    return dict(found.pop()) if found else {}


def _keep_blobs(services: Services, log: CheckpointLog, records: Mapping[str, CheckpointRecord]) -> None:
    """Remove the TTLs that a dead owner has left on what a layout's last checkpoints added: no opening will."""
    for task, record in records.items():
        clean_up = CleanUp(services, task, log)
        clean_up.at_open(record, delete=False)
        clean_up.retry_ttls()


def _make_topics(new: Services, plan: RescalePlan, root: Path) -> Mapping[str, TopicInfo]:
    """Step 2: the job's topics, and store → its new changelog, which has no records of others.

    Raises: PermissionNeeded, TopicMisconfigured, UnavailableError, AccessDenied.
    """
    topics = plan.new_topics
    try:
        known = durable.read_note(root / _TOPICS, _NOTE_SIZE)
    except (OSError, ValueError):
        known = {}
    with TopicAdmin(new.config, new.clock) as admin:
        for name, found in admin.describe(list(topics.values())).items():
            count = len(found.partitions)
            used = any(admin.bounds(name, partition)[1] for partition in range(count))
            if used and known.get(name) != str(found.topic_id):
                raise PermissionNeeded(
                    f"topic {name} is to be the new changelog, and has records that no rescale on this machine wrote",
                    hint="delete the topic if nobody needs it, and run this again",
                    topic=name,
                )
            if count != plan.tasks:
                admin.delete(name)
                admin.wait_until_gone(name)
    JobTopics(new).ensure(allow_empty_start=False)
    found_topics = {store: new.changelog().describe(topic) for store, topic in topics.items()}
    with disk_errors(root):
        durable.write_note(root / _TOPICS, {info.name: info.topic_id for info in found_topics.values()})
    return found_topics


def _check_input(services: Services, plan: RescalePlan, partitioner: str, progress: Progress) -> None:
    """Step 6, where the task is the partition of the input. Reads the keys of the rows that are left.

    Raises: InvalidError if a row's key belongs to another task than its partition's.
    """
    if plan.before.partitioner != BY_INPUT_PARTITION:
        return
    hashes = candidates(BY_INPUT_PARTITION, "bytes", partitioner)[partitioner]
    changelog = services.changelog()
    for source, offset in sorted({s: o for inputs in plan.inputs for s, o in inputs.offsets.items()}.items()):
        topic, number = source_topic(source), int(source.rpartition("-")[2])
        assert topic is not None
        try:
            start, end = changelog.bounds(topic, number)
        except MissingState:
            continue  # the topic is gone, or these credentials do not see it
        try:
            for batch in changelog.changes(topic, number, max(start, min(offset, end)), end):
                if {found % plan.tasks for found in hashes([key for key, _ in batch.changes])} - {number}:
                    raise _rows_left(plan, source, offset, end)
                progress(f"look at {source}", batch.end - offset, end - offset)
        except CorruptRecord as error:
            raise _rows_left(plan, source, offset, end) from error


def _rows_left(plan: RescalePlan, source: str, offset: int, end: int) -> InvalidError:
    return InvalidError(
        f"{source} has rows from offset {offset} to {end} that were written for {plan.before.tasks} partitions: with "
        f"{plan.tasks} tasks they would reach another task than the one with the state of their key",
        hint=f"run the job with job.tasks = {plan.before.tasks} until it has processed them, while nobody writes to "
        "the topic; then change the number of partitions, and run this again",
        source=source,
        offset=offset,
    )


class _OfLayout:
    """Implements ``ports.CheckpointLog`` for the owner that publishes a new layout.

    Args:
        layout: the layout to come.
        unpublished: the records that its tasks continue, until it is published.
        current: the records of the layout in force. If they change, there is another owner.
    """

    def __init__(
        self,
        log: CheckpointLog,
        layout: Layout,
        unpublished: Mapping[str, CheckpointRecord],
        current: Mapping[str, CheckpointRecord],
    ) -> None:
        self._log, self._layout, self._unpublished, self._current = log, layout, unpublished, current

    def read(
        self, tasks: Collection[str] | None = None, *, only_settled: bool = False, generation: int | None = None
    ) -> Mapping[str, CheckpointRecord]:
        """Also raises: FencedError if the layout in force has other checkpoints, or another layout is."""
        found = self._log.read(None, only_settled=only_settled, generation=generation)
        if {record.layout.generation for record in found.values()} != {self._layout.generation}:
            ids = {task: str(record.current.checkpoint_id) for task, record in found.items()}
            if ids != {task: str(record.current.checkpoint_id) for task, record in self._current.items()}:
                raise FencedError("another owner has published a checkpoint in the meantime", hint="run it again")
            found = self._unpublished
        return {task: record for task, record in found.items() if tasks is None or task in tasks}

    def retired(self) -> Sequence[RetiredLayout]:
        return self._log.retired()

    def record_keys(self, generation: int) -> Sequence[bytes]:
        return self._log.record_keys(generation)

    def permits(self) -> Sequence[Permit]:
        return self._log.permits()

    def offers(self) -> Mapping[OfferKey, Offer]:
        return {}

    def job_records(self) -> Collection[int]:
        return ()

    def begin_check(self) -> Callable[[int], None]:
        return self._log.begin_check()

    def was_truncated(self) -> bool:
        return self._log.was_truncated()
