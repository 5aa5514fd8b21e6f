"""Where ``statemgr materialize`` builds the first snapshot of a store, so that it can continue after it was killed.

::

    <state.dir>/<job>/<job ID>/materialize/<task>/<store>/
        lock             one process at a time
        replayed.json    up to which offset the directory certainly has the changelog
        uploaded.json    the files that are in the blob store already
        store/           the store's directory

Everything here is a cache: a build whose note is missing or damaged starts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from statemgr.local import durable, trees
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.os_errors import disk_errors
from statemgr.ports import FinishedDirectory

REPLAYED, UPLOADED = "replayed.json", "uploaded.json"
_DIRECTORY = "materialize"
#: Bytes of a note: the one about the files names every part of them.
_NOTE_SIZE = 512 * 1024 * 1024


class BuildPlace:
    """The place of one store of one task. Use it inside :meth:`held`."""

    def __init__(self, state_dir: Path, job_name: str, job_id: str, task_path: str, store: str) -> None:
        self._base, self._names = state_dir, (job_name, job_id, _DIRECTORY, task_path, store)
        self._path = state_dir.joinpath(*self._names)
        #: The store's directory.
        self.directory = self._path / "store"

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock of the place during the block. Yields: whether no other process has it. Raises: DiskFull,
        InvalidError."""
        with disk_errors(self._path):
            durable.check_private(durable.make_private(self._base, *self._names), self.directory.name)
        with disk_errors(self._path), exclusive_if_free(self._path / "lock") as is_free:
            yield is_free

    def note(self, name: str) -> Any:
        """What was noted; None if there is no usable note."""
        try:
            return durable.read_note(self._path / name, _NOTE_SIZE)
        except (OSError, ValueError):
            return None

    def write_note(self, name: str, found: object) -> None:
        """Replace a note. Raises: DiskFull."""
        with disk_errors(self._path):
            durable.write_note(self._path / name, found)

    def clear(self) -> None:
        """Remove everything but the lock, the notes first. Raises: DiskFull."""
        with disk_errors(self._path):
            for name in (REPLAYED, UPLOADED):
                durable.remove(self._path / name)
            durable.remove(self.directory)

    def finished(self) -> FinishedDirectory:
        """The files of the store's directory, which nobody writes to any more, without hashes.

        Raises: InvalidError (not flushed), CorruptFile, MissingFile.
        """
        with disk_errors(self.directory):
            tree = trees.only_state(self.directory)
        return FinishedDirectory(self.directory, {path: (s.st_size, None) for path, s in tree.files.items()})
