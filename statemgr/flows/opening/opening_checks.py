"""Refuses an opening that would lose state: an empty start, or a changed configuration.

A job or task without a checkpoint may start empty only if nothing shows that it had state. Each of these is enough to
refuse an empty start without the one-shot permission:

1. for a job without any record on the checkpoint topic (or without the topic): a published blob under its prefix, or a
   published state on this machine. A published blob does not expire, unlike those that a crashed first commit left
2. for a task without a record: a truncated topic, a published state of the task on this machine, a published blob under
   its prefix, or committed records in one of its changelogs

A task with a checkpoint needs permission to add or remove a store and to change its serdes. A store that no checkpoint
has yet needs a backend that both commits and restores use: otherwise the second opening would be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from statemgr.backends.changelog.integrity import count_records
from statemgr.config import StoreConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import ConfigError, MissingBlob, MissingState, PermissionNeeded, StatemgrError
from statemgr.ids import task_index, task_name, task_path, task_prefix
from statemgr.local import durable
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.plan import Labels, check_listing, check_serdes, check_ttl
from statemgr.ports import CheckpointLog, list_blobs
from statemgr.services import Services

_PERMISSION = (
    "to start empty instead, open the job once with allow_empty_start=True; if the checkpoint topic itself is lost, "
    "create it with `statemgr topics create --allow-empty-start`"
)
#: A file in a task's local directory: the task has published state.
_PUBLISHED = "PUBLISHED"
#: Blobs of unpublished attempts that are skipped. More than this number count as evidence.
_MOST_BLOBS = 1000


def refuse_lost_job(services: Services, *, look_at_blobs: bool = True) -> None:
    """Called if the topic has no record of the job. Raises: PermissionNeeded if the job had state.

    Args:
        look_at_blobs: False if it is known whose blobs are below the job's prefix.
    """
    config = services.config
    # each opening of a new job looks, so it must not ask for each task
    found = durable.directories_with(services.task_directory(task_name(0)).parent, _PUBLISHED)
    here = next((name for name in map(task_name, range(config.tasks)) if task_path(name) in found), None)
    if here is not None:
        evidence: str | None = f"this machine has published state of {here}"
    elif not look_at_blobs:
        evidence = None
    else:
        evidence = _published_blob(services, f"{config.job_key}/")
    if evidence is not None:
        raise PermissionNeeded(
            f"the job has no checkpoint, but {evidence}",
            hint=f"check kafka.bootstrap.servers and task.checkpoint.topic; {_PERMISSION}",
            job=config.job_name,
            topic=config.checkpoint_topic,
        )


def refuse_lost_checkpoint(
    services: Services, checkpoint_log: CheckpointLog, task: str, *, look_at_blobs: bool
) -> None:
    """Called if the topic has no record of ``task``. Raises: PermissionNeeded if the task had state.

    Args:
        look_at_blobs: False if :func:`refuse_lost_job` has already looked at the blobs of all tasks.
    """
    evidence = _state_of_task(services, checkpoint_log, task, look_at_blobs)
    if evidence is not None:
        raise PermissionNeeded(
            f"the checkpoint topic has no checkpoint of the task, but {evidence}",
            hint=f"restore the records of the topic, or {_PERMISSION}",
            job=services.config.job_name,
            task=task,
            topic=services.config.checkpoint_topic,
        )
    _refuse_used_changelogs(services, task)


def remember_published(services: Services, task: str) -> None:
    """Note on this machine that the task has published state. Only used to refuse an empty start."""
    directory = durable.make_private(services.task_directory(task))
    if not durable.exists(directory / _PUBLISHED):
        durable.create(directory / _PUBLISHED).close()


def touch(services: Services, task: str) -> None:
    """Note on this machine that a process here has the task (:mod:`statemgr.flows.sweep`). A failure is no error."""
    with suppress(OSError, StatemgrError):
        durable.touch(services.task_directory(task), services.clock.time_ns())


def _published_blob(services: Services, prefix: str) -> str | None:
    """A published blob below a prefix, or None. Lists a bounded number of blobs; only first starts call this."""
    if services.config.blob_uri is None:
        return None
    store = services.blobs()
    for number, blob in enumerate(list_blobs(store, prefix)):
        if number == _MOST_BLOBS:
            return f"the blob store has more than {_MOST_BLOBS:,} blobs below {prefix}"
        try:
            found = blob if store.administration.listing_tells_ttl else store.stat(blob.blob_id)
        except MissingBlob:
            continue
        if found.expires_ms is None:
            return f"the blob store has the published blob {blob.blob_id}"
    return None


def _state_of_task(services: Services, checkpoint_log: CheckpointLog, task: str, look_at_blobs: bool) -> str | None:
    if checkpoint_log.was_truncated():
        return "records were deleted from the topic"
    if was_published_here(services, task):
        return "this machine has published state of it"
    return _published_blob(services, task_prefix(services.config.job_key, task)) if look_at_blobs else None


def _refuse_used_changelogs(services: Services, task: str) -> None:
    """Raises: PermissionNeeded if a changelog has records, which show state of this job or of another one."""
    partition = task_index(task)
    for store in services.config.stores.values():
        if KAFKA_CHANGELOG not in (*store.backup_factories, *store.restore_factories):
            continue
        try:
            start, end = services.changelog().bounds(store.changelog_topic, partition)
        except MissingState:
            continue  # the topic is new
        count = count_records(services.changelog(), store.changelog_topic, partition, start, end)
        if count is not None:
            raise PermissionNeeded(
                f"the checkpoint topic has no checkpoint of the task, but the changelog holds {count} records",
                hint="if the job wrote them, restore the checkpoint topic; if not, set "
                f"stores.{store.name}.changelog.topic to another topic. To delete them and start empty, open the job "
                "once with allow_empty_start=True and overwrite_changelog=True",
                job=services.config.job_name,
                task=task,
                store=store.name,
                topic=store.changelog_topic,
                partition=partition,
            )


def was_published_here(services: Services, task: str) -> bool:
    """Whether this machine has published state of the task."""
    return durable.exists(services.task_directory(task) / _PUBLISHED)


# --- changes of the configuration --------------------------------------------------------------------------------


def check_changes(
    services: Services,
    records: Mapping[str, CheckpointRecord | None],
    permissions: Mapping[str, Permissions],
    *,
    application_may_choose: bool,
) -> None:
    """Refuse an opening that would lose state because the configuration changed.

    Args:
        application_may_choose: whether the application may later pass other serdes than the configured ones. Then
            serdes that the configuration leaves at their defaults are checked when the application asks for the store.

    Raises: PermissionNeeded.
    """
    config = services.config
    labels = {
        name: _configured(services, store) if application_may_choose else store.serdes
        for name, store in config.stores.items()
        if store.durable
    }
    has_ttl = {name: store.ttl_ms is not None for name, store in config.stores.items()}
    for task, record in records.items():
        if record is None:
            continue
        check_listing(
            record.current, config.stores, permissions[task], durable=services.durable, job=config.job_name, task=task
        )
        check_ttl(record.current, has_ttl, job=config.job_name, task=task)
        check_serdes(
            record.current, labels, allowed=permissions[task].allow_serde_change, job=config.job_name, task=task
        )


def refuse_unrestorable(services: Services, found: Iterable[CheckpointRecord]) -> None:
    """Raises: ConfigError for a store that none of the job's checkpoints has, and that nothing could restore after the
    first commit. If one has it, the configuration may be that of a step of a migration."""
    known = {store for record in found for store in record.current.stores}
    for store in services.config.stores.values():
        if store.durable and not store.restorable and store.name not in known:
            own = f"stores.{store.name}.restore.factories"
            raise ConfigError(
                f"the store is backed up to {' and '.join(store.backup_factories)}, but only restored from "
                f"{' and '.join(store.restore_factories)}: after the first commit, nothing could restore it",
                hint="name one of the first in this key, or remove the key",
                key=own if own in services.config.values else "task.restore.factories",
                store=store.name,
            )


def serdes_in_force(services: Services, checkpoint: Checkpoint | None) -> dict[str, tuple[str, str] | None]:
    """Store → labels of its serdes: the configured ones, or the checkpoint's until the application asks for the
    store. None for a new store whose serdes the application may still choose."""
    found: dict[str, tuple[str, str] | None] = {}
    for name, store in services.config.stores.items():
        key, value = _configured(services, store)
        recorded = checkpoint.serdes.get(name) if checkpoint else None
        if recorded is not None:
            key, value = key or recorded[0], value or recorded[1]
        found[name] = (key, value) if key is not None and value is not None else None
    return found


def _configured(services: Services, store: StoreConfig) -> Labels:
    """The labels of explicitly configured serdes; None for a serde that is left at its default."""
    given = services.config.values
    prefix = f"stores.{store.name}"
    return (
        store.key_serde if f"{prefix}.key.serde" in given else None,
        store.serdes[1] if f"{prefix}.value.serde" in given else None,
    )
