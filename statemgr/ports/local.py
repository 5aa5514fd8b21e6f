"""The ports of this machine: stores, and the directories that they are in. No I/O here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from statemgr.model.commit import Change
from statemgr.ports.clock import Moment


class Items(Iterator[tuple[bytes, bytes]], Protocol):
    """A scan under way: items as of the moment that it was asked for."""

    def close(self) -> None:
        """Let go of what it holds, before its end. Repeating it is no error."""


class LocalStore(Protocol):
    """Ordered keyed bytes on the local machine (RocksDB, or memory)."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def write(self, changes: Iterable[Change]) -> None:
        """Apply changes in order, all or nothing per call."""

    def ingest(self, tables: Sequence[Path]) -> None:
        """Apply table files, the oldest first, all or none. The store takes the files away.

        Raises: CorruptError when one of them is not a table that it can use."""

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Delete all keys with ``start`` ≤ key < ``end``, all or nothing; None is an open end."""

    def scan(self, start: bytes | None, end: bytes | None) -> Items:
        """Items with ``start`` ≤ key < ``end`` in key order, as of the moment of the call; None is an open end."""

    @property
    def sequence_number(self) -> int:
        """Grows with every write; equal numbers of one open store mean equal content."""

    def flush(self) -> None:
        """Bring everything written into files. Raises: DiskFull."""

    def statistics(self) -> Mapping[str, float]:
        """Numbers about the store for people, under names of its kind's own."""

    def compact_if_needed(self, limit: int) -> bool:
        """Let compaction catch up when ``limit`` files or more wait for it; for stores that are opened briefly."""

    def checkpoint(self, directory: Path) -> None:
        """Make ``directory`` (which must not exist) a consistent copy, by hard links where possible. Flush first."""

    def checkpoint_beside(self, directory: Path) -> None:
        """Flush and make ``directory`` a consistent copy, from another thread, while the owner writes.

        The copy has all that was written before the call, and perhaps what is written meanwhile.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommittedDirectory:
    """A local directory that was made for exactly one state, and its files' hashes (path → size, XXH3-128).

    ``as_of``: a moment at which no newer state of the store was published yet; None where that is not known.
    """

    state_id: str
    path: Path
    files: Mapping[str, tuple[int, bytes]]
    as_of: Moment | None = None


@dataclass(slots=True)
class FinishedDirectory:
    """A directory that nobody writes to any more, and what is known of its files.

    Attributes:
        path: where it is; after it was adopted, the committed directory.
        files: path → size, and XXH3-128 or None for a file that nobody has read yet. Who reads one whole notes it.
    """

    path: Path
    files: dict[str, tuple[int, bytes | None]]


class LocalDirectories(Protocol):
    """The local directories of one store of one task. Everything in them is a cache."""

    def find(self, state_id: str) -> CommittedDirectory | None:
        """The directory made for this state, if it is here and its files verify (names, sizes, times; hashes where
        anything deviates). One that does not verify becomes one of the :meth:`leftovers`."""

    def reusable(self) -> Sequence[CommittedDirectory]:
        """Directories of other states whose files may be reused one by one, newest first, verified likewise."""

    def staging(self) -> Path:
        """A new name for a directory that is being made (it does not exist yet)."""

    def abandon(self, staging: Path) -> None:
        """Give up a staging directory that is not finished, but leave what is in it to another try."""

    def leftovers(self) -> Sequence[Path]:
        """Staging directories that were abandoned, or whose owners are dead, and committed ones that did not verify:
        nobody else uses them."""

    def finished(self, directory: Path) -> FinishedDirectory:
        """A directory, with the content hashes of the files whose inodes a committed directory holds by a hard link.
        Files that are no state are removed.

        Raises: CorruptFile when a file that such a directory shares is not what it was."""

    def adopt(
        self,
        staging: Path,
        state_id: str,
        files: Mapping[str, tuple[int, bytes | None]] | None,
        as_of: Moment | None = None,
        tables: Mapping[str, tuple[int, bytes]] | None = None,
    ) -> CommittedDirectory:
        """Make a finished directory the one for ``state_id``: record what it holds, swap it in by rename.

        Files without a hash are read; ``files`` None: all of them, except for those of ``tables`` that are still there
        after a database has written to the directory. ``as_of``: as in :class:`CommittedDirectory`."""

    def replace(
        self, staging: Path, state_id: str, files: Mapping[str, tuple[int, bytes | None]]
    ) -> CommittedDirectory:
        """As :meth:`adopt`, in place of a directory of the same state that is here: its content in other files."""

    def clone(self, committed: CommittedDirectory | FinishedDirectory | None) -> Path:
        """A private live directory to open a store in: hard links to immutable files, copies of the others.
        None gives a new empty one."""

    def discard(self, directory: Path) -> None:
        """Remove a staging or live directory."""

    def distrust(self) -> None:
        """A file turned out to be damaged, and directories share files: from now on each is used only after all of it
        was hashed, by whichever process."""

    def remove(self, state_id: str) -> None:
        """Remove the directory made for this state, whoever made it: it turned out to be of no use."""

    def keep_only(self, state_ids: Collection[str]) -> None:
        """Remove committed directories of other states, and stray staging and live directories of dead owners."""
