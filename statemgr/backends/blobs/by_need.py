"""Opens the state that a chain describes before all of it is here: what something reads is fetched then.

Steps of :func:`open_by_need`:

1. get the chain and the index of its snapshot; a small snapshot, and one of another type of store, is refused
2. fetch the small files, and make each large table file at its full size: it has the foot that is in the index, and a
   hole in place of everything else
3. open the store (:mod:`statemgr.local.rocksdb.partial`) and apply the segments after the snapshot

The first look into a table fetches its tail, which has the filter and the index, and then a block.
:meth:`StateByNeed.fetch_rest` brings everything else, for a task that owns the store: all tails, and then the parts of
the files, those of hot files first. It gives way to reads (:class:`statemgr.transfer.pool.Pace`).

Every byte is verified before it is used: a tail by its hash in the index, a block by RocksDB's checksum, which also
depends on its file and its place, and a part that is stored compressed by its own hash; in the end, each file by its
hash. Touches the staging directory, which must not exist, and which is private to the store until all of it is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from weakref import WeakSet

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.fetch_snapshot import fetch_snapshot
from statemgr.backends.blobs.local_notes import ChainPositions, DamageNote
from statemgr.backends.blobs.tables import replay
from statemgr.errors import (
    ANOTHER_COPY,
    CorruptBlob,
    CorruptFile,
    MissingBlob,
    StateUnreachable,
    UnavailableError,
)
from statemgr.local import fetched_tree
from statemgr.local.rocksdb.partial import Hole, PartialStore
from statemgr.local.rocksdb.table_format import TRAILER
from statemgr.local.sparse_file import SparseFile
from statemgr.model.chain import SegmentChain, own_way, truncated
from statemgr.model.checkpoint import BlobRef, Marker
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import FileIndex, Tail
from statemgr.phases import Phase
from statemgr.ports import Clock, RestoreRequest, StoreIdentity, no_progress
from statemgr.services import Services
from statemgr.transfer.downloads import PIECE
from statemgr.transfer.pool import Batch, Counter, Pace
from statemgr.transfer.transfer import Transfer

#: From this many tables, the most open files are this many times as many. Then RocksDB opens 16 of them with the store,
#: and the others when something looks into them. Otherwise it reads the tails of all, holes or not.
_MANY, _OPEN = 500, 4
#: The least that is fetched of a table.
CHUNK = 16 * 1024
#: The most chunks that are fetched ahead of a scan. Requests for a few take about as long as each other.
_AHEAD, _FEW = 512, 4
#: How often a part is fetched while reads by need write something else to it.
_TRIES = 3
#: Keys of one call that are read at once.
_READS_AT_ONCE = 16


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
    chain = catalogue.chain(identity, request.marker)  # 1
    way = own_way(chain)
    index = catalogue.index(identity, way.snapshot.index)
    large = {file.name: file for file in index.root.files if file.tail is not None}
    size = sum(file.size for file in large.values())
    note = DamageNote(services, identity)
    if config.type != "rocksdb" or not large or size < at_least:
        return None
    if way.snapshot.index in damaged or (owned and note.names(way.snapshot.index)):
        return None

    def found_damage() -> None:
        damaged.add(way.snapshot.index)
        if owned:
            note.write(way.snapshot.index)

    others = replace(index.root, files=tuple(file for file in index.root.files if file.name not in large))
    small = fetch_snapshot(services.transfer(), replace(index, root=others), way.snapshot.index, request)  # 2
    if owned:
        fetched_tree.check_space(request.staging, size)
    tables = PartialTables(services.transfer(), request, large, found_damage, owned=owned)
    identity.announce(Phase.OPEN)
    options = {"max.open.files": _OPEN * len(large), **config.rocksdb} if len(large) >= _MANY else config.rocksdb
    store = PartialStore.open_partial(  # 3
        request.staging, options, tables.supply, lambda: services.executors.pool("by-need", _READS_AT_ONCE)
    )
    tables.is_open = True
    try:
        _, segments = replay(services, identity, store, way.segments, way.snapshot.end, request.progress)
    except BaseException:
        store.close()
        raise
    followed = _Followed(services, catalogue, identity, chain)
    return StateByNeed(services.clock, store, tables, small.bytes_fetched + segments, followed)


@dataclass
class _Followed:
    """The chain that a state has, to which more is published later."""

    services: Services
    catalogue: Catalogue
    identity: StoreIdentity
    chain: SegmentChain

    def note(self) -> None:
        """For a restore that begins at a local copy of the state."""
        ChainPositions(self.services, self.identity).note(self.chain)

    def apply(self, store: PartialStore, marker: Marker) -> int | None:
        """As :meth:`statemgr.ports.PartialState.follow`."""
        before, after = self.chain, self.catalogue.chain(self.identity, marker)
        if before.lineage != after.lineage or not after.start <= before.end <= after.end:
            return None
        segments = truncated(after.segments, before.end)
        fetched = replay(self.services, self.identity, store, segments, before.end, no_progress)[1] if segments else 0
        self.chain = after
        return fetched


class StateByNeed:
    """Implements ``ports.PartialState``."""

    def __init__(
        self, clock: Clock, store: PartialStore, tables: PartialTables, others: int, followed: _Followed
    ) -> None:
        self.store = store
        self._clock = clock
        self._tables = tables
        self._others = others
        self._followed = followed
        self._branches = WeakSet[StateByNeed]()
        #: When the rest was begun to be fetched, and how much was verified then.
        self._began: tuple[float, int] | None = None

    @property
    def fetched(self) -> int:
        return self._others + self._tables.fetched

    @property
    def missing(self) -> int:
        # at least 1, until the last file is verified
        return 0 if self.store.is_whole else max(1, self._tables.size - self._tables.verified)

    @property
    def faults(self) -> int:
        return self._tables.faults

    @property
    def rate(self) -> float:
        if self._began is None:
            return 0.0
        began_s, before = self._began
        return (self._tables.verified - before) / max(self._clock.elapsed() - began_s, 1e-3)

    @property
    def is_damaged(self) -> bool:
        return self._tables.is_damaged

    @property
    def files(self) -> Mapping[str, tuple[int, bytes]]:
        return self._tables.files

    def follow(self, marker: Marker) -> int | None:
        return self._followed.apply(self.store, marker)

    def branch(self, directory: Path) -> StateByNeed:
        self._followed.note()
        store = self.store.branch(directory)
        branch = StateByNeed(self._clock, store, self._tables, self._others, self._followed)
        self._branches.add(branch)
        if self.store.is_whole:
            store.become_whole(briefly=True)
        return branch

    def fetch_rest(self, check: Callable[[], None]) -> None:
        self._began = self._clock.elapsed(), self._tables.verified
        self._tables.fetch_rest(check)
        self.store.become_whole()
        for branch in list(self._branches):
            branch.store.become_whole(briefly=True)


@dataclass(frozen=True)
class _Part:
    """A part of a file: its number, and where it begins."""

    number: int
    offset: int
    ref: BlobRef

    def overlaps(self, start: int, end: int) -> bool:
        return self.offset < end and start < self.offset + self.ref.size


@dataclass
class _Table:
    """A table file on this machine. ``here``: one byte for each chunk of its data, 1 if it was written."""

    file: FileIndex
    tail: Tail
    local: SparseFile
    here: bytearray
    has_tail: bool = False
    #: The tail that somebody fetches now.
    coming_tail: Future[None] | None = None
    #: Held to write to it by need. ``coming``: how much the fill has written of the parts that it is writing.
    #: ``written``: those to which a read may have written after the fill. Nothing is written to a verified part.
    lock: threading.Lock = field(default_factory=threading.Lock)
    coming: dict[int, Counter] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    is_whole: bool = False
    #: How often something in it was missing.
    faults: int = 0
    #: The chunk after those that were fetched last, and how many they were.
    next: int = 0
    run: int = 0

    def __post_init__(self) -> None:
        offsets = accumulate((part.size for part in self.file.parts), initial=0)
        self.parts = [_Part(number, *at) for number, at in enumerate(zip(offsets, self.file.parts, strict=False))]

    @property
    def waiting(self) -> list[_Part]:
        """The parts that are not verified."""
        return [part for part in self.parts if part.number not in self.verified]

    def missing(self, start: int, end: int) -> list[int]:
        """The chunks of a range of bytes that were not written."""
        stop = (min(end, self.tail.offset) + CHUNK - 1) // CHUNK
        return [chunk for chunk in range(start // CHUNK, stop) if not self.here[chunk]]

    def is_written(self, start: int, end: int) -> bool:
        """Whether the fill has written a range of bytes. They may be of a part that it has not verified yet."""
        with self.lock:
            written = {number: counter.value for number, counter in self.coming.items()}
        return all(
            part.number in self.verified
            or min(end, part.offset + part.ref.size) <= part.offset + written.get(part.number, 0)
            for part in self.parts
            if part.overlaps(start, end)
        )

    @contextmanager
    def filled(self, part: _Part) -> Iterator[Counter]:
        """A block that writes a part from its beginning on. Yields what counts its bytes after it has written them."""
        with self.lock:
            self.written.discard(part.number)
            coming = self.coming[part.number] = Counter()
        try:
            yield coming
        finally:
            with self.lock:
                del self.coming[part.number]

    def put(self, start: int, data: memoryview) -> None:
        """Write what a read needs to parts that are not verified."""
        for part in self.parts:
            first, after = max(part.offset, start), min(part.offset + part.ref.size, start + len(data))
            if first >= after or part.number in self.verified:
                continue
            self.local.put(first, data[first - start : after - start])
            coming = self.coming.get(part.number)
            if coming is None or first < part.offset + coming.value + PIECE:  # otherwise the fill writes over it
                self.written.add(part.number)

    def is_verified(self, start: int, end: int) -> bool:
        """Whether all parts of a range of bytes are verified."""
        return all(part.number in self.verified for part in self.parts if part.overlaps(start, end))


class PartialTables:
    """The table files of one snapshot, at their full sizes, with holes. Safe to use from many threads."""

    def __init__(
        self,
        transfer: Transfer,
        request: RestoreRequest,
        files: Mapping[str, FileIndex],
        damaged: Callable[[], None],
        *,
        owned: bool,
    ) -> None:
        self._transfer = transfer
        self._pace = transfer.pace()
        self._note_damage = damaged
        #: Whether a part was found missing or damaged in the blob store.
        self.is_damaged = False
        self._owned = owned
        self._lock = threading.Lock()
        self._tables: dict[str, _Table] = {}
        self.size = sum(file.size for file in files.values())
        self.files = {name: (file.size, file.hash) for name, file in files.items()}
        #: Bytes that were fetched, those that need no look any more, and how often something was missing.
        self.fetched = self.verified = self.faults = 0
        #: Whether the store is open. Before, RocksDB asks for one tail after the other; so each time more are fetched.
        self.is_open = False
        self._at_once = 1
        left = fetched_tree.left_files(request.leftovers)
        for name, file in files.items():
            assert file.tail is not None
            path = request.staging / name
            before, size = left.get(name, (None, 0))
            # an earlier try may have left parts of it: the rest is verified part by part
            there = before is not None and size == file.size and fetched_tree.take_over(before, path, size)
            self._tables[name] = self._made(file, file.tail, SparseFile(path, file.size, exists=there), left=there)

    def _made(self, file: FileIndex, tail: Tail, local: SparseFile, *, left: bool) -> _Table:
        """A table that can be opened. ``left``: an earlier try has left the file."""
        table = _Table(file, tail, local, bytearray(-(-tail.offset // CHUNK)))
        foot = file.size - len(tail.foot)
        local.put(foot, tail.foot)
        if left:
            table.has_tail = self._transfer.hash_of(local.path, tail.offset, file.size - tail.offset) == tail.hash
        if left and not table.has_tail:  # a filter that is damaged would hide keys
            local.put(tail.offset, bytes(foot - tail.offset))
        return table

    # --- the rest ------------------------------------------------------------------------------------------------

    def fetch_rest(self, check: Callable[[], None]) -> None:
        """See :meth:`statemgr.ports.PartialState.fetch_rest`."""
        with self._said_of_damage():
            self._fetch_tails(list(self._tables.values()), check)
            self._fetch_parts(list(self._tables.values()), check, self._pace)
            for table in self._tables.values():
                self._finish(table)  # unless it is done, because something else failed when it was tried

    def _fetch_tails(self, tables: Sequence[_Table], check: Callable[[], None] = lambda: None) -> None:
        """Fetch tails in parallel."""
        with self._transfer.batch(check) as batch:
            for table in tables:
                if not table.has_tail:
                    batch.submit(partial(self._fetch_tail, table))

    def _fetch_parts(
        self, tables: Sequence[_Table], check: Callable[[], None] = lambda: None, pace: Pace | None = None
    ) -> None:
        """Fetch and verify what is missing of these tables, the hottest at each moment first."""
        waiting = {table.file.name: parts for table in tables if (parts := table.waiting)}
        each = [part.ref.size for parts in waiting.values() for part in parts]

        def fetch_next(batch: Batch) -> None:
            with self._lock:
                table = max((self._tables[name] for name in waiting), key=lambda table: table.faults)
                parts = waiting[table.file.name]
                part = parts.pop(0)
                if not parts:
                    del waiting[table.file.name]
            with pace.job() if pace is not None else nullcontext(lambda: None) as give_way:

                def check_and_give_way() -> None:
                    batch.check()
                    give_way()

                self._fetch_part(table, part, check_and_give_way)

        with self._transfer.batch(check) as batch:
            for _ in each:
                batch.submit(partial(fetch_next, batch), max(each), pace)

    def _fetch_part(self, table: _Table, part: _Part, check: Callable[[], None]) -> None:
        for _ in range(_TRIES):
            if not self._transfer.is_there(table.local, part.ref, part.offset):
                with table.filled(part) as coming:
                    self._transfer.fetch_part(table.file, part.number, table.local, part.offset, coming, check)
                self._count(part.ref.size)
            with table.lock:
                if part.number in table.verified:
                    return
                # a read may have written bytes that are not verified over those that were: look once more
                if part.number not in table.written or self._transfer.is_there(table.local, part.ref, part.offset):
                    table.verified.add(part.number)
                    break
        else:
            raise self._damaged(table, part.offset)
        with self._lock:
            self.verified += part.ref.size
        self._finish(table)

    def _finish(self, table: _Table) -> None:
        """Verify a file of which all parts are verified."""
        if table.waiting or table.is_whole:
            return
        alone = len(table.parts) == 1 and table.parts[0].ref.hash == table.file.hash
        if not alone and self._transfer.hash_of(table.local.path, 0, table.file.size) != table.file.hash:
            raise self._damaged(table, 0)
        table.has_tail = table.is_whole = True

    def _count(self, size: int) -> None:
        with self._lock:
            self.fetched += size

    # --- what something reads ------------------------------------------------------------------------------------

    def supply(self, hole: Hole, time: int) -> bool:
        """Fetch what RocksDB could not read. If a call meets the same hole again, what was fetched is damaged, and is
        fetched once more.

        Returns: whether it is worth to repeat the call. Raises: CorruptBlob the third time, MissingBlob (for a task
        that owns the store, CorruptFile in place of both), StateUnreachable, AccessDenied, DiskFull.
        """
        try:
            with self._said_of_damage():
                return self._supply(hole, time)
        except UnavailableError as error:
            raise StateUnreachable(
                f"a part of the store is not here yet, and cannot be fetched: {error.message}", hint=error.hint,
                **error.where,
            ) from error  # fmt: skip

    @contextmanager
    def _said_of_damage(self) -> Iterator[None]:
        """A block that finds out whether the snapshot is damaged."""
        try:
            yield
        except (CorruptBlob, MissingBlob) as error:
            self.is_damaged = True
            self._note_damage()
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
        with self._lock:
            self.faults += 1
        if table is not None:
            table.faults += 1
        if table is None or not hole.size:
            return self._supply_any([table] if table is not None else list(self._tables.values())) or first
        end = hole.offset + hole.size + TRAILER
        if table.is_verified(hole.offset, end):
            return first
        if end > table.tail.offset:
            return self._supply_tail(table) or first
        if time > 2:
            raise self._damaged(table, hole.offset)
        if time == 2:
            for chunk in range(hole.offset // CHUNK, -(-end // CHUNK)):
                table.here[chunk] = 0
        missing = table.missing(hole.offset, end)
        if missing and not (first and table.is_written(hole.offset, end)):
            self._fetch(table, missing[0], self._ahead(table, missing))
        return True

    def _supply_any(self, tables: list[_Table]) -> bool:
        """Fetch more of these tables: the tails first, and then everything."""
        if len(tables) == 1 and self._supply_tail(tables[0]):
            return True
        if not all(table.has_tail for table in tables):
            self._fetch_tails(tables)
            return True
        if all(table.is_whole for table in tables):
            return False
        self._fetch_parts(tables)
        return True

    def _supply_tail(self, table: _Table) -> bool:
        if table.has_tail:
            return False
        if self.is_open:
            with self._pace.read(alike=False):
                self._fetch_tail(table)
            return True
        others = [one for one in self._tables.values() if not one.has_tail and one is not table]
        others.sort(key=lambda one: one.file.size - one.tail.offset)
        self._fetch_tails([table, *others[: self._at_once - 1]])
        self._at_once *= 2
        return True

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
        begin, end = self._bounds(table, start * CHUNK, min(stop * CHUNK, table.tail.offset))
        with self._pace.read(alike=end - begin <= _FEW * CHUNK):
            data = memoryview(self._read(table, begin, end))
        last = len(table.here) if end >= table.tail.offset else end // CHUNK
        with table.lock:
            table.put(begin, data)
            for chunk in range(-(-begin // CHUNK), last):
                table.here[chunk] = 1
        self._count(end - begin)

    def _fetch_tail(self, table: _Table) -> None:
        """Fetch a tail, or wait for it if somebody else does. Raises: the error of whoever fetched it."""
        with self._lock:
            coming, own = table.coming_tail, Future[None]()
            if coming is None:
                table.coming_tail = own
        if coming is not None:
            return coming.result()
        try:
            if not table.has_tail:
                self._read_tail(table)
            own.set_result(None)
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                table.coming_tail = None

    def _read_tail(self, table: _Table) -> None:
        begin, foot = table.tail.offset, table.tail.foot
        for _ in range(2):
            data = memoryview(self._read(table, begin, table.file.size - len(foot)))
            self._count(len(data))
            if content_hash(b"".join((data, foot))) != table.tail.hash:
                continue
            with table.lock:
                if not table.is_verified(begin, table.file.size):
                    table.local.put(begin, data)
            table.has_tail = True
            return
        raise self._damaged(table, begin)

    @staticmethod
    def _bounds(table: _Table, start: int, end: int) -> tuple[int, int]:
        """The range that has to be read for a range: a part that is stored as a frame can only be read whole."""
        framed = [part for part in table.parts if table.file.frame_of(part.number) and part.overlaps(start, end)]
        starts, ends = [part.offset for part in framed], [part.offset + part.ref.size for part in framed]
        return min([start, *starts]), max([end, *ends])

    def _read(self, table: _Table, start: int, end: int) -> bytes | bytearray | memoryview:
        """The bytes of a file from ``start`` to ``end``."""
        pieces: list[bytes | memoryview] = []
        for part in table.parts:
            first, last = max(start - part.offset, 0), min(end - part.offset, part.ref.size)
            if first < last and (frame := table.file.frame_of(part.number)):
                pieces.append(memoryview(self._transfer.get_bytes(part.ref, part.ref.size, frame))[first:last])
            elif first < last:
                pieces.append(self._transfer.get_range(part.ref, first, last - first))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    def _damaged(table: _Table, offset: int) -> CorruptBlob:
        blob = next(part.ref.blob_id for part in table.parts if part.overlaps(offset, offset + 1))
        return CorruptBlob(
            "the blob has other content than was written", blob=blob, file=table.file.name, hint=ANOTHER_COPY
        )
