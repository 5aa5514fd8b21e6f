"""Opens the state that a chain describes before all of it is here: what something reads is fetched then.

Steps of :func:`open_by_need`:

1. get the chain and the index of its snapshot; a small snapshot, and one of another type of store, is refused
2. fetch the small files, and make each large table file at its full size, with a hole in place of its content
3. fetch the tails of the tables in parallel, as far as a limit of bytes allows; the others when something reads them
4. open the store (:mod:`statemgr.local.rocksdb.partial`) and apply the segments after the snapshot

:meth:`StateByNeed.fetch_rest` brings everything else, for a task that owns the store.

Every byte is verified before it is used: a tail by its hash in the index, a block by RocksDB's checksum, which also
depends on its file and its place, and a part that is stored compressed by its own hash; in the end, each file by its
hash. Touches the staging directory, which must not exist, and which is private to the store until all of it is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.fetch_snapshot import fetch_snapshot
from statemgr.backends.blobs.tables import replay
from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptFile, MissingBlob
from statemgr.local import fetched_tree
from statemgr.local.rocksdb.partial import Hole, PartialStore
from statemgr.local.rocksdb.table_format import TRAILER
from statemgr.local.sparse_file import SparseFile
from statemgr.model.chain import own_way
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import FileIndex, Tail
from statemgr.phases import Phase
from statemgr.ports import RestoreRequest
from statemgr.services import Services
from statemgr.transfer.plan import Fetch
from statemgr.transfer.transfer import Transfer

#: A table file below this size is fetched whole.
_SMALL = 256 * 1024
#: Bytes of tails that are fetched before the store is opened.
_TAILS = 64 * 1024 * 1024
#: Tails that are fetched together later.
_TAILS_AT_ONCE = 8
#: A reader of more tables lets RocksDB keep few of them open, so that opening the store reads few tails.
_FEW_FILES = 20
#: The least that is fetched of a table.
CHUNK = 16 * 1024
#: The most chunks that are fetched ahead of a scan.
_AHEAD = 512
#: Keys of one call that are read at once.
_READS_AT_ONCE = 16
#: Files of which the rest is fetched together.
_FILES_AT_ONCE = 8


def open_by_need(
    services: Services,
    catalogue: Catalogue,
    request: RestoreRequest,
    at_least: int,
    damaged: set[BlobRef],
    *,
    owned: bool,
) -> StateByNeed | None:
    """See :meth:`statemgr.ports.RestoreManager.open_by_need`.

    Args:
        damaged: indexes of snapshots that are not read by need, because a part of them is missing or damaged. They grow
            when one is found.
    """
    identity = request.identity
    config = services.config.stores[identity.store]
    identity.announce(Phase.GET_INDEX)
    way = own_way(catalogue.chain(identity, request.marker))  # 1
    index = catalogue.index(identity, way.snapshot.index)
    large = {file.name: file for file in index.root.files if file.tail is not None and file.size >= _SMALL}
    size = sum(file.size for file in large.values())
    if config.type != "rocksdb" or not large or size < at_least or way.snapshot.index in damaged:
        return None
    others = replace(index.root, files=tuple(file for file in index.root.files if file.name not in large))
    small = fetch_snapshot(services.transfer(), replace(index, root=others), way.snapshot.index, request)  # 2
    if owned:
        fetched_tree.check_space(request.staging, size)
    tables = PartialTables(services.transfer(), request, large, lambda: damaged.add(way.snapshot.index), owned=owned)
    options = dict(config.rocksdb)
    if not tables.fetch_tails(_TAILS) and not owned:  # 3
        options["max.open.files"] = _FEW_FILES
    identity.announce(Phase.OPEN)
    store = PartialStore.open_partial(  # 4
        request.staging, options, tables.supply, lambda: services.executors.pool("by-need", _READS_AT_ONCE)
    )
    try:
        _, segments = replay(services, identity, store, way.segments, way.snapshot.end, request.progress)
    except BaseException:
        store.close()
        raise
    return StateByNeed(store, tables, small.bytes_fetched + segments)


class StateByNeed:
    """Implements ``ports.PartialState``."""

    def __init__(self, store: PartialStore, tables: PartialTables, others: int) -> None:
        self.store = store
        self._tables = tables
        self._others = others

    @property
    def fetched(self) -> int:
        return self._others + self._tables.fetched

    @property
    def missing(self) -> int:
        # at least 1, until the last file is verified
        return 0 if self.store.is_whole else max(1, self._tables.size - self._tables.fetched)

    def fetch_rest(self, check: Callable[[], None]) -> None:
        self._tables.fetch_rest(check)
        self.store.become_whole()


@dataclass
class _Table:
    """A table file on this machine. ``here``: one byte for each chunk of its data, 1 if it was written."""

    file: FileIndex
    tail: Tail
    local: SparseFile
    here: bytearray
    has_tail: bool = False
    is_whole: bool = False
    #: Held to write to it by need. ``writes``: how often that was done. None is done to a whole file.
    lock: threading.Lock = field(default_factory=threading.Lock)
    writes: int = 0
    #: How often something in it was missing.
    faults: int = 0
    #: The chunk after those that were fetched last, and how many they were.
    next: int = 0
    run: int = 0

    def missing(self, start: int, end: int) -> list[int]:
        """The chunks of a range of bytes that were not written."""
        stop = (min(end, self.tail.offset) + CHUNK - 1) // CHUNK
        return [chunk for chunk in range(start // CHUNK, stop) if not self.here[chunk]]


class PartialTables:
    """The table files of one snapshot, at their full sizes, with holes. Safe to use from many threads."""

    def __init__(
        self,
        transfer: Transfer,
        request: RestoreRequest,
        files: Mapping[str, FileIndex],
        is_damaged: Callable[[], None],
        *,
        owned: bool,
    ) -> None:
        self._transfer = transfer
        self._is_damaged = is_damaged
        self._owned = owned
        self._lock = threading.Lock()
        self._tables: dict[str, _Table] = {}
        self.size = sum(file.size for file in files.values())
        #: Bytes that were fetched.
        self.fetched = 0
        left = fetched_tree.left_files(request.leftovers)
        for name, file in files.items():
            assert file.tail is not None
            path = request.staging / name
            before, size = left.get(name, (None, 0))
            # an earlier try may have left parts of it: the rest is verified part by part
            there = before is not None and size == file.size and fetched_tree.take_over(before, path, size)
            local = SparseFile(path, file.size, exists=there)
            self._tables[name] = _Table(file, file.tail, local, bytearray(-(-file.tail.offset // CHUNK)))

    def fetch_tails(self, limit: int) -> bool:
        """Fetch the tails in parallel, the smallest first, up to a limit of bytes. Returns: whether that were all."""
        chosen: list[_Table] = []
        for table in sorted((one for one in self._tables.values() if not one.has_tail), key=_tail_size):
            limit -= _tail_size(table)
            if limit < 0:
                break
            chosen.append(table)

        def fetch(name: str) -> None:
            self._fetch_tail(self._tables[name])

        for error in self._transfer.for_each([table.file.name for table in chosen], fetch).values():
            raise error
        return all(table.has_tail for table in self._tables.values())

    def fetch_rest(self, check: Callable[[], None]) -> None:
        """See :meth:`statemgr.ports.PartialState.fetch_rest`."""
        while left := [table for table in self._tables.values() if not table.is_whole]:
            left.sort(key=lambda table: table.faults, reverse=True)
            now = left[:_FILES_AT_ONCE]
            fetches = [Fetch(table.file, table.local.path, continued=True) for table in now]
            writes = [table.writes for table in now]
            try:
                kept = self._transfer.fetch_files(fetches, lambda *_: check())
            except (CorruptBlob, MissingBlob):
                self._is_damaged()
                raise
            self._count(sum(table.file.size for table in now) - kept)
            for table, before in zip(now, writes, strict=True):
                with table.lock:
                    table.here[:] = b"\1" * len(table.here)
                    table.has_tail = True
                    # a read may have written bytes that are not verified over those that were: look once more
                    table.is_whole = table.writes == before
            check()

    def _count(self, size: int) -> None:
        with self._lock:
            self.fetched += size

    def supply(self, hole: Hole, time: int) -> bool:
        """Fetch what RocksDB could not read. If a call meets the same hole again, what was fetched is damaged, and is
        fetched once more.

        Returns: whether it is worth to repeat the call. Raises: CorruptBlob the third time, MissingBlob (for a task
        that owns the store, CorruptFile in place of both), UnavailableError, AccessDenied, DiskFull.
        """
        try:
            return self._supply(hole, time)
        except (CorruptBlob, MissingBlob) as error:
            self._is_damaged()
            if not self._owned:
                raise
            raise CorruptFile(
                f"a part of the store's files cannot be fetched: {error}", blob=str(error.where.get("blob"))
            ) from error

    def _supply(self, hole: Hole, time: int) -> bool:
        table = self._tables.get(hole.table)
        first = time == 1  # then another thread may have supplied it meanwhile
        if hole.table and (table is None or table.is_whole):
            return first  # not a hole
        if table is not None:
            table.faults += 1
        if table is None or not hole.size:
            return self._supply_any([table] if table is not None else list(self._tables.values())) or first
        end = hole.offset + hole.size + TRAILER
        if end > table.tail.offset:
            return self._fetch_tail(table) or first
        if time > 2:
            raise self._damaged(table, hole.offset)
        if time == 2:
            for chunk in range(hole.offset // CHUNK, -(-end // CHUNK)):
                table.here[chunk] = 0
        if missing := table.missing(hole.offset, end):
            self._fetch(table, missing[0], self._ahead(table, missing))
        return True

    def _supply_any(self, tables: list[_Table]) -> bool:
        """Fetch more of these tables: the tails first, also of a few others, and then everything."""
        if not all(table.has_tail for table in tables):
            limit = sum(_tail_size(table) for table in tables)
            for table in tables:
                self._fetch_tail(table)
            self.fetch_tails(limit * _TAILS_AT_ONCE)
            return True
        return any([self._complete(table) for table in tables])  # noqa: C419 (complete them all)

    def _ahead(self, table: _Table, missing: list[int]) -> int:
        """The chunk before which to stop: a scan gets twice as much with each request."""
        start, stop = missing[0], missing[-1] + 1
        table.run = min(2 * table.run, _AHEAD) if start == table.next else 1
        while stop < min(start + table.run, len(table.here)) and not table.here[stop]:
            stop += 1
        table.next = stop
        return stop

    def _fetch(self, table: _Table, start: int, stop: int) -> None:
        """Fetch chunks."""
        begin, end = self._bounds(table.file, start * CHUNK, min(stop * CHUNK, table.tail.offset))
        data = self._read(table.file, begin, end)
        last = len(table.here) if end >= table.tail.offset else end // CHUNK
        with table.lock:
            if table.is_whole:
                return
            table.writes += 1
            table.local.write(begin, data)
            for chunk in range(-(-begin // CHUNK), last):
                table.here[chunk] = 1
        self._count(end - begin)

    def _fetch_tail(self, table: _Table) -> bool:
        if table.has_tail:
            return False
        begin = table.tail.offset
        for _ in range(2):
            data = self._read(table.file, begin, table.file.size)
            if content_hash(data) == table.tail.hash:
                table.local.write(begin, data)
                table.has_tail = True
                self._count(len(data))
                return True
        raise self._damaged(table, begin)

    def _complete(self, table: _Table) -> bool:
        """Fetch all blocks of data, and verify the file. Returns: whether there was anything to do."""
        if table.is_whole:
            return False
        while missing := table.missing(0, table.tail.offset):
            stop = missing[0]
            while stop < len(table.here) and not table.here[stop] and stop - missing[0] < _AHEAD:
                stop += 1
            self._fetch(table, missing[0], stop)
        with table.lock:
            if self._transfer.hash_of(table.local.path, 0, table.file.size) != table.file.hash:
                raise self._damaged(table, 0)
            table.is_whole = True
        return True

    @staticmethod
    def _bounds(file: FileIndex, start: int, end: int) -> tuple[int, int]:
        """The range that has to be read for a range: a part that is stored as a frame can only be read whole."""
        at = 0
        for number, part in enumerate(file.parts):
            if file.frame_of(number) and at < end and start < at + part.size:
                start, end = min(start, at), max(end, at + part.size)
            at += part.size
        return start, end

    def _read(self, file: FileIndex, start: int, end: int) -> bytes | bytearray | memoryview:
        """The bytes of a file from ``start`` to ``end``."""
        pieces: list[bytes | memoryview] = []
        at = 0
        for number, part in enumerate(file.parts):
            first, last = max(start - at, 0), min(end - at, part.size)
            if first < last and (frame := file.frame_of(number)):
                pieces.append(memoryview(self._transfer.get_bytes(part, part.size, frame))[first:last])
            elif first < last:
                pieces.append(self._transfer.get_range(part, first, last - first))
            at += part.size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    def _damaged(table: _Table, offset: int) -> CorruptBlob:
        at = 0
        for part in table.file.parts:
            at += part.size
            if offset < at:
                return CorruptBlob(
                    "the blob has other content than was written", blob=part.blob_id, file=table.file.name,
                    hint=ANOTHER_COPY,
                )  # fmt: skip
        raise AssertionError("a file has parts for all of its bytes")


def _tail_size(table: _Table) -> int:
    return table.file.size - table.tail.offset
