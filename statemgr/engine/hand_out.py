"""Checkpoints for the workers of one batch: a worker gets its own task's, and nothing grows with tasks times tasks.

Few bytes travel with the function that is shipped to every worker. More are put into one blob, in cells of one size,
so that a worker finds its cell without a table: cell ``i`` belongs to task ``i`` and begins at ``i`` times the size. A
cell has the length of the content (4 bytes, big endian; 0: the task has no checkpoint), the content's XXH3-128 hash (16
bytes), the content, and zeros. The blob expires unless :func:`withdraw` deletes it first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from statemgr.backends.services import Services
from statemgr.config import JobConfig
from statemgr.engine.host import attempt_host
from statemgr.errors import CorruptBlob, StatemgrError
from statemgr.ids import task_index
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.hashing import content_hash
from statemgr.ports.blobs import BlobReader

log = logging.getLogger(__name__)
#: Bytes of checkpoints up to which they travel with the function.
INLINE_LIMIT = 64 * 1024
_LENGTH, _HASH = 4, 16


@dataclass(frozen=True, slots=True)
class HandOut:
    """The checkpoints of one batch's tasks. ``inline``: task's number → its checkpoint; or ``blob``: the name of the
    blob that has a cell of ``cell_size`` bytes for every task."""

    inline: Mapping[int, bytes] = field(default_factory=dict)
    blob: str | None = None
    cell_size: int = 0


def hand_out(config: JobConfig, checkpoints: Mapping[str, Checkpoint]) -> HandOut:
    """Make the checkpoints (task → checkpoint) available to workers. Raises: UnavailableError, AccessDenied."""
    contents = {
        task_index(task): codecs.encode_checkpoint(_own(checkpoint)) for task, checkpoint in checkpoints.items()
    }
    if sum(map(len, contents.values())) <= INLINE_LIMIT:
        return HandOut(inline=contents)
    cell_size = _LENGTH + _HASH + max(map(len, contents.values()))
    cells = (_cell(contents.get(number, b""), cell_size) for number in range(config.tasks))
    services = attempt_host(config).services
    blob = f"{config.job_name}/{config.job_id}/_commit/{services.ids.attempt_id()}/checkpoints"
    services.transfer().put(blob, b"".join(cells))
    return HandOut(blob=blob, cell_size=cell_size)


def handed_out(config: JobConfig, found: HandOut, task: int) -> Checkpoint | None:
    """A task's own checkpoint, on the worker's side.

    Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
    """
    if found.blob is None:
        data = found.inline.get(task, b"")
    else:
        data = _read(config, found, task)
    return codecs.decode_checkpoint(data) if data else None


def withdraw(config: JobConfig, found: HandOut) -> None:
    """Delete what was handed out, in the background. Failing is no error: it expires."""
    if found.blob is not None:
        host = attempt_host(config)
        host.background.submit(_delete, host.services, found.blob)


def _delete(services: Services, blob: str) -> None:
    try:
        services.blobs().delete(blob)
    except StatemgrError as error:
        log.warning("the checkpoints that were passed to workers were not deleted; they expire: %s", error)


def _own(checkpoint: Checkpoint) -> Checkpoint:
    """What a task continues from, without what belongs to the whole job or to the output."""
    return replace(checkpoint, input_offsets={}, input_topic_ids={}, batch=None, attachments=(), outstanding_ttl=())


def _cell(content: bytes, size: int) -> bytes:
    if not content:
        return bytes(size)
    return (len(content).to_bytes(_LENGTH, "big") + content_hash(content) + content).ljust(size, b"\0")


def _read(config: JobConfig, found: HandOut, task: int) -> bytes:
    assert found.blob is not None
    for _ in range(2):
        with attempt_host(config).services.blobs().get(found.blob, task * found.cell_size, found.cell_size) as reader:
            cell = _all(reader, found.cell_size)
        length = int.from_bytes(cell[:_LENGTH], "big")
        content = cell[_LENGTH + _HASH :][:length]
        if len(cell) == found.cell_size and (not length or content_hash(content) == cell[_LENGTH:][:_HASH]):
            return content
    raise CorruptBlob(
        "a checkpoint that was passed to a worker is damaged", hint="run the batch again", blob=found.blob
    )


def _all(reader: BlobReader, size: int) -> bytes:
    buffer = bytearray(size)
    filled = 0
    while filled < size and (count := reader.readinto(memoryview(buffer)[filled:])):
        filled += count
    return bytes(buffer[:filled])
