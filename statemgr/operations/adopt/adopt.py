"""Adopt: take over the changelogs and the input offsets of a job that other software ran, and that is stopped.

Steps, which write nothing to the old job's topics unless the changelogs are adopted in place:

1. look at the old job (``look``), and check that the configuration suits it
2. refuse a job that has checkpoints, then take the job over (``open_job``), and reserve its tasks: until step 5 nobody
   else may open them
3. copy each changelog to the job's own, with plain keys and values (``copying``), and to this machine
   (``local_copies``), and store each snapshot as the job's own (``snapshots``)
4. look again: the old job must not have moved
5. publish the first checkpoint of all tasks in one transaction (``publish``): input offsets, and a marker for each
   store at the end of its changelog, or of its snapshot; and a record of where the old job was (``adopted_job``)
6. remove the TTL of the snapshots' blobs; the first opening of the new job tries again what fails
7. if the changelogs are adopted in place, write the state of each task again after the records that the old job did not
   commit, because compaction would soon use these records to remove what the checkpoint needs

A run after step 5 finds that record, and reports the success of the earlier run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import InvalidError, PermissionNeeded, StatemgrError
from statemgr.flows.committing.commit import CommitBase
from statemgr.flows.committing.publish import publish_now
from statemgr.flows.opening.adopted_job import gone_on
from statemgr.flows.opening.open_job import JobTopics, read_published
from statemgr.flows.opening.opening_checks import refuse_lost_job
from statemgr.flows.opening.repair import prepare_repair, repeated_attachments
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published
from statemgr.ids import task_name
from statemgr.local import ChangeWriter
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, Layout, Marker
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.model.jobs.adopted_job import AdoptedJob
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions, Permit
from statemgr.model.keys.partitioners import recorded_name
from statemgr.operations.adopt.changelogs import running
from statemgr.operations.adopt.copying import Copied, Copy, Counts, count
from statemgr.operations.adopt.found import OldJob, OldPartition, OldStore, Request
from statemgr.operations.adopt.local_copies import LocalCopies
from statemgr.operations.adopt.look import look
from statemgr.operations.adopt.old_topics import Bounds, OldTopics
from statemgr.operations.adopt.repeated import recorded, repeated
from statemgr.operations.adopt.snapshots import AdoptedSnapshot, OldSnapshots, SnapshotCounts
from statemgr.operations.adopt.target import check_target
from statemgr.ports import CheckpointLog, Progress, Publisher
from statemgr.services import Services

#: The copies are records that no checkpoint explains yet.
_OWN_COPIES = Permissions(allow_empty_start=True, overwrite_changelog=True)


@dataclass(frozen=True)
class Adopted:
    """What was found, and counted while it was copied (None if an earlier run has adopted the job); store → what each
    task's snapshot has; and task → its checkpoint.
    """

    old: OldJob | None
    snapshots: Mapping[str, Sequence[SnapshotCounts]] = field(default_factory=dict)
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)


def dry_run(
    services: Services,
    log: CheckpointLog,
    old: OldTopics,
    request: Request,
    blobs: OldSnapshots | None = None,
    *,
    in_place: bool,
    counting: bool,
    progress: Progress,
) -> Adopted:
    """Look whether :func:`adopt` would succeed. ``counting``: read the changelogs and snapshots.

    Raises: as :func:`adopt`.
    """
    done = repeated(services, log, old, request, in_place=in_place, only_settled=True)
    if done:
        return Adopted(None, checkpoints=done)
    found = look(old, services.clock, request, with_counts=counting, progress=progress)
    check_target(services, found, blobs, in_place=in_place)
    with _what_to_remove(services, in_place=in_place):
        refuse_lost_job(services, look_at_blobs=not (in_place and found.snapshots))
    return Adopted(found, blobs.count(found) if counting and blobs is not None else {})


def adopt(
    services: Services,
    log: CheckpointLog,
    old: OldTopics,
    request: Request,
    blobs: OldSnapshots | None = None,
    *,
    in_place: bool,
    local_copies: bool = True,
    progress: Progress,
) -> Adopted:
    """Adopt the old job. Run again after a crash, it continues the copy, or finds that it has succeeded.

    ``local_copies``: leave the stores on this machine, for a job that opens here.

    Raises: as :func:`look`; PermissionNeeded if the job has state already, or a changelog has records of others;
        TopicMisconfigured; FencedError, RetryableError; OutcomeUnknownError: run it again to find out.
    """
    config = services.config
    earlier = partial(repeated, services, log, old, request, in_place=in_place)
    if done := earlier(only_settled=True):
        return Adopted(None, checkpoints=done)
    found = look(old, services.clock, request, time_ms=services.changelog().time_ms, progress=progress)  # 1
    check_target(services, found, blobs, in_place=in_place)
    keeps_old_blobs = in_place and bool(found.snapshots)
    with _what_to_remove(services, in_place=in_place):
        JobTopics(services).ensure(allow_empty_start=keeps_old_blobs)
    names = [task_name(index) for index in range(config.tasks)]
    if done := earlier(only_settled=True):  # the look may take a minute, and nobody is fenced yet
        return Adopted(None, checkpoints=done)
    with ExitStack() as undo, Owner.take(services, log) as owner:  # 2
        if done := earlier(only_settled=False):
            return Adopted(None, checkpoints=done)
        with _what_to_remove(services, in_place=in_place):
            refuse_lost_job(services, look_at_blobs=not keeps_old_blobs)
        _reserve(services, log, owner.publisher, names)
        copies = LocalCopies(services, services.ids.attempt_id(), local_copies)
        undo.callback(copies.remove)
        adopting = _Adopting(services, old, owner.publisher, found, copies, progress)
        copied = {store.name: adopting.store(store, in_place=in_place) for store in found.stores.values()}  # 3
        snapshots = adopting.snapshots(blobs, in_place=in_place)
        layout = Layout(1, config.tasks, recorded_name(found.producers))
        read_published(owner, layout, names, _OWN_COPIES, adopting=True)
        published = owner.published
        if done := earlier(only_settled=True):  # a run that has overtaken this one has published meanwhile
            return Adopted(None, checkpoints=done)
        commits = _commits(services, published, found, copies, copied, snapshots)
        made = recorded(old, request, found, in_place=in_place)
        published.along = (made.encoded(config.job_name, config.job_id),)
        settled = replace(request, settle_s=0.0)
        if (
            look(old, services.clock, settled, again=True, time_ms=lambda: found.seen_ms, progress=progress) != found
        ):  # 4
            raise running("its offsets or topics have changed during the copy")
        publish_now(owner, "the adoption", commits)  # 5 and 6
        undo.pop_all()
        failed = [*_written_again(owner, found, local_copies=local_copies)] if in_place else []  # 7
    stores = {
        name: replace(store, counts=tuple(one.counts for one in copied[name])) for name, store in found.stores.items()
    }
    notes = (*found.notes, *filter(None, [copies.note]), *failed, *_restarted(old, made))
    counts = {store: [one.counts for one in of] for store, of in snapshots.items()}
    return Adopted(replace(found, stores=stores, notes=notes), counts, published.checkpoints)


@contextmanager
def _what_to_remove(services: Services, *, in_place: bool) -> Iterator[None]:
    """A context manager in which the refusal of a job that has lost its checkpoints says what to do for an adoption."""
    try:
        yield
    except PermissionNeeded as error:
        here, config = services.task_directory(task_name(0)).parent, services.config
        hint = (
            f"to adopt again, remove the directory {here} on this machine, or set another job.name. Delete none of the "
            "topics and blobs that `--in-place` adopts: they are the only state"
            if in_place
            else "to adopt again after you have deleted the new job's topics, also remove the directory "
            f"{here} on this machine and the blobs below {config.job_key}/, or set another job.name. Delete nothing "
            "that an adoption with `--in-place` has taken over: it is the only state"
        )
        raise PermissionNeeded(
            error.message,
            hint=f"{hint}. If nobody has deleted the checkpoints, check kafka.bootstrap.servers and "
            "task.checkpoint.topic",
            **error.where,
        ) from None


def _written_again(owner: Owner, found: OldJob, *, local_copies: bool) -> Iterator[str]:
    """Step 7. Yields: a note if it failed. The adoption is in force, and the first opening of each task tries again."""
    services, published = owner.services, owner.published
    tails = {
        task_name(task): frozenset(
            (KAFKA_CHANGELOG, store.name) for store in found.stores.values() if store.partitions[task].has_tail
        )
        for task in range(found.tasks)
    }
    if not any(tails.values()):
        return
    try:
        commits = []
        for task, record in published.records.items():
            assert record is not None
            base = CommitBase(task, published.layout, published.epoch, record.current, tails[task])
            attachments = repeated_attachments(record.current)
            commits.append(prepare_repair(services, record, base, attachments=attachments)[1])
        publish_now(owner, "the state after the records that the old job did not commit", commits)
        for task, pairs in tails.items() if not local_copies else ():
            for _, store in pairs:
                services.directories(task, store).keep_only(())
    except StatemgrError as error:
        yield (
            "the state was not written again after the records that the old job did not commit: open every task of the "
            "new job before these records are older than min.compaction.lag.ms of the changelogs, because it cannot be "
            f"restored from there afterwards: {error}"
        )


def _restarted(old: OldTopics, made: AdoptedJob) -> Iterator[str]:
    """A note if the old job has gone on since step 4. The adoption is in force, so this does not fail."""
    with suppress(StatemgrError):
        for _, why in gone_on(old.metadata, made)[:1]:
            yield f"somebody started the old job again before the adoption was published: {why}. Stop it"


@dataclass(frozen=True)
class _Adopting:
    """Steps of one adoption."""

    services: Services
    old: OldTopics
    publisher: Publisher
    found: OldJob
    copies: LocalCopies
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
            store: [blobs.adopt(self.found, store, task, attempt, in_place=in_place) for task in range(len(of))]
            for store, of in self.found.snapshots.items()
        }

    def _copied(self, store: OldStore, task: int) -> Copied:
        topic, old = self.services.config.stores[store.name].changelog_topic, store.partitions[task]
        copy = Copy(
            self.services,
            self.old,
            self.publisher,
            store.name,
            store.topic,
            self.services.changelog().describe(topic),
            task,
            old.number,
            old.bounds.until(old.end),
            self.found.decoder(store, task),
            f"{store.proof.kind.name}, TTL {self.found.ttls.get(store.name)}",
            store.proof.kind.remembers,
            self.progress,
        )
        # what an earlier run has copied is not read again, and compaction may have changed it
        copied = self.copies.along(store.name, task, copy.run, whole=not copy.has_begun())
        self._check_age(store, old)
        return copied

    def _in_place(self, store: OldStore, task: int) -> Copied:
        """The marker at the end of the old changelog itself. Raises: InvalidError if its records are not plain."""
        old, decoder = store.partitions[task], self.found.decoder(store, task)

        def read(writer: ChangeWriter | None) -> Counts:
            # also if nothing is converted: a record without a key could never be restored, nor be read by a fill
            counts = plain(old.bounds.until(old.end), writer)
            plain(replace(old.bounds, start=old.end), None)  # what is left out
            return counts

        def plain(bounds: Bounds, writer: ChangeWriter | None) -> Counts:
            counts = count(self.old, store.name, store.topic, old.number, bounds, decoder, self.progress, writer)
            if counts.converted or counts.skipped:
                raise InvalidError(
                    f"{counts.converted + counts.skipped} records are in a form of {self.found.origin.title} that the "
                    "new job would not understand",
                    hint="use `statemgr adopt` without `--in-place`: it converts the records while it copies them",
                    topic=store.topic.name,
                    partition=old.number,
                )
            return counts

        counts = self.copies.along(store.name, task, read)
        self._check_age(store, old)
        return Copied(ChangelogMarker(store.topic.name, store.topic.topic_id, old.number, old.end), counts)

    def _check_age(self, store: OldStore, old: OldPartition) -> None:
        """Raises: InvalidError if compaction may have removed values of the checkpoint while they were read."""
        if old.until_ms is not None and self.services.changelog().time_ms() >= old.until_ms:
            raise InvalidError(
                "the old job's checkpoint became older than min.compaction.lag.ms of the changelog during the copy: "
                "compaction may have removed values that belong to it",
                hint="run it again: it then also adopts the records after the checkpoint, and says how many input "
                "records may count twice",
                topic=store.topic.name,
                partition=old.number,
                store=store.name,
            )


def _commits(
    services: Services,
    published: Published,
    found: OldJob,
    copies: LocalCopies,
    copied: Mapping[str, Sequence[Copied]],
    snapshots: Mapping[str, Sequence[AdoptedSnapshot]],
) -> list[PreparedCommit]:
    """The first commit of each task: nothing but input offsets and markers."""
    config = services.config
    return [
        PreparedCommit(
            config.job_name,
            config.job_id,
            name,
            published.layout,
            published.epoch,
            copies.attempt,
            None,
            found.offsets(index),
            {
                store: PreparedStore(copies.state_id(store), {KAFKA_CHANGELOG: of[index].marker})
                for store, of in copied.items()
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
