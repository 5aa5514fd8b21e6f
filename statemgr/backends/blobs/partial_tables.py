"""The table files of a state that is read by need: fetches what a read misses, and the rest.

The first look into a table fetches its tail, which has the filter and the index, and then a block. The rest comes for a
task that owns the store (:meth:`PartialTables.fetch_rest`): all tails, and then the parts of the files, those of hot
files first. It gives way to reads (:class:`statemgr.transfer.pool.Pace`).

Every byte is verified before it is used: a tail by its hash in the index, a block by RocksDB's checksum, which also
depends on its file and its place, and a part that is stored compressed by its own hash; in the end, each file by its
hash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from heapq import heapify, heappop, heappush

from statemgr.backends.blobs.partial_table import CHUNK, Part, Table
from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptFile, MissingBlob, StateUnreachable, UnavailableError
from statemgr.local import fetched_tree
from statemgr.local.rocksdb.partial import Hole
from statemgr.local.rocksdb.table_format import TRAILER
from statemgr.local.sparse_file import SparseFile
from statemgr.model.hashing import content_hash
from statemgr.model.snapshot import FileIndex, Tail
from statemgr.os_errors import disk_errors
from statemgr.ports import RestoreRequest
from statemgr.transfer.pool import Batch, Pace
from statemgr.transfer.transfer import Transfer

#: Requests for a few chunks take about as long as each other.
_FEW = 4
#: The hint for those that read a state that a job may delete.
_READERS = (
    "if the job no longer retains the checkpoint, open the store again. To keep it open for long, fetch it as a whole "
    "first (the argument `whole` of `JobReader.open_store`), or keep the checkpoint: `statemgr checkpoints tag ID "
    "--keep`"
)
#: How often a part is fetched while reads by need write something else to it.
_TRIES = 3


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
        self._tables: dict[str, Table] = {}
        self.size = sum(file.size for file in files.values())
        self.files = {name: (file.size, file.hash) for name, file in files.items()}
        #: Bytes that were fetched, those that need no look any more, and how often something was missing.
        self.fetched = self.verified = self.faults = 0
        #: The table of each time.
        self._faulted: list[str] = []
        #: Whether the store is open. Before, RocksDB asks for one tail after the other; so each time more are fetched.
        self.is_open = False
        self._at_once = 1
        left = fetched_tree.left_files(request.leftovers)
        self._directory = request.staging
        for name, file in files.items():
            assert file.tail is not None
            path = request.staging / name
            before, size = left.get(name, (None, 0))
            # an earlier try may have left parts of it: the rest is verified part by part
            there = before is not None and size == file.size and fetched_tree.take_over(before, path, size)
            self._tables[name] = self._made(file, file.tail, SparseFile(path, file.size, exists=there), left=there)

    def _made(self, file: FileIndex, tail: Tail, local: SparseFile, *, left: bool) -> Table:
        """A table that can be opened. ``left``: an earlier try has left the file."""
        table = Table(file, tail, local, bytearray(-(-tail.offset // CHUNK)))
        foot = file.size - len(tail.foot)
        local.put(foot, tail.foot)
        if left:
            table.has_tail = self._transfer.is_there(local.path, tail.offset, file.size - tail.offset, tail.hash)
        if left and not table.has_tail:  # a filter that is damaged would hide keys
            local.put(tail.offset, bytes(foot - tail.offset))
        return table

    # --- the rest ------------------------------------------------------------------------------------------------

    def check_space(self) -> None:
        """See :meth:`statemgr.ports.PartialState.check_space`."""
        here = 0
        with disk_errors(self._directory):
            for table in self._tables.values():
                here += min(table.local.path.lstat().st_blocks * 512, table.file.size)
        fetched_tree.check_space(self._directory, self.size - here)

    def fetch_rest(self, check: Callable[[], None]) -> None:
        """See :meth:`statemgr.ports.PartialState.fetch_rest`."""
        with self._said_of_damage():
            self._fetch_tails(list(self._tables.values()), check)
            self._fetch_parts(list(self._tables.values()), check, self._pace)
            for table in self._tables.values():
                self._finish(table)  # unless it is done, because something else failed when it was tried

    def _fetch_tails(self, tables: Sequence[Table], check: Callable[[], None] = lambda: None) -> None:
        """Fetch tails in parallel."""
        with self._transfer.batch(check) as batch:
            for table in tables:
                if not table.has_tail:
                    batch.submit(partial(self._fetch_tail, table))

    def _fetch_parts(
        self, tables: Sequence[Table], check: Callable[[], None] = lambda: None, pace: Pace | None = None
    ) -> None:
        """Fetch and verify what is missing of these tables, the hottest at each moment first."""
        waiting = {table.file.name: parts for table in tables if (parts := table.waiting)}
        each = [part.ref.size for parts in waiting.values() for part in parts]
        hottest = [(-self._tables[name].faults, name) for name in waiting]
        heapify(hottest)
        known = len(self._faulted)

        def fetch_next(batch: Batch) -> None:
            nonlocal known
            with self._lock:
                for name in self._faulted[known:]:
                    heappush(hottest, (-self._tables[name].faults, name))
                known = len(self._faulted)
                while hottest[0][1] not in waiting:
                    heappop(hottest)
                table = self._tables[hottest[0][1]]
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

    def _fetch_part(self, table: Table, part: Part, check: Callable[[], None]) -> None:
        for _ in range(_TRIES):
            if not self._is_there(table, part):
                with table.filled(part) as coming:
                    self._transfer.fetch_part(table.file, part.number, table.local, part.offset, coming, check)
                self._count(part.ref.size)
            with table.lock:
                if part.number in table.verified:
                    return
                # a read may have written bytes that are not verified over those that were: look once more
                if part.number not in table.written or self._is_there(table, part):
                    table.verified.add(part.number)
                    break
        else:
            raise self._damaged(table, part.offset)
        with self._lock:
            self.verified += part.ref.size
        self._finish(table)

    def _is_there(self, table: Table, part: Part) -> bool:
        return self._transfer.is_there(table.local.path, part.offset, part.ref.size, part.ref.hash)

    def _finish(self, table: Table) -> None:
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
            if not self._owned and isinstance(error, MissingBlob):
                raise MissingBlob(error.message, hint=_READERS, **error.where) from error
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
                self._faulted.append(hole.table)
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
            self._fetch(table, missing[0], table.run_to(missing))
        return True

    def _supply_any(self, tables: list[Table]) -> bool:
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

    def _supply_tail(self, table: Table) -> bool:
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

    def _fetch(self, table: Table, start: int, stop: int) -> None:
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

    def _fetch_tail(self, table: Table) -> None:
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

    def _read_tail(self, table: Table) -> None:
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
    def _bounds(table: Table, start: int, end: int) -> tuple[int, int]:
        """The range that has to be read for a range: a part that is stored as a frame can only be read whole."""
        framed = [part for part in table.parts if table.file.frame_of(part.number) and part.overlaps(start, end)]
        starts, ends = [part.offset for part in framed], [part.offset + part.ref.size for part in framed]
        return min([start, *starts]), max([end, *ends])

    def _read(self, table: Table, start: int, end: int) -> bytes | bytearray | memoryview:
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
    def _damaged(table: Table, offset: int) -> CorruptBlob:
        blob = next(part.ref.blob_id for part in table.parts if part.overlaps(offset, offset + 1))
        return CorruptBlob(
            "the blob has other content than was written", blob=blob, file=table.file.name, hint=ANOTHER_COPY
        )
