"""Keeps the changes of a store since its last acknowledged commit, and changes in a file for a single use
(:class:`ScratchChanges`). Touches only its own directory and the paths that it is given.

The buffer keeps the newest change of each key in memory up to a budget, and beyond it in local change segments. A
commit freezes the changes so far. Only the acknowledgement of the commit drops them, so the changes of a failed commit
are in the next one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from statemgr.errors import CorruptBlob, CorruptFile
from statemgr.local import durable
from statemgr.model.commit import Change, StoreSession, size_of
from statemgr.model.segment import read_segment, verify_segment, write_segment
from statemgr.os_errors import disk_errors, translated

#: Memory of an entry in addition to its bytes, roughly.
_ENTRY_OVERHEAD = 160
#: Bytes of a value from which on its key is remembered when it moves to a file.
_LARGE = 16 * 1024


class _Generation:
    """Changes with one entry per key. A generation grows, then it is sealed, and later it may move to a file.

    Args:
        first: the sequence number of its first change.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.entries: dict[bytes, bytes | None] | None = {}
        self._path: Path | None = None
        self._size = 0
        #: Upper bound of the size: changes that replace others also count until the next exact count.
        self._at_most = 0
        self.count = 0
        #: Of a generation in a file: the keys with large values, and those whose value a later generation replaces,
        #: with the first number of that generation.
        self._large: set[bytes] = set()
        self._replaced: dict[bytes, int] = {}

    @property
    def end(self) -> int:
        """The sequence number after its last change. Sealing fixes it."""
        return self.first + self.count

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        entries = self.entries  # another thread may spill the entries meanwhile
        if self._at_most > self._size and entries is not None:
            self._size = self._at_most = size_of(entries)
        return self._size

    @property
    def memory(self) -> int:
        """Bytes of memory, counted entry by entry."""
        return 0 if self.entries is None else self.size + self.count * _ENTRY_OVERHEAD

    @property
    def memory_at_most(self) -> int:
        """An upper bound of :attr:`memory` that does not count entries."""
        return 0 if self.entries is None else self._at_most + self.count * _ENTRY_OVERHEAD

    def extend(self, changes: Mapping[bytes, bytes | None]) -> int:
        """Add changes. Returns: their bytes."""
        assert self.entries is not None
        self.entries.update(changes)
        self.count = len(self.entries)
        size = size_of(changes)
        self._at_most += size
        return size

    def spill(self, path: Path) -> None:
        """Move the entries to a file. Raises: DiskFull; then they stay in memory."""
        assert self.entries is not None
        with translated("cannot keep the changes since the last commit", path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as file:
                    write_segment(self.entries.items(), file)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        size = self.size
        self._large = {key for key, value in self.entries.items() if value is not None and len(value) > _LARGE}
        self._path, self.entries = path, None
        self._size = self._at_most = size

    def replaced_by(self, later: _Generation) -> None:
        """Note which large values of this generation, which is in a file, a later one in memory replaces."""
        if self._large and later.entries is not None:
            replaced = self._large & later.entries.keys()
            self._large -= replaced
            self._replaced.update(dict.fromkeys(replaced, later.first))

    def without(self, newer: Mapping[bytes, object], end: int) -> Iterator[Change]:
        """The changes, without those that ``newer`` has, and without large values replaced before ``end``."""
        if not newer and not self._replaced:
            return iter(self)
        return (change for change in self if change[0] not in newer and self._replaced.get(change[0], end) >= end)

    def drop(self) -> None:
        self.entries = None
        if self._path is not None:
            with suppress(OSError):  # close removes the directory
                self._path.unlink()

    def __iter__(self) -> Iterator[Change]:
        entries = self.entries
        if entries is not None:
            yield from entries.items()
            return
        assert self._path is not None
        with (
            translated("cannot read the changes since the last commit", self._path),
            durable.open_file(self._path) as file,
        ):
            try:
                yield from read_segment(file)
            except CorruptBlob as error:
                raise CorruptFile(error.message, path=self._path) from error


class FrozenChanges:
    """Implements ``NumberedChanges``: all changes that were not acknowledged at one moment, oldest first. Keys may
    repeat.

    Attributes:
        session: what the sequence numbers belong to.
        freeze: which of the session's freezes this is.
        first, end: the sequence numbers that it has, without ``end``.
    """

    def __init__(self, session: StoreSession, freeze: int, end: int, generations: tuple[_Generation, ...]) -> None:
        self.session = session
        self.freeze = freeze
        self.first = generations[0].first if generations else end
        self.end = end
        self._generations = generations

    def since(self, number: int) -> FrozenChanges:
        """The changes from ``number`` on. The buffer must have been frozen or sealed at this number."""
        later = tuple(generation for generation in self._generations if generation.first >= number)
        return FrozenChanges(self.session, self.freeze, self.end, later)

    @property
    def count(self) -> int:
        return sum(generation.count for generation in self._generations)

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return sum(generation.size for generation in self._generations)

    def __iter__(self) -> Iterator[Change]:
        for generation in self._generations:
            yield from generation

    def net(self) -> NetChanges:
        """The same changes without those that later ones replace, for a backend that does not number changes."""
        return NetChanges(self._generations, self.end)


class NetChanges:
    """Changes without those that later ones of the same key replace. It can be iterated any number of times.

    A replaced value is left out if the later change is in memory, or if the value is large. A small one in a file may
    come before the later change of its key.
    """

    def __init__(self, generations: tuple[_Generation, ...], end: int) -> None:
        self._generations = generations
        self._end = end

    @property
    def count(self) -> int:
        return sum(1 for _ in self)

    @property
    def size(self) -> int:
        """Bytes of keys and values, with those that are left out."""
        return sum(generation.size for generation in self._generations)

    def __iter__(self) -> Iterator[Change]:
        if len(self._generations) == 1:
            yield from self._generations[0]
            return
        # the oldest ones are in files; another thread may move further ones there meanwhile, oldest first
        in_memory = [generation.entries for generation in reversed(self._generations)]
        newest = dict[bytes, bytes | None]()
        for entries in reversed(in_memory):
            newest.update(entries or {})
        for generation in self._generations[: in_memory.count(None)]:
            yield from generation.without(newest, self._end)
        yield from newest.items()


class ChangeBuffer:
    """Collects changes. One thread may write while another one commits.

    Attributes:
        session: what the sequence numbers of its changes belong to.

    Args:
        spill_directory: created when it is first needed, removed by :meth:`close`.
        memory_budget_bytes: bytes of changes that may stay in memory.
    """

    def __init__(self, spill_directory: Path, memory_budget_bytes: int) -> None:
        self._directory = spill_directory
        self._budget = memory_budget_bytes
        self._lock = threading.Lock()
        self._sealed: list[_Generation] = []
        self._growing = _Generation(0)
        self.session = StoreSession()
        self._files = 0
        #: The sequence number up to which it was frozen, and an upper bound of the bytes since.
        self._frozen_to = 0
        self._unfrozen = 0

    def put(self, key: bytes, value: bytes | None) -> None:
        """Add a put, or a delete if the value is None. Raises: DiskFull; then the change was added all the same."""
        self.extend(((key, value),))

    def extend(self, changes: Mapping[bytes, bytes | None] | Iterable[Change]) -> None:
        """Add changes in order. Raises: DiskFull; then they were added all the same, and memory exceeds the budget."""
        newest = dict(changes)
        with self._lock:
            self._unfrozen += self._growing.extend(newest)
            if self._is_too_much():
                self._spill()

    def freeze(self) -> FrozenChanges:
        """All changes so far that are not acknowledged, without later ones. Copies nothing."""
        with self._lock:
            self.session.freezes += 1
            self._unfrozen = 0
            self._frozen_to = self._seal()
            return FrozenChanges(self.session, self.session.freezes, self._frozen_to, tuple(self._sealed))

    def has_unfrozen(self, size: int) -> bool:
        """Whether at least half of ``size`` bytes are not frozen yet. Counts them only when ``size`` bytes were added.

        The exact count is therefore rare. It is needed because a change that replaces another one adds no bytes.
        """
        with self._lock:
            if self._unfrozen < size:
                return False
            self._unfrozen = sum(g.size for g in (*self._sealed, self._growing) if g.first >= self._frozen_to)
            return self._unfrozen >= size // 2

    def seal(self) -> int:
        """Close the current generation, so that a commit can begin or end here. Returns: the next sequence number."""
        with self._lock:
            return self._seal()

    def nothing_until(self, end: int) -> FrozenChanges:
        """An empty range that ends at the last sealed number: for a snapshot that contains every change below it."""
        return FrozenChanges(self.session, self.session.freezes, end, ())

    def acknowledge(self, frozen: FrozenChanges) -> None:
        """Drop exactly the changes in ``frozen``, because they are published. Idempotent."""
        with self._lock:
            done = set(map(id, frozen._generations))
            for generation in self._sealed:
                if id(generation) in done:
                    generation.drop()
            self._sealed = [generation for generation in self._sealed if id(generation) not in done]

    def close(self) -> None:
        """Drop all changes and remove the spilled files."""
        with self._lock, translated("cannot remove spilled changes", self._directory):
            self._sealed, self._growing = [], _Generation(self._growing.end)
            durable.remove(self._directory)

    def _is_too_much(self) -> bool:
        if self._growing.memory_at_most + sum(generation.memory for generation in self._sealed) <= self._budget:
            return False
        # count exactly only now, and move changes to a file only from half the budget on. Otherwise a set of hot keys
        # that takes most of the budget would be counted at every call
        return sum(generation.memory for generation in (*self._sealed, self._growing)) > self._budget // 2

    def _seal(self) -> int:
        if self._growing.count:
            self._sealed.append(self._growing)
            self._growing = _Generation(self._growing.end)
        return self._growing.first

    def _spill(self) -> None:
        self._seal()
        for number, generation in enumerate(self._sealed):
            if generation.memory:
                for older in self._sealed[:number]:
                    older.replaced_by(generation)
                self._files += 1
                generation.spill(self._directory / f"changes-{self._files:06d}.segment")


class ScratchChanges:
    """A change segment in a file without a name, which vanishes when it is closed and after a crash.

    It can be iterated any number of times, one iteration at a time.
    """

    def __init__(self, path: Path) -> None:
        """Take over the file at ``path``, and remove its name."""
        with disk_errors(path):
            self._fd = durable.open_regular(path, os.O_RDONLY)
            os.unlink(path)
        self._closed = weakref.finalize(self, os.close, self._fd)

    @classmethod
    def write(cls, path: Path, changes: Iterable[Change]) -> ScratchChanges:
        """Write changes to a new file at ``path``. Raises: DiskFull."""
        with disk_errors(path), durable.create(path) as sink:
            write_segment(changes, sink)
        return cls(path)

    @classmethod
    def verified(cls, path: Path) -> ScratchChanges:
        """Take over a segment that was fetched to ``path``. Raises: CorruptBlob if it is not whole."""
        taken = cls(path)
        with taken._open() as source:
            verify_segment(source)
        return taken

    def __iter__(self) -> Iterator[Change]:
        with self._open() as source:
            yield from read_segment(source)

    def _open(self) -> BinaryIO:
        os.lseek(self._fd, 0, os.SEEK_SET)
        return os.fdopen(os.dup(self._fd), "rb", buffering=1 << 20)
