"""Repair: an extra commit that makes damaged backups of the current checkpoint again.

Steps:

1. an opening, a clean-up, a publish, a background snapshot or :mod:`statemgr.flows.upkeep` meets a lost or altered blob
   or changelog, and reports it to :class:`~statemgr.flows.published.Damage`: as *found* if a store's backup in one
   backend is certainly damaged, as *suspected* if something only looks wrong or could not be read
2. after a suspicion, :func:`~statemgr.flows.upkeep.find_damage` looks at every blob that the current checkpoint needs
3. :func:`prepare_repair` restores the damaged stores exactly as published, from the local copy or from any backend that
   has them
4. it fills the damaged backends from these stores, as a commit does; all other markers stay
5. it returns a prepared commit of the same state and the same input offsets (``publish`` is the next flow)

The restored stores are private copies: they have none of the task's later writes, and the task's own stores stay
untouched. If a commit comes first, it makes the damaged backups again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from statemgr.errors import OpeningCancelled
from statemgr.flows.committing.commit import CommitBase, fill
from statemgr.flows.opening.restore import restore_task
from statemgr.model.checkpoint import FIRST, SEQUENCE, Attachment, Checkpoint, CheckpointRecord, Marker
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.services import Services


class GivesWay(OpeningCancelled):
    """A repair stopped because a commit or a close waits. It is tried again later if it is still needed."""


def repeated_attachments(checkpoint: Checkpoint) -> tuple[Attachment, ...]:
    """The attachments of a repeated checkpoint, with the sequence number of the publish that it repeats.

    A checkpoint without output needs that number only if nothing was committed since the first publish of the job.
    """
    if checkpoint.batch is None and not checkpoint.attachments and checkpoint.sequence != FIRST:
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
    """Steps 3 to 5, for the backups in ``base.refill``.

    Args:
        attachments: the attachments of the repeated checkpoint.
        check: called now and then; an exception from it ends the repair.

    Returns: the base, with damage that was found meanwhile, and the commit.
    Raises: MissingState, CorruptError if nothing can supply a store; RetryableError, AccessDenied, DiskFull.
    """
    checkpoint, task = record.current, record.task
    carried, refill = carried_stores(services, base, record)
    # only a backend that the configuration has left has these stores
    without = (name for name, store in carried.items() if not store.has_backup)
    refill |= {(factory, name) for name in without for factory in services.config.stores[name].backup_factories}
    damaged = {store for _, store in refill}
    stores, restored = restore_task(  # 3
        services, task, checkpoint, older=record.checkpoints[1:], only=damaged, progress=lambda *_: check()
    )
    base = replace(base, refill=refill | {(factory, one.store) for one in restored for factory in one.damaged})
    prepared = fill(services, stores, base, checkpoint.input_offsets, attachments=attachments, check=check)  # 4
    kept = {name: found for name, found in carried.items() if name not in stores}
    all_stores = {**kept, **prepared.stores}
    return base, replace(prepared, stores=all_stores, input_topic_ids=checkpoint.input_topic_ids)  # 5


def carried_stores(
    services: Services, base: CommitBase, record: CheckpointRecord
) -> tuple[Mapping[str, PreparedStore], frozenset[tuple[str, str]]]:
    """The checkpoint's stores with their valid markers, and the pairs to fill, including those without a valid one."""
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
