"""Segments whose body is a table: how a commit makes one, and how a restore brings it into the store.

RocksDB needs about 2 µs for each change that is written to it, but can ingest a finished table as one file. A table
costs a commit a little more than records. So large segments of RocksDB stores are tables. Small ones are records,
because they can be applied quickly.

Each ingested table is one more file in level 0, which every read looks at. They are ingested in groups. If level 0 has
many files before a group, compaction merges some first.

Touches the scratch directory, and the store that segments are applied to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from statemgr.backends.blobs.segment_cache import LocalSegment, SegmentCache
from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptError, DiskFull
from statemgr.local import durable, is_readable, puts_of, write_table
from statemgr.model.chain import ChainSegment
from statemgr.model.checkpoint import BlobRef
from statemgr.model.commit import Change, ChangeSet
from statemgr.model.segment import read_range, write_segment, write_table_segment
from statemgr.os_errors import disk_errors
from statemgr.ports import LocalStore, Progress, StoreIdentity
from statemgr.services import Services
from statemgr.transfer.packs import PackedBlob

#: From this many changes, a segment is a table.
_FEWEST = 2_000
#: Up to this many changes and bytes, it is a table: its keys are sorted in memory.
_MOST, _MOST_BYTES = 500_000, 64 * 1024 * 1024
#: Tables that are ingested at once, and files in level 0 from which compaction merges some first. Together they stay
#: below the limits in statemgr.local.rocksdb.options.
_GROUP, _FILES = 16, 64
_BATCH = 10_000


def put_segment(
    services: Services, identity: StoreIdentity, changes: ChangeSet, first: int, blob: PackedBlob
) -> BlobRef:
    """Append the changes of a commit, the first of which has the number ``first``, to a blob: as a table or as records.

    They are records if there are few changes or very many, if the store is not RocksDB, or if the disk has no room
    for the table's file, because records can be written from memory. Raises: InvalidError, RetryableError.
    """

    def records(section: BinaryIO) -> None:
        write_segment(changes, section, first)

    config = services.config.stores[identity.store]
    if config.type != "rocksdb" or not _FEWEST <= changes.count <= _MOST or changes.size > _MOST_BYTES:
        return blob.section(records)
    path = services.scratch() / f"table-{services.ids.token()}.sst"
    try:
        try:
            deleted = write_table(path, changes, config.rocksdb)
        except DiskFull:
            return blob.section(records)
        with disk_errors(path):
            table = durable.open_file(path)
        with table:
            return blob.section(lambda section: write_table_segment(table, changes.count, section, first, deleted))
    finally:
        path.unlink(missing_ok=True)


class SegmentReplay:
    """Applies segments to a store, in their order.

    Attributes:
        changes: how many were applied. Changes of a table that the store already had do not count, although they are
        applied again.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._waiting: list[tuple[Path, ChainSegment]] = []
        self.changes = 0

    def apply(self, local: LocalSegment, after: int) -> None:
        """Apply the changes of a segment from the number ``after`` on. Records are applied at once. A table may wait
        until :meth:`finish`; its file must stay until then.

        Raises: CorruptBlob, CorruptFile, DiskFull, InvalidError (a table for a store of another type).
        """
        segment = local.segment
        if local.table is not None:
            self._waiting.append((local.table, segment))
            self.changes += segment.end - max(segment.first, after)
            if len(self._waiting) == _GROUP:
                self.finish()
            return
        self.finish()
        for batch in changes_of(local, after):
            self._store.write(batch)
            self.changes += len(batch)

    def finish(self) -> None:
        """Ingest the tables that wait. Raises: as :meth:`apply`."""
        if not self._waiting:
            return
        self._store.compact_if_needed(_FILES)
        waiting, self._waiting = dict(self._waiting), []
        try:
            self._store.ingest(list(waiting))
        except CorruptError as error:
            refused = next((segment for path, segment in waiting.items() if not is_readable(path)), None)
            if refused is None:
                raise  # the store itself is damaged
            raise CorruptBlob(
                f"change segment refused: RocksDB cannot use its table: {error.message}",
                blob=_blob_id(refused),
                hint=ANOTHER_COPY,
            ) from error


def replay(
    services: Services,
    identity: StoreIdentity,
    store: LocalStore,
    segments: Sequence[ChainSegment],
    start: int,
    progress: Progress,
) -> tuple[int, int]:
    """Fetch segments in parallel and apply those changes to a store that it lacks: from the number ``start`` on.

    Returns: how many were applied, and the bytes that were fetched. Raises: MissingBlob, CorruptBlob, CorruptFile,
    UnavailableError, AccessDenied, DiskFull.
    """
    applying, fetched, reached = SegmentReplay(store), 0, start
    segments = [segment for segment in segments if segment.end > start]
    with SegmentCache(services, identity).brought(segments) as brought:
        for local in brought:
            applying.apply(local, reached)
            reached = local.segment.end
            fetched += local.fetched
            progress(f"apply {identity.store}", reached - start, segments[-1].end - start)
        applying.finish()
    return applying.changes, fetched


def changes_of(local: LocalSegment, after: int) -> Iterator[list[Change]]:
    """The changes of a segment from the number ``after`` on, in batches; of a table all of them, in any order.

    Raises: CorruptBlob, CorruptError (RocksDB cannot read a table), DiskFull.
    """
    segment = local.segment
    if local.table is not None:
        changes: Iterator[Change] = chain(((key, None) for key in local.deleted), puts_of(local.table))
        while batch := list(islice(changes, _BATCH)):
            yield batch
        return
    with local.open() as source:
        changes = read_range(source, segment.first, segment.end, after, _blob_id(segment))
        while batch := list(islice(changes, _BATCH)):
            yield batch


def _blob_id(segment: ChainSegment) -> str | None:
    return segment.blob.blob_id if segment.blob else None
