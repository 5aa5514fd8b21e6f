"""Helpers that commit: a single commit by a task, attempts of an engine, or a record published without the flows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine import (
    Epoch,
    PreparedCommit,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    open_attempt,
    prepared_from_bytes,
    prepared_to_bytes,
)
from statemgr.engine.task import Task
from statemgr.errors import OutcomeUnknownError, UnavailableError
from statemgr.flows.owner import Owner
from statemgr.kafka.transactions.publisher import TransactionalPublisher, task_transactional_id
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.phases import Phase, observed
from statemgr.reader import JobReader
from statemgr.wiring import open_services
from tests.jobs import with_changes

TASK = "Partition 0"
#: Key → value. None deletes the key.
Items = Mapping[bytes, bytes | None]


def failing(*phases: Phase) -> AbstractContextManager[None]:
    """Make each of these phases fail inside the block, as it would when a server is unavailable."""

    def fail(phase: Phase, subject: str) -> None:
        if phase in phases:
            raise UnavailableError(f"told to, {subject}")

    return observed(fail)


def lose_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    """Lose the acknowledgement of each publish, and let no owner find out whether it succeeded."""
    commit = TransactionalPublisher._commit

    def unanswered(self: TransactionalPublisher, *arguments: Any) -> NoReturn:
        commit(self, *arguments)
        raise OutcomeUnknownError("told to")

    def unsettled(self: Owner) -> NoReturn:
        raise OutcomeUnknownError("told to")

    patch.setattr(TransactionalPublisher, "_commit", unanswered)
    patch.setattr(Owner, "settle", unsettled)


def write(task: Task, items: Items, stores: Collection[str] = ("totals",)) -> None:
    """Put and delete keys in some stores of an open task."""
    for name in stores:
        store = task.store(name)
        for key, value in items.items():
            if value is None:
                store.delete(key)
            else:
                store.put(key, value)


def commit(
    config: JobConfig, items: Items, offset: int | Mapping[str, int], task: str = TASK, **permissions: bool
) -> Checkpoint:
    """Open a task, write to every store, commit and close.

    ``offset`` is the offset of ``orders-0``, or a mapping with several offsets.
    """
    with StateManager(config) as manager, manager.open_task(task, **permissions) as opened:
        write(opened, items, tuple(config.stores))
        return opened.commit({"orders-0": offset} if isinstance(offset, int) else offset)


def attempt(
    config: JobConfig,
    epoch: Epoch,
    task: str,
    items: Items,
    offset: int,
    attachments: Mapping[str, bytes | Path] | None = None,
    checkpoints: Mapping[str, Checkpoint | None] | None = None,
) -> PreparedCommit:
    """Run one attempt as an executor would: it receives bytes and returns bytes."""
    known = (checkpoints or epoch.checkpoints)[task]
    checkpoint = checkpoint_from_bytes(checkpoint_to_bytes(known)) if known is not None else None
    there = Epoch.from_bytes(epoch.to_bytes())
    with open_attempt(config, task, checkpoint, there) as opened:
        for store in opened.stores.values():
            for key, value in items.items():
                store.delete(key) if value is None else store.put(key, value)
        for name, data in (attachments or {}).items():
            opened.attach(name, data)
        return prepared_from_bytes(prepared_to_bytes(opened.prepare({"orders-0": offset})))


def current(config: JobConfig, task: str = TASK) -> CheckpointRecord | None:
    """Return a task's record from the topic. Reading it fences nobody."""
    with JobReader(config) as reader:
        return reader.records().get(task)


def published(config: JobConfig, factory: str) -> dict[str, dict[str, dict[bytes, bytes]]]:
    """Return the published state as task → store → content, restored from one backend only. This fences nobody."""
    state: dict[str, dict[str, dict[bytes, bytes]]] = {}
    with JobReader(with_changes(config, task__restore__factories=[factory])) as reader:
        for task in reader.records():
            state[task] = {}
            for store in config.stores:
                with reader.open_store(task, store) as opened:
                    state[task][store] = dict(opened.scan(None, None))
    return state


def totals(config: JobConfig, factory: str) -> dict[str, dict[bytes, bytes]]:
    """Return the published content of the store ``totals`` as task → content, from one backend only."""
    return {task: stores["totals"] for task, stores in published(config, factory).items()}


def publish_by_hand(config: JobConfig, record: CheckpointRecord, version: int = 2, task: str = TASK) -> None:
    """Publish a record without the flows, as other software would."""
    pairs = [(codecs.encode_key(record.key_v1()), codecs.encode_record_v1(record))]
    if version == 2:
        pairs = codecs.encode_record(record)
    publisher = TransactionalPublisher(config, task_transactional_id(config, task), SystemClock())
    try:
        publisher.fence()
        with publisher.transaction() as transaction:
            for key, value in pairs:
                transaction.send(config.checkpoint_topic, key, value, partition=0)
    finally:
        publisher.close()


def blob_files(directory: Path, *, expiring: bool | None = None) -> set[str]:
    """Return the names of the blobs in a directory. ``expiring`` selects those with or without a time to live."""
    root = directory / "blobs"
    found = set()
    for path in root.rglob("*"):
        if not path.is_file() or path.name.startswith("."):
            continue
        expires = path.with_name(f".{path.name}.expires").exists()
        if expiring is None or expires == expiring:
            found.add(path.relative_to(root).as_posix())
    return found


def check_blobs(config: JobConfig) -> None:
    """Check that every blob of every retained checkpoint exists and will not expire."""
    with closing(open_services(config)) as services, JobReader(config) as reader:
        for task in reader.records():
            for blob_id in referenced(config, task):
                assert services.blobs().stat(blob_id).expires_ms is None, f"{blob_id} of a published checkpoint expires"


def referenced(config: JobConfig, task: str = TASK) -> set[str]:
    """Return every blob that a task's retained checkpoints need: indexes, files, segments and attachments."""
    record = current(config, task)
    assert record is not None
    services = open_services(config)
    try:
        found: set[str] = set()
        for checkpoint in record.checkpoints:
            for factory, of_store in checkpoint.state_checkpoint_markers.items():
                manager = services.backup_manager(factory)
                for store, marker in of_store.items():
                    found.update(manager.referenced_blobs(services.identity(task, store), marker))
            found.update(a.blob.blob_id for a in checkpoint.attachments if a.blob)
        return found
    finally:
        services.close()
