"""Repair: an extra commit that makes damaged backups of the current checkpoint again.

Steps of :func:`prepare_repair`:

1. restore the damaged stores exactly as published, from the local copy or from any backend that has them
2. fill the damaged backends from these stores, as a commit does; all other markers stay
3. return a prepared commit of the same state and the same input offsets (``publish`` is the next flow)

The restored stores are private copies: they have none of the task's later writes, and the task's own stores stay
untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from statemgr.backends.services import Services
from statemgr.errors import OpeningCancelled
from statemgr.flows.commit import CommitBase, freeze, prepare
from statemgr.flows.restore import restore_task
from statemgr.model.checkpoint import SEQUENCE, Attachment, Checkpoint, CheckpointRecord, Marker
from statemgr.model.commit import PreparedCommit, PreparedStore


class GivesWay(OpeningCancelled):
    """A repair made way for a commit or a close. It is tried again later, unless the commit has made the backups."""


def repeated_attachments(checkpoint: Checkpoint) -> tuple[Attachment, ...]:
    """The attachments of a repeated checkpoint, with the sequence number under which they were made."""
    if checkpoint.batch is None and not checkpoint.attachments:
        return ()
    if any(attachment.name == SEQUENCE for attachment in checkpoint.attachments):
        return checkpoint.attachments
    return (*checkpoint.attachments, Attachment(SEQUENCE, inline=str(checkpoint.sequence).encode()))


def can_repair(services: Services, record: CheckpointRecord) -> bool:
    """Whether the checkpoint lists exactly the job's stores; if not, the next commit makes the backups again."""
    durable = {store for store, is_durable in services.durable.items() if is_durable}
    return set(record.current.stores) == durable


def prepare_repair(
    services: Services,
    record: CheckpointRecord,
    base: CommitBase,
    *,
    attachments: tuple[Attachment, ...] = (),
    check: Callable[[], None] = lambda: None,
) -> tuple[CommitBase, PreparedCommit]:
    """Make the damaged backups of a checkpoint (``base.refill``) again.

    Args:
        attachments: the attachments of the repeated checkpoint.
        check: called now and then; an exception from it ends the repair.

    Returns: the base, with damage that was found meanwhile, and the commit.
    Raises: MissingState, CorruptError if nothing can supply a store; RetryableError, AccessDenied, DiskFull.
    """
    checkpoint, task = record.current, record.task
    carried, refill = _carried(services, base, record)
    damaged = {store for _, store in refill}
    with ExitStack() as closing:
        stores, restored = restore_task(  # 1
            services,
            task,
            checkpoint,
            older=record.checkpoints[1:],
            only=damaged,
            progress=lambda *_: check(),
        )
        for store in stores.values():
            closing.callback(store.close)
        refill |= {(factory, one.store) for one in restored for factory in one.damaged}
        base = replace(base, refill=refill)
        frozen = freeze(services, stores, base, checkpoint.input_offsets)  # 2
        prepared = prepare(services, stores, frozen, portable=False, attachments=attachments, check=check)
    kept = {name: found for name, found in carried.items() if name not in stores}
    stores_again = {**kept, **prepared.stores}
    return base, replace(prepared, stores=stores_again, input_topic_ids=checkpoint.input_topic_ids)  # 3


def _carried(
    services: Services, base: CommitBase, record: CheckpointRecord
) -> tuple[Mapping[str, PreparedStore], frozenset[tuple[str, str]]]:
    """All stores with their valid markers, and the pairs to fill, including those whose markers are no longer valid."""
    refill = set(base.refill)
    carried = {}
    for name, state_id in record.current.stores.items():
        markers: dict[str, Marker] = {}
        for factory in services.config.stores[name].backup_factories:
            marker = base.marker(factory, name)
            if marker is None:
                continue
            kept = services.backup_manager(factory).carry(services.identity(record.task, name), marker)
            if kept is None:
                refill.add((factory, name))
            else:
                markers[factory] = kept
        carried[name] = PreparedStore(state_id, markers, {})
    return carried, frozenset(refill)
