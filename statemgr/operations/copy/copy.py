"""Copy: clones the state of a job at a checkpoint into another job, which must be new. The source is only read.

Steps, after :mod:`statemgr.operations.copy.look` has described the copy:

1. take the new job over (``open_job``), and check again that it has no state
2. copy the blobs, inside the blob store where it can (``blobs``), and put the indexes and chains of the new job
3. restore the stores that some backend is filled with, from any backend of the source, into the local directories of
   the new job, and fill these backends as a commit does
4. publish the first checkpoint of all tasks in one transaction (``publish``), with the input offsets of the source
5. remove the TTLs

Until step 4 has committed, everything has a TTL, and the new job has no state. A run after a crash finds the blobs that
were copied already. After step 4 the first opening of the new job finishes step 5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from statemgr.backends.blobs.branches import Part, store_copy
from statemgr.config.factories import BLOB_STORE
from statemgr.flows.committing.commit import CommitBase, fill
from statemgr.flows.committing.publish import publish_now
from statemgr.flows.opening.open_job import JobTopics, read_published
from statemgr.flows.opening.opening_checks import serdes_in_force
from statemgr.flows.opening.repair import repeated_attachments
from statemgr.flows.opening.restore import open_restored, restore_store
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published, common_batch, common_serdes
from statemgr.model.checkpoint import Attachment, Checkpoint, Marker
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.plan import plan_retained
from statemgr.operations.copy.blobs import BlobCopies, Moved
from statemgr.operations.copy.look import TaskCopy, check_new
from statemgr.ports import CheckpointLog, LocalDirectories, Progress
from statemgr.services import Services


@dataclass(frozen=True)
class Copied:
    """What was done: task → its first checkpoint; the blobs that were moved; how many others were written, such as
    indexes; and what was filled in the end."""

    checkpoints: Mapping[str, Checkpoint]
    moved: Moved
    written: int
    tasks: Sequence[TaskCopy]


def copy(
    source: Services,
    target: Services,
    log: CheckpointLog,
    tasks: Sequence[TaskCopy],
    progress: Progress,
    *,
    exported: bool = False,
) -> Copied:
    """Copy what :func:`statemgr.operations.copy.look.look` has described, and publish it.

    ``exported``: the checkpoints are those of an export, after which the job may have gone on.

    Raises: InvalidError if the new job has state meanwhile; MissingState, CorruptError if nothing can supply a store;
        FencedError; RetryableError, AccessDenied, DiskFull; OutcomeUnknownError: the topic says whether it was
        published.
    """
    JobTopics(target).ensure(allow_empty_start=True)  # `look` has found no state
    names = [one.record.task for one in tasks]
    with Owner.take(target, log) as owner:  # 1
        check_new(target, log, only_settled=False)
        known = next((one.record.layout for one in tasks if one.record.layout.tasks), tasks[0].record.layout)
        layout = replace(known, generation=1)
        permissions = Permissions(allow_empty_start=True)
        read_published(owner, layout, names, permissions)
        published = owner.published
        published.permits = ()  # they are for the first opening
        outputs = [one.checkpoint.output_sequence for one in tasks if one.checkpoint.attachments]
        published.sequence = max(outputs, default=0)  # the next output has the next number
        if exported:  # outputs may have the numbers of later checkpoints, and skip these
            published.sequence = max(published.sequence, target.clock.time_ns() // 1_000_000)
        published.serdes = serdes_in_force(target, None) | common_serdes(one.checkpoint for one in tasks)
        attempt = target.ids.attempt_id()  # its age limits the time of the copy
        copying = _Copying(source, target, published, attempt, progress)
        moved, tasks = copying.move(tasks)  # 2
        commits = target.in_parallel("copy", copying.commit, tasks)
        publish_now(owner, "the copy", commits, batch=common_batch(one.checkpoint for one in tasks))  # 4 and 5
    written = {blob for commit in commits for blob in commit.added_blobs}.difference(moved.names)
    return Copied(published.checkpoints, moved, len(written), tasks)


@dataclass(frozen=True)
class _Copying:
    """Steps 2 and 3."""

    source: Services
    target: Services
    published: Published
    attempt: str
    progress: Progress

    def move(self, tasks: Sequence[TaskCopy]) -> tuple[Moved, list[TaskCopy]]:
        """Step 2, without indexes and chains. Returns: also the tasks; stores whose blobs are lost are filled there."""
        blobs: dict[str, str] = {}
        parts: dict[str, Sequence[Part]] = {}
        for one in tasks:
            for store in one.stores.values():
                blobs |= store.blobs
                for name, found in store.parts.items():  # stores share blobs
                    parts[name] = [*parts.get(name, ()), *found]
            for attachment in one.checkpoint.attachments:
                if attachment.blob is not None:
                    name = self._renamed(attachment.blob.blob_id)
                    blobs[name] = attachment.blob.blob_id
                    parts[name] = [(replace(attachment.blob, blob_id=name), attachment.blob.size)]
        indexes = [store.index_blob for one in tasks for store in one.stores.values()]
        moved, missing = BlobCopies(self.source, self.target, blobs, parts).run(indexes, self.progress)
        for one in tasks:
            for attachment in one.checkpoint.attachments:
                if attachment.blob is not None and (name := self._renamed(attachment.blob.blob_id)) in missing:
                    raise missing[name]
        return moved, [_without(one, missing.keys()) for one in tasks]

    def commit(self, one: TaskCopy) -> PreparedCommit:
        """One task's first commit: its indexes and chains are stored, and step 3."""
        task, checkpoint = one.record.task, one.checkpoint
        markers: dict[str, dict[str, Marker]] = {store: {} for store in checkpoint.stores}
        added: list[str] = []
        for name, copied in one.stores.items():
            backup = store_copy(self.target, copied, together=True)
            assert backup.marker is not None
            markers[name][BLOB_STORE] = backup.marker
            added += backup.added_blobs
        made = self._filled(one, markers) if one.filled else None
        stores = {}
        for name, state_id in checkpoint.stores.items():
            filled = made.stores.get(name, PreparedStore(state_id)) if made is not None else PreparedStore(state_id)
            stores[name] = PreparedStore(state_id, {**filled.markers, **markers[name]}, filled.changes)
        attachments = repeated_attachments(checkpoint)
        added += [self._renamed(a.blob.blob_id) for a in attachments if a.blob is not None]
        return PreparedCommit(
            job_name=self.target.config.job_name,
            job_id=self.target.config.job_id,
            task=task,
            layout=self.published.layout,
            epoch=self.published.epoch,
            attempt=self.attempt,
            base_checkpoint_id=None,
            input_offsets=checkpoint.input_offsets,
            stores=stores,
            added_blobs=tuple(dict.fromkeys((*added, *(made.added_blobs if made is not None else ())))),
            attachments=tuple(self._attached(attachment) for attachment in attachments),
            input_topic_ids=checkpoint.input_topic_ids,
        )

    def _filled(self, one: TaskCopy, markers: Mapping[str, Mapping[str, Marker]]) -> PreparedCommit:
        """Step 3. ``markers``: store → those of the backends that need no fill."""
        source, target, task = self.source, self.target, one.record.task
        config, by_factory = source.config, dict[str, dict[str, Marker]]()
        for name, of_store in markers.items():
            for factory, marker in of_store.items():
                by_factory.setdefault(factory, {})[name] = marker
        base = replace(one.checkpoint, state_checkpoint_markers=by_factory)
        with ExitStack() as failed:
            stores = {}
            for name in sorted({store for _, store in one.filled}):
                factories = {name: config.stores[name].restore_factories}
                (plan,) = plan_retained(one.record, one.checkpoint, factories, job=config.job_name)
                directories = target.directories(task, name)
                committed, _ = restore_store(_into(source, directories), task, plan, self.progress)
                stores[name] = open_restored(target, target.identity(task, name), committed, plan.state_id)
                failed.callback(stores[name].close)
            failed.pop_all()
        commit_base = CommitBase(task, self.published.layout, self.published.epoch, base, one.filled)
        return fill(target, stores, commit_base, one.checkpoint.input_offsets)

    def _attached(self, attachment: Attachment) -> Attachment:
        if attachment.blob is None:
            return attachment
        return replace(attachment, blob=replace(attachment.blob, blob_id=self._renamed(attachment.blob.blob_id)))

    def _renamed(self, blob_id: str) -> str:
        return f"{self.target.config.job_key}/{blob_id.removeprefix(f'{self.source.config.job_key}/')}"


def _into(source: Services, directories: LocalDirectories) -> Services:
    """The services of the source, which restore into these directories."""
    return replace(source, directories=lambda _task, _store: directories)


def _without(one: TaskCopy, lost: Collection[str]) -> TaskCopy:
    """The task's copy, in which the stores that need a lost blob are filled."""
    broken = {name for name, store in one.stores.items() if any(blob in lost for blob in store.blobs)}
    stores = {name: store for name, store in one.stores.items() if name not in broken}
    return replace(one, stores=stores, filled=one.filled | {(BLOB_STORE, name) for name in broken})
