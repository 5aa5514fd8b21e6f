"""The ports of this machine: time, threads, stores, and the directories that they are in. No I/O here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import NamedTuple, Protocol

from statemgr.model.commit import Change

#: The wall clock and the monotonic clock may differ by this much over the time between two moments, in seconds.
_CLOCKS_AGREE_S = 60.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on one machine, as seen by two clocks.

    ``boot`` names the run of the operating system (empty: unknown), ``monotonic_s`` counts seconds within it, the same
    for all its processes, and ``wall_ms`` is the wall clock in epoch milliseconds.
    """

    boot: str
    monotonic_s: float
    wall_ms: int

    def seconds_since(self, earlier: Moment) -> float | None:
        """How many seconds later this moment is, or None if that is not known.

        It is not known if the machine was started again in between, or if the two clocks disagree, because somebody
        set the wall clock or the machine was suspended.
        """
        if not self.boot or self.boot != earlier.boot:
            return None
        passed = self.monotonic_s - earlier.monotonic_s
        by_wall = (self.wall_ms - earlier.wall_ms) / 1000
        return passed if passed >= 0 and abs(passed - by_wall) <= _CLOCKS_AGREE_S else None


class Clock(Protocol):
    """Wall time for people and TTLs, monotonic time for deadlines, and elapsed time for what is measured."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that never decrease, for deadlines. They leap when work is given up."""

    def elapsed(self) -> float:
        """Seconds that never decrease and never leap, for durations that are measured, logged or stored."""

    def sleep(self, seconds: float) -> None: ...

    def wait(self, changed: Condition, seconds: float) -> bool:
        """Wait on a condition that is held, at most ``seconds``. Returns: whether it was notified."""

    def give_up(self) -> None:
        """End the work in progress: from now on every deadline has passed, and every wait ends at once."""


def wait_for(clock: Clock, changed: Condition, ready: Callable[[], bool], seconds: float | None) -> bool:
    """Wait on a condition that is held until ``ready``, at most ``seconds``, or without a limit if that is None.

    Returns: whether it is ready.
    """
    if seconds is None:
        return changed.wait_for(ready)
    until, left = clock.monotonic() + seconds, seconds
    while not ready():
        if left <= 0:
            return False
        clock.wait(changed, left)  # once at least: callers repeat this, also after work was given up
        left = until - clock.monotonic()
    return True


class Executors(Protocol):
    """Makes the threads that run work in the background. A simulation replaces them with its own scheduler.

    Submitting work raises RetryableError if it needs a new thread and this process can start no more; it does not run.
    """

    def pool(self, name: str, threads: int) -> Executor:
        """A pool that runs up to ``threads`` calls at a time; with fewer if the process can start no more. None of them
        waits for another one. The caller shuts it down."""

    def worker(self, name: str, *, background: bool) -> Executor:
        """A thread for one call at a time. A process that ends does not wait for a ``background`` one."""

    def close(self) -> None:
        """Wait until the calls of all workers have ended."""


class Items(Iterator[tuple[bytes, bytes]], Protocol):
    """A scan of the items at the time of the call."""

    def close(self) -> None:
        """End the scan early and release what it holds. Idempotent."""


class ReadableStore(Protocol):
    """Keys and values in the order of the keys, for reading."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        """Items with ``start`` ≤ key < ``end`` in key order, at the time of the call. None is an open end."""


class LocalStore(ReadableStore, Protocol):
    """Keys and values on the local machine (RocksDB, or memory)."""

    def write(self, changes: Iterable[Change]) -> None:
        """Apply the changes in order: all of them, or none if it raises."""

    def ingest(self, tables: Sequence[Path]) -> None:
        """Apply table files, the oldest first: all of them, or none if it raises. The store moves the files.

        Raises: CorruptError if one of them is not a table that it can use."""

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Delete all keys with ``start`` ≤ key < ``end``, or none if it raises. None is an open end."""

    @property
    def sequence_number(self) -> int:
        """Grows with every write. Equal numbers of one open store mean equal content."""

    def flush(self) -> None:
        """Write everything to files. Raises: DiskFull."""

    def gauge(self, name: str) -> int | None:
        """One of the :meth:`statistics`, for a scrape. Any thread may call this. Does not wait: None if the store does
        not have it, is closed, or is busy with its files."""

    def statistics(self) -> Mapping[str, float]:
        """Numbers about the store, under names that its type chooses."""

    def compact_if_needed(self, limit: int) -> bool:
        """If ``limit`` files or more wait for compaction, wait until it has caught up.

        This is for stores that are open briefly. Returns: whether so many files waited.
        """

    def checkpoint(self, directory: Path) -> None:
        """Make a consistent copy in ``directory``, which must not exist, by hard links where possible. Flush first."""

    def concurrent_checkpoint(self, directory: Path) -> None:
        """Flush and make a consistent copy, from another thread, while the owner writes.

        The copy has everything that was written before the call, and perhaps later writes.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommittedDirectory:
    """A local directory with exactly one state, and its files (path → size in bytes, XXH3-128).

    ``as_of``: a moment at which no newer state of the store was published yet. None if none is known.
    """

    state_id: str
    path: Path
    files: Mapping[str, tuple[int, bytes]]
    as_of: Moment | None = None


@dataclass(slots=True)
class FinishedDirectory:
    """A directory that nobody writes to any more, and what is known about its files.

    Attributes:
        path: the directory. After it was adopted, the committed directory.
        files: path → size in bytes, and XXH3-128. The hash is None until somebody reads the whole file and adds it.
    """

    path: Path
    files: dict[str, tuple[int, bytes | None]]


class RestorePlace(NamedTuple):
    """What a restore begins with: a new path to fill, directories whose files it may reuse one by one (verified, newest
    first), and :meth:`LocalDirectories.leftovers`."""

    staging: Path
    reusable: Sequence[CommittedDirectory]
    leftovers: Sequence[Path]


class LocalDirectories(Protocol):
    """The local directories of one store of one task. Everything in them is a cache."""

    def find(self, state_id: str) -> CommittedDirectory | None:
        """The directory of this state, if it exists and its files verify (names, sizes, times, and hashes where
        anything deviates). One that does not verify becomes one of the :meth:`leftovers`."""

    def begin_restore(self) -> RestorePlace:
        """:meth:`staging`, :meth:`reusable` and :meth:`leftovers` at once."""

    def reusable(self) -> Sequence[CommittedDirectory]:
        """Verified directories whose files may be reused one by one, newest first."""

    def staging(self) -> Path:
        """A new path for a directory that the caller makes and fills."""

    def abandon(self, staging: Path) -> None:
        """Give up a staging directory that is not finished. Its content stays for another try."""

    def leftovers(self) -> Sequence[Path]:
        """Directories that nobody else uses: abandoned staging directories, those of dead owners, and committed ones
        that did not verify."""

    def finished(self, directory: Path) -> FinishedDirectory:
        """Describe a directory that nobody writes to any more. Files that do not belong to the state are removed.

        It has the hashes of files that a committed directory shares by hard links. Raises: CorruptFile if such a
        file has changed."""

    def adopt(
        self,
        staging: Path,
        state_id: str,
        files: Mapping[str, tuple[int, bytes | None]] | None,
        as_of: Moment | None = None,
        tables: Mapping[str, tuple[int, bytes]] | None = None,
    ) -> CommittedDirectory:
        """Make a finished directory the committed one for ``state_id``, by a rename, and record its files.

        Reads and hashes files without a known hash. If ``files`` is None, it hashes all files except those in
        ``tables`` that a database has not changed. ``as_of``: as in :class:`CommittedDirectory`."""

    def replace(
        self, staging: Path, state_id: str, files: Mapping[str, tuple[int, bytes | None]]
    ) -> CommittedDirectory:
        """Like :meth:`adopt`, but replace the directory of the same state, whose content is in other files."""

    def clone(self, committed: CommittedDirectory | FinishedDirectory | None) -> Path:
        """Make a private live directory to open a store in: hard links to immutable files, copies of the others.
        With None it is empty."""

    def discard(self, directory: Path) -> None:
        """Remove a staging or live directory."""

    def distrust(self) -> None:
        """Call this when a file is damaged. Directories share files, so from now on every process hashes all files of a
        directory before it uses it."""

    def remove(self, state_id: str) -> None:
        """Remove the directory of this state, whoever made it, because it cannot be used."""

    def keep_only(self, state_ids: Collection[str]) -> None:
        """Remove committed directories of other states, and staging and live directories of dead owners."""
