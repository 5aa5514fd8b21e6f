"""Hashes what an adoption takes over, as ``statemgr migrate verify`` prints it. Writes only temporary files.

Before an adoption it reads the old changelogs, and afterwards those of the new job, up to their markers: then the hash
is that of what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from statemgr.backends.changelog.digest import hash_rows, read_rows
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.ids import task_name
from statemgr.local.durable import empty_directory, remove
from statemgr.model.checkpoint import FIRST, ChangelogMarker
from statemgr.model.commit import Change
from statemgr.model.content import WAYS, Content
from statemgr.operations.adopt.adopt import Adopted
from statemgr.operations.adopt.copying import changes
from statemgr.operations.adopt.found import OldJob
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import Decoder
from statemgr.ports import Progress
from statemgr.services import Services


def contents(
    services: Services, old: OldTopics, adopted: Adopted, progress: Progress
) -> Mapping[str, Sequence[Content]] | None:
    """Store → the content of each task, of stores that have a changelog; None if the new job has gone on since.

    Raises: InvalidError, CorruptRecord, UnavailableError, DiskFull.
    """
    if any(checkpoint.output_sequence != FIRST for checkpoint in adopted.checkpoints.values()):
        return None
    scratch = services.scratch_file("adopt")
    found: dict[str, list[Content]] = {}
    try:
        for store, rows in _of_checkpoints(old, adopted) if adopted.checkpoints else _of_old(old, adopted.old):
            empty_directory(scratch)
            read_rows(rows, scratch / "rows")
            parts = (hash_rows([scratch / "rows" / str(part)]) for part in range(WAYS))
            found.setdefault(store, []).append(sum(parts, Content()))
            progress(f"hash {store}", len(found[store]), services.config.tasks)
    finally:
        remove(scratch)
    return found


_Changes = Iterator[tuple[str, Iterator[Sequence[Change]]]]


def _of_checkpoints(old: OldTopics, adopted: Adopted) -> _Changes:
    for number in range(len(adopted.checkpoints)):
        checkpoint = adopted.checkpoints[task_name(number)]
        for store in checkpoint.stores:
            marker = checkpoint.marker(KAFKA_CHANGELOG, store)
            if isinstance(marker, ChangelogMarker):
                start = old.bounds(marker.topic, marker.partition).start
                yield store, _read(old, (marker.topic, marker.partition, start, marker.offset), None)


def _of_old(old: OldTopics, found: OldJob | None) -> _Changes:
    assert found is not None
    for store in found.stores.values():
        for task, partition in enumerate(store.partitions):
            start = old.first(store.topic, partition.number, partition.bounds.start)
            place = store.topic.name, partition.number, start, partition.end
            yield store.name, _read(old, place, found.decoder(store, task))


def _read(old: OldTopics, place: tuple[str, int, int, int], decoder: Decoder | None) -> Iterator[Sequence[Change]]:
    for batch in old.records(*place):
        yield list(changes(batch, decoder))
