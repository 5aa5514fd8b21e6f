"""Repair: a commit of its own that makes damaged backups of the current checkpoint again.

Steps of :func:`prepare_repair`:

1. bring back the damaged stores exactly as published: from the local copy, or from whatever can supply them
2. fill the damaged backends from that, as a commit does; every other marker stays what it is
3. hand over a prepared commit of the same state and the same input offsets (``publish`` is the next flow)

The stores are private copies. What the task writes meanwhile is in none of them, and nothing that it has is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from statemgr.errors import OpeningCancelled
from statemgr.flows.commit import CommitBase, freeze, prepare
from statemgr.flows.parts import Parts
from statemgr.flows.restore import restore_task
from statemgr.model.checkpoint import SEQUENCE, Attachment, Checkpoint, CheckpointRecord, Marker
from statemgr.model.commit import PreparedCommit, PreparedStore


class GivesWay(OpeningCancelled):
    """A repair was given up for a commit or a close: it is tried again later, unless the commit has done it."""


def repeated_attachments(checkpoint: Checkpoint) -> tuple[Attachment, ...]:
    """The attachments that a repetition of a checkpoint keeps, with the sequence number that they were made under."""
    if checkpoint.batch is None and not checkpoint.attachments:
        return ()
    if any(attachment.name == SEQUENCE for attachment in checkpoint.attachments):
        return checkpoint.attachments
    return (*checkpoint.attachments, Attachment(SEQUENCE, inline=str(checkpoint.sequence).encode()))


def can_repair(parts: Parts, record: CheckpointRecord) -> bool:
    """Whether the checkpoint lists exactly the job's stores; if not, the next commit is the one that repairs."""
    durable = {store for store, is_durable in parts.durable.items() if is_durable}
    return set(record.current.stores) == durable


def prepare_repair(
    parts: Parts,
    record: CheckpointRecord,
    base: CommitBase,
    *,
    attachments: tuple[Attachment, ...] = (),
    check: Callable[[], None] = lambda: None,
) -> tuple[CommitBase, PreparedCommit]:
    """Make the damaged backups of a checkpoint (``base.refill``) again.

    Args:
        attachments: those of the checkpoint that its repetition keeps.
        check: asked now and then; what it raises gives the work up.

    Returns: the base, with what else was found to be damaged on the way, and the commit.
    Raises: MissingState, CorruptError when nothing can supply a store; RetryableError, AccessDenied, DiskFull.
    """
    checkpoint, task = record.current, record.task
    carried, refill = _carried(parts, base, record)
    damaged = {store for _, store in refill}
    with ExitStack() as closing:
        stores, restored = restore_task(  # 1
            parts,
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
        frozen = freeze(parts, stores, base, checkpoint.input_offsets)  # 2
        prepared = prepare(parts, stores, frozen, portable=False, attachments=attachments, check=check)
    kept = {name: found for name, found in carried.items() if name not in stores}
    stores_again = {**kept, **prepared.stores}
    return base, replace(prepared, stores=stores_again, input_topic_ids=checkpoint.input_topic_ids)  # 3


def _carried(
    parts: Parts, base: CommitBase, record: CheckpointRecord
) -> tuple[Mapping[str, PreparedStore], frozenset[tuple[str, str]]]:
    """Every store with the markers that still hold; and what has to be filled, with those that hold no more."""
    refill = set(base.refill)
    carried = {}
    for name, state_id in record.current.stores.items():
        markers: dict[str, Marker] = {}
        for factory in parts.config.stores[name].backup_factories:
            marker = base.marker(factory, name)
            if marker is None:
                continue
            kept = parts.backup_manager(factory).carry(parts.identity(record.task, name), marker)
            if kept is None:
                refill.add((factory, name))
            else:
                markers[factory] = kept
        carried[name] = PreparedStore(state_id, markers, {})
    return carried, frozenset(refill)
