"""Adopt: take over the changelogs and the input offsets of a job that other software ran, and that is stopped.

Steps, which write nothing to the old job's topics unless the changelogs are adopted in place:

1. look at the old job (``adopt_look``), and check that the configuration suits it
2. refuse a job that has checkpoints, then take the job over (``open_job``), and reserve its tasks: until step 5 nobody
   else may open them
3. copy each changelog to the job's own, with plain keys and values (``adopt_copy``), and store each snapshot as the
   job's own (``adopt_snapshots``)
4. look again: the old job must not have moved
5. publish the first checkpoint of all tasks in one transaction (``publish``): input offsets, and a marker for each
   store at the end of its changelog, or of its snapshot; then remove the TTL of the snapshots' blobs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from statemgr.backends.services import Services
from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import ConfigError, InvalidError, MissingState, PermissionNeeded
from statemgr.flows.adopt_changelogs import listed
from statemgr.flows.adopt_copy import Copied, Copy, count
from statemgr.flows.adopt_found import OldJob, OldStore, Request
from statemgr.flows.adopt_look import look, running
from statemgr.flows.adopt_snapshots import AdoptedSnapshot, OldSnapshots
from statemgr.flows.open_job import JobTopics, fence_ids, read_published, take_over
from statemgr.flows.opening_checks import refuse_lost_job
from statemgr.flows.ownership import Published
from statemgr.flows.publish import publish
from statemgr.ids import task_name
from statemgr.kafka.old_job import OldTopics
from statemgr.kafka.publisher import job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, Layout, Marker
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.model.permissions import NO_PERMISSIONS, Permissions, Permit
from statemgr.ports import CheckpointLog, Progress, Publisher

#: Which partitioner a consumer loop has: a record goes to the task of its input partition.
_PARTITIONER = "kafka-partition"
#: The copies are records that no checkpoint explains yet.
_OWN_COPIES = Permissions(allow_empty_start=True, overwrite_changelog=True)


@dataclass(frozen=True)
class Adopted:
    """What was found, and counted while it was copied; store → what was made of each task's snapshot; and task → its
    first checkpoint."""

    old: OldJob
    snapshots: Mapping[str, Sequence[AdoptedSnapshot]]
    checkpoints: Mapping[str, Checkpoint]


def adopt(
    services: Services,
    log: CheckpointLog,
    old: OldTopics,
    request: Request,
    blobs: OldSnapshots | None = None,
    *,
    in_place: bool,
    progress: Progress,
) -> Adopted:
    """Adopt the old job. Run again after a crash, it continues the copy.

    Raises: as :func:`look`; PermissionNeeded if the job has state already, or a changelog has records of others;
        TopicMisconfigured; FencedError, RetryableError, OutcomeUnknownError.
    """
    config = services.config
    found = look(old, services.clock, request, progress=progress)  # 1
    check_target(services, found, blobs, in_place=in_place)
    _refuse_checkpoints(services, log, only_settled=True)  # 2: before anybody is fenced
    keeps_old_blobs = in_place and bool(found.snapshots)
    JobTopics(services).ensure(allow_empty_start=keeps_old_blobs)
    names = [task_name(index) for index in range(config.tasks)]
    others = [task_transactional_id(config, name) for name in names]
    publisher = take_over(services, job_transactional_id(config), config.job_name)
    try:
        fence_ids(services, others)
        _refuse_checkpoints(services, log, only_settled=False)
        refuse_lost_job(services, look_at_blobs=not keeps_old_blobs)
        _reserve(services, log, publisher, names)
        adopting = _Adopting(services, old, publisher, found, progress)
        copied = {store.name: adopting.store(store, in_place=in_place) for store in found.stores.values()}  # 3
        snapshots = adopting.snapshots(blobs, in_place=in_place)
        if look(old, services.clock, replace(request, settle_s=0.0), progress=progress) != found:  # 4
            raise running("its offsets or topics have changed during the copy")
        layout = Layout(1, config.tasks, _PARTITIONER)
        opening = read_published(services, log, layout, names, _OWN_COPIES, others=others, adopting=True)
        published = opening.published
        commits = _commits(services, published, found, copied, snapshots)
        publish(services, publisher, log, published, commits)  # 5
        added = [blob for commit in commits for blob in commit.added_blobs]
        # a job of changelogs alone has no blob store
        for error in services.transfer().remove_ttl_all(added).values() if added else ():
            raise error
        checkpoints = {name: published.checkpoint(name) for name in names}
        stores = {
            name: replace(store, counts=tuple(one.counts for one in copied[name]))
            for name, store in found.stores.items()
        }
        made = {name: checkpoint for name, checkpoint in checkpoints.items() if checkpoint is not None}
        return Adopted(replace(found, stores=stores), snapshots, made)
    finally:
        publisher.close()


def check_target(services: Services, found: OldJob, blobs: OldSnapshots | None, *, in_place: bool) -> None:
    """Check that the job's configuration suits what was found. Raises: ConfigError."""
    config = services.config
    durable = {name for name, is_durable in services.durable.items() if is_durable}
    if durable != set(found.names):
        raise ConfigError(
            f"the old job has the stores {listed(found.names)}, but the configuration backs up {listed(durable)}",
            hint="name the same stores: give each changelog the name of its store with `statemgr adopt --changelog "
            "STORE=TOPIC`, or change the tables of the stores; add new stores after the adoption",
            job=config.job_name,
        )
    for name in found.names:
        factory, there = (BLOB_STORE, "snapshots") if name in found.snapshots else (KAFKA_CHANGELOG, "a changelog")
        ours = config.stores[name]
        if ours.ttl_ms is not None:
            raise ConfigError(
                f"store {name!r} has a TTL, and the values of the old job have no expiry",
                hint=f"remove stores.{name}.ttl.ms; to let entries expire, write them to a new store with a TTL later",
                key=f"stores.{name}.ttl.ms",
                store=name,
            )
        for key, factories in (("backup", ours.backup_factories), ("restore", ours.restore_factories)):
            if factory not in factories:
                raise ConfigError(
                    f"store {name!r} must have {factory} in task.{key}.factories: its state is in {there}",
                    hint="add it; `statemgr migrate` and docs/migrating.md say how to move to blobs later",
                    key=f"task.{key}.factories",
                    store=name,
                )
    if blobs is not None:
        blobs.check_target(found.snapshots, in_place=in_place)
    for name, store in found.stores.items():
        ours = config.stores[name]
        key = f"stores.{name}.changelog.topic"
        if in_place and ours.changelog_topic != store.topic.name:
            raise ConfigError(
                f"{key} is {ours.changelog_topic}, but the changelog to adopt in place is {store.topic.name}",
                hint=f"set stores.{name}.changelog.topic to that topic",
                key=key,
            )
        moved = [task for task, partition in enumerate(store.partitions) if partition.number != task]
        if in_place and moved:
            raise ConfigError(
                f"task {moved[0]} of the old job has partition {store.partitions[moved[0]].number} of "
                f"{store.topic.name}, but a task of the new job has the partition of its own number",
                hint="use `statemgr adopt` without `--in-place`: the copy moves the partitions",
                store=name,
            )
        if not in_place and ours.changelog_topic == store.topic.name:
            raise ConfigError(
                f"{key} is the changelog of the old job, {store.topic.name}: nothing would be copied",
                hint=f"remove stores.{name}.changelog.topic, or make the topic the new job's with `statemgr adopt "
                "--in-place`",
                key=key,
            )
    taken = {config.stores[name].changelog_topic for name in found.stores} & {
        s.topic.name for s in found.stores.values()
    }
    if taken and not in_place:
        raise ConfigError(
            f"topic {min(taken)} is a changelog of the old job, and of another store of the new one",
            hint="give each store a topic of its own with stores.<name>.changelog.topic",
        )


@dataclass(frozen=True)
class _Adopting:
    """Steps of one adoption."""

    services: Services
    old: OldTopics
    publisher: Publisher
    found: OldJob
    progress: Progress

    def store(self, store: OldStore, *, in_place: bool) -> Sequence[Copied]:
        """Step 3 for one store: the marker of each task."""
        one = self._in_place if in_place else self._copied
        return [one(store, task) for task in range(self.found.tasks)]

    def snapshots(self, blobs: OldSnapshots | None, *, in_place: bool) -> Mapping[str, Sequence[AdoptedSnapshot]]:
        """Step 3 for the stores that have snapshots."""
        if blobs is None:
            return {}
        attempt = self.services.ids.attempt_id()
        return {
            store: [blobs.adopt(store, task, blob_id, attempt, in_place=in_place) for task, blob_id in enumerate(of)]
            for store, of in self.found.snapshots.items()
        }

    def _copied(self, store: OldStore, task: int) -> Copied:
        topic, old = self.services.config.stores[store.name].changelog_topic, store.partitions[task]
        return Copy(
            self.services,
            self.old,
            self.publisher,
            store.name,
            store.topic,
            self.services.changelog().describe(topic),
            task,
            old.number,
            old.bounds.until(old.end),
            self.found.origin.decoder(store.topic.name, self.found.committed(task)),
            self.progress,
        ).run()

    def _in_place(self, store: OldStore, task: int) -> Copied:
        """The marker at the end of the old changelog itself. Raises: InvalidError if its records are not plain."""
        partition, end, bounds = (
            store.partitions[task].number,
            store.partitions[task].end,
            store.partitions[task].bounds,
        )
        decoder = self.found.origin.decoder(store.topic.name, self.found.committed(task))
        # read even if nothing is converted: a record without a key could never be restored
        counts = count(self.old, store.name, store.topic, partition, bounds, decoder, self.progress)
        if counts.converted or counts.skipped:
            raise InvalidError(
                f"{counts.converted + counts.skipped} records are in a form of {self.found.origin.title} that the "
                "new job would not understand",
                hint="use `statemgr adopt` without `--in-place`: it converts the records while it copies them",
                topic=store.topic.name,
                partition=partition,
            )
        return Copied(ChangelogMarker(store.topic.name, store.topic.topic_id, partition, end), counts)


def _commits(
    services: Services,
    published: Published,
    found: OldJob,
    copied: Mapping[str, Sequence[Copied]],
    snapshots: Mapping[str, Sequence[AdoptedSnapshot]],
) -> list[PreparedCommit]:
    """The first commit of each task: nothing but input offsets and markers."""
    config, attempt = services.config, services.ids.attempt_id()
    return [
        PreparedCommit(
            config.job_name,
            config.job_id,
            name,
            published.layout,
            published.epoch,
            attempt,
            None,
            found.offsets(index),
            {
                store: PreparedStore(f"{attempt}-{store}", {KAFKA_CHANGELOG: copies[index].marker})
                for store, copies in copied.items()
            }
            | {
                store: PreparedStore(of[index].state_id, {BLOB_STORE: _marker(of[index])})
                for store, of in snapshots.items()
            },
            added_blobs=tuple(blob for of in snapshots.values() for blob in of[index].backup.added_blobs),
            added_bytes=sum(of[index].backup.added_bytes for of in snapshots.values()),
            input_topic_ids=found.topic_ids,
        )
        for index, name in enumerate(published.records)
    ]


def _marker(snapshot: AdoptedSnapshot) -> Marker:
    assert snapshot.backup.marker is not None
    return snapshot.backup.marker


def _reserve(services: Services, log: CheckpointLog, publisher: Publisher, tasks: Sequence[str]) -> None:
    """Reserve the tasks for this adoption, which may be killed. Its publish ends the reservation."""
    config, now_ms = services.config, services.clock.time_ns() // 1_000_000
    reserved = {permit.task for permit in log.permits() if permit.adoption}
    with publisher.transaction() as transaction:
        for task in tasks:
            if task not in reserved:
                token = services.ids.token()
                permit = Permit(config.job_name, config.job_id, task, token, NO_PERMISSIONS, now_ms, adoption=True)
                transaction.send(config.checkpoint_topic, permit.key, permit.value, partition=0)


def _refuse_checkpoints(services: Services, log: CheckpointLog, *, only_settled: bool) -> None:
    """Raises: PermissionNeeded if the new job has run. ``only_settled``: wait for no open transaction."""
    try:
        found = log.read(only_settled=only_settled)
    except MissingState:
        return  # the topic is new
    if found:
        task, record = min(found.items())
        raise PermissionNeeded(
            f"the job has checkpoints already: {task} has {record.current.checkpoint_id}",
            hint="adopt under a new name: set job.name, or job.id",
            job=services.config.job_name,
            topic=services.config.checkpoint_topic,
        )
