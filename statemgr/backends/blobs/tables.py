"""Segments whose body is a table: how a commit makes one, and how a restore brings it into the store.

RocksDB needs about 2 µs for each change that is written to it, but takes in a finished table as one file. A table
costs a commit a little more than records. So large segments of RocksDB stores are tables, and small ones, which are
quickly applied, are records.

Each ingested table is one more file in level 0, which every read looks at. They are ingested in groups, and before each
group compaction catches up if there are many.

Touches the scratch directory, and the store that segments are applied to.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from statemgr.backends.blobs.segment_cache import LocalSegment
from statemgr.backends.services import Services
from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptError, DiskFull
from statemgr.local import durable, is_readable, write_table
from statemgr.local.transfer_files import disk_errors
from statemgr.model.chain import ChainSegment
from statemgr.model.commit import ChangeSet
from statemgr.model.segment import is_table, read_range, read_table
from statemgr.ports import LocalStore, StoreIdentity

#: Changes from which on a segment is a table.
_FEWEST = 2_000
#: Changes, and bytes of them, up to which it is one: its keys are sorted in memory.
_MOST, _MOST_BYTES = 500_000, 64 * 1024 * 1024
#: Tables that are ingested at once, and files in level 0 from which on compaction comes first. Together they stay below
#: the limits in statemgr.local.rocksdb.options.
_GROUP, _FILES = 64, 16
_BATCH = 10_000


@contextmanager
def table_of(services: Services, identity: StoreIdentity, changes: ChangeSet) -> Iterator[BinaryIO | None]:
    """The changes of a commit as a table file; None where the segment is to be records.

    It is records for few changes or very many, for a store that is not RocksDB, and when the disk has no room for the
    file: a commit that fits into memory needs none. Raises: InvalidError, RetryableError.
    """
    config = services.config.stores[identity.store]
    if config.type != "rocksdb" or not _FEWEST <= changes.count <= _MOST or changes.size > _MOST_BYTES:
        yield None
        return
    path = services.scratch() / f"table-{services.ids.token()}.sst"
    try:
        try:
            write_table(path, changes, config.rocksdb)
        except DiskFull:
            yield None
            return
        with disk_errors(path):
            file = durable.open_file(path)
        with file:
            yield file
    finally:
        path.unlink(missing_ok=True)


class SegmentReplay:
    """Applies segments to a store, in their order.

    Attributes:
        changes: how many were applied. A table counts from the sequence number on that was asked for, although all of
            it is applied.
        refused: the segments that a CorruptBlob was raised for, although their blobs may have their checksums.
    """

    def __init__(self, services: Services, store: LocalStore) -> None:
        self._directory = services.scratch() / f"tables-{services.ids.token()}"
        self._store = store
        self._waiting: list[tuple[ChainSegment, Path]] = []
        self.changes = 0
        self.refused: list[ChainSegment] = []

    def apply(self, local: LocalSegment, after: int) -> None:
        """Apply the changes of a segment from the number ``after`` on: records at once, a table at the latest at
        :meth:`finish`.

        Raises: CorruptBlob, CorruptFile, DiskFull, InvalidError (a table for a store of another type).
        """
        segment = local.segment
        blob_id = segment.blob.blob_id if segment.blob else None
        try:
            with local.open() as source:
                if is_table(source):
                    self._extract(source, segment, blob_id)
                    self.changes += segment.end - max(segment.first, after)
                else:
                    self.finish()
                    changes = read_range(source, segment.first, segment.end, after, blob_id)
                    while batch := list(islice(changes, _BATCH)):
                        self._store.write(batch)
                        self.changes += len(batch)
        except CorruptBlob:
            self.refused = self.refused or [segment]
            raise
        if len(self._waiting) == _GROUP:
            self.finish()

    def finish(self) -> None:
        """Ingest the tables that wait. Raises: as :meth:`apply`."""
        if not self._waiting:
            return
        self._store.compact_if_needed(_FILES)
        waiting, self._waiting = self._waiting, []
        try:
            self._store.ingest([path for _, path in waiting])
        except CorruptError as error:
            self.refused = [segment for segment, path in waiting if not is_readable(path)]
            if not self.refused:
                raise  # the store itself is damaged
            blob = self.refused[0].blob
            raise CorruptBlob(
                f"change segment refused: RocksDB cannot use its table: {error.message}",
                blob=blob.blob_id if blob else None,
                hint=ANOTHER_COPY,
            ) from error

    def close(self) -> None:
        """Remove the tables that were not ingested."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _extract(self, source: BinaryIO, segment: ChainSegment, blob_id: str | None) -> None:
        """The table as a file of its own, since ingesting takes it away and may write to it."""
        path = self._directory / f"{segment.end}.sst"
        with disk_errors(path):
            self._directory.mkdir(0o700, exist_ok=True)
            with durable.create(path) as sink:
                read_table(source, sink, segment.first, segment.end, blob_id)
        self._waiting.append((segment, path))
