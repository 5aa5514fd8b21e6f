"""Shares the checkpoints of one batch with its workers. Each worker gets only the checkpoint of its own task.

Small checkpoints are part of the function that Spark ships to every worker. Larger ones go into one blob, so that the
function does not grow with the number of tasks. The blob consists of cells of one size, so a worker finds its cell
without a table: cell ``i`` belongs to task ``i`` and begins at ``i`` times the size. A cell has the length of the
content (4 bytes, big endian; 0: the task has no checkpoint), the content's XXH3-128 hash (16 bytes), the content, and
zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from statemgr.config import JobConfig
from statemgr.engine.host import attempt_host
from statemgr.errors import CorruptBlob, StatemgrError
from statemgr.ids import task_index
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.hashing import content_hash
from statemgr.ports import BlobReader
from statemgr.services import Services

log = logging.getLogger(__name__)
#: Up to this many bytes, the checkpoints are part of the function.
INLINE_LIMIT = 64 * 1024
_LENGTH, _HASH = 4, 16


@dataclass(frozen=True, slots=True)
class SharedCheckpoints:
    """Where the workers of one batch find their checkpoints.

    Either ``inline`` has them by task number, or the blob of this name has a cell of ``cell_size`` bytes for each task.
    """

    inline: Mapping[int, bytes] = field(default_factory=dict)
    blob: str | None = None
    cell_size: int = 0

    def of_task(self, config: JobConfig, task: int) -> Checkpoint | None:
        """The checkpoint of one task, for its worker; None if it has none.

        Raises: MissingBlob, CorruptBlob, UnavailableError, AccessDenied.
        """
        data = self.inline.get(task, b"") if self.blob is None else _read(config, self.blob, self.cell_size, task)
        return codecs.decode_checkpoint(data) if data else None


@contextmanager
def share_checkpoints(config: JobConfig, checkpoints: Mapping[str, Checkpoint]) -> Iterator[SharedCheckpoints]:
    """Share checkpoints (task → checkpoint) with workers while the block runs.

    Afterwards a background thread deletes the blob, if there is one. If that fails, the blob expires.

    Raises: UnavailableError, AccessDenied.
    """
    contents = {
        task_index(task): codecs.encode_checkpoint(_for_worker(checkpoint)) for task, checkpoint in checkpoints.items()
    }
    if sum(map(len, contents.values())) <= INLINE_LIMIT:
        yield SharedCheckpoints(inline=contents)
        return
    cell_size = _LENGTH + _HASH + max(map(len, contents.values()))
    cells = (_cell(contents.get(number, b""), cell_size) for number in range(config.tasks))
    host = attempt_host(config)
    blob = f"{config.job_key}/_commit/{host.services.ids.attempt_id()}/checkpoints"
    host.services.transfer().put(blob, b"".join(cells))
    try:
        yield SharedCheckpoints(blob=blob, cell_size=cell_size)
    finally:
        with _or_it_expires():
            host.background.submit(_delete, host.services, blob)


def _delete(services: Services, blob: str) -> None:
    with _or_it_expires():
        services.blobs().delete(blob)


@contextmanager
def _or_it_expires() -> Iterator[None]:
    try:
        yield
    except StatemgrError as error:
        log.warning("the checkpoints that were passed to workers were not deleted; they expire: %s", error)


def _for_worker(checkpoint: Checkpoint) -> Checkpoint:
    """The part of a checkpoint that its task continues from, without the parts of the whole job and of the output."""
    return replace(checkpoint, input_offsets={}, input_topic_ids={}, batch=None, attachments=(), outstanding_ttl=())


def _cell(content: bytes, size: int) -> bytes:
    if not content:
        return bytes(size)
    return (len(content).to_bytes(_LENGTH, "big") + content_hash(content) + content).ljust(size, b"\0")


def _read(config: JobConfig, blob: str, cell_size: int, task: int) -> bytes:
    for _ in range(2):
        with attempt_host(config).services.blobs().get(blob, task * cell_size, cell_size) as reader:
            cell = _all(reader, cell_size)
        length = int.from_bytes(cell[:_LENGTH], "big")
        content = cell[_LENGTH + _HASH :][:length]
        if len(cell) == cell_size and (not length or content_hash(content) == cell[_LENGTH:][:_HASH]):
            return content
    raise CorruptBlob("a checkpoint that was passed to a worker is damaged", hint="run the batch again", blob=blob)


def _all(reader: BlobReader, size: int) -> bytes:
    buffer = bytearray(size)
    filled = 0
    while filled < size and (count := reader.readinto(memoryview(buffer)[filled:])):
        filled += count
    return bytes(buffer[:filled])
