"""The local directories of one store of one task. Touches only what is below its root, and follows no link.

::

    <root>/committed/<state id>/            has exactly that state (see ``committed``)
    <root>/live/<attempt>.<owner>/          an open store
    <root>/staging/<attempt>.<owner>/       a directory that is being filled
    <root>/owners/<owner>                   a file that is locked while the owner lives (see ``owners``)
    <root>/lock                             locked for changes of committed/ and for removals
    <root>/aside/                           the same, for processes that did not get the lock in time

All of it is a cache. A directory that does not verify is removed, and the state is restored from a backend. So large
files are not synced. If a directory is older than the last start of the machine, the hashes of its files are checked
instead.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from statemgr.errors import InvalidError
from statemgr.local import durable, trees
from statemgr.local.committed import IN_DOUBT, SUFFIX, CommittedDirectories, Manifest, RecordedFile, known_files
from statemgr.local.machine import moment
from statemgr.local.shared_directories import Owner, SharedRoot
from statemgr.model.snapshot import name_problem
from statemgr.os_errors import translated
from statemgr.ports import CommittedDirectory, FinishedDirectory, Moment, RestorePlace

log = logging.getLogger(__name__)

#: Suffix of a staging directory that nobody owns any more.
_LEFT = ".left"
_MAX_STATE_ID = 200
#: Longer than a commit may take. Directories of another living owner are kept at least this long.
_GRACE_S = 15 * 60
#: Names of live and staging directories. Anything with another name is not ours, and stays.
_OURS = re.compile(r"\d{1,19}-[0-9a-f]{16}(\.[0-9a-f]{16}|\.left)\Z")
#: The state IDs that commits make: an attempt's ID and the store's name.
_STATE = re.compile(r"\d{1,19}-[0-9a-f]{16}-[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


class StoreDirectories(SharedRoot):
    """Implements ``ports.LocalDirectories`` below one root directory, which is created when it is needed.

    Keep the object as long as you use one of its directories: when it is closed (or the process dies), its live and
    staging directories count as abandoned. Safe to use from many threads and processes.
    """

    parts = ("committed", "live", "staging", "owners")

    @property
    def _committed(self) -> CommittedDirectories:
        return CommittedDirectories(self._root / "committed")

    def find(self, state_id: str) -> CommittedDirectory | None:
        """Raises: InvalidError (not a state ID), AccessDenied."""
        _check_state_id(state_id)
        if not self._is_made():
            return None
        with self._changing("cannot look for a local directory"):
            return self._verified(state_id)

    def reusable(self) -> Sequence[CommittedDirectory]:
        if not self._is_made():
            return []
        with self._changing("cannot look for local directories"):
            return self._reusable()

    def begin_restore(self) -> RestorePlace:
        with self._changing("cannot make local directories"):
            reusable = self._reusable()
            return RestorePlace(self._path("staging", self._own()), reusable, self._leftovers())

    def staging(self) -> Path:
        return self._new("staging")

    def abandon(self, staging: Path) -> None:
        """A directory that does not exist is no error."""
        if not self._is_own(staging, "staging"):
            raise InvalidError("only a staging directory can be abandoned", path=staging)
        with translated("cannot abandon a local directory", staging), suppress(FileNotFoundError):
            os.rename(staging, staging.with_name(staging.name.partition(".")[0] + _LEFT))

    def leftovers(self) -> Sequence[Path]:
        if not self._is_made():
            return []
        with self._changing("cannot look for unfinished local directories"):
            return self._leftovers()

    def finished(self, directory: Path) -> FinishedDirectory:
        """Raises: InvalidError (not flushed), CorruptFile (altered, a link in it), MissingFile."""
        with translated("cannot read a local directory", directory):
            tree = trees.only_state(directory)
            return FinishedDirectory(directory, known_files(directory, tree, self._committed.shared()))

    def adopt(
        self,
        staging: Path,
        state_id: str,
        files: Mapping[str, tuple[int, bytes | None]] | None,
        as_of: Moment | None = None,
        tables: Mapping[str, tuple[int, bytes]] | None = None,
    ) -> CommittedDirectory:
        """If this state already has a directory that verifies, keeps that one instead.

        Raises: CorruptError if the directory does not have exactly ``files``; DiskFull, MissingState.
        """
        return self._adopt(staging, state_id, files, as_of, tables or {}, instead=False)

    def replace(
        self, staging: Path, state_id: str, files: Mapping[str, tuple[int, bytes | None]]
    ) -> CommittedDirectory:
        """Raises: as :meth:`adopt`."""
        before = self._committed.manifest(state_id)
        as_of = before.as_of if isinstance(before, Manifest) else None
        return self._adopt(staging, state_id, files, as_of, {}, instead=True)

    def _adopt(
        self,
        staging: Path,
        state_id: str,
        files: Mapping[str, tuple[int, bytes | None]] | None,
        as_of: Moment | None,
        tables: Mapping[str, tuple[int, bytes]],
        *,
        instead: bool,
    ) -> CommittedDirectory:
        _check_state_id(state_id)
        boot = durable.boot_id()
        with translated("cannot finish a local directory", staging):
            tree = trees.only_state(staging)
            shared = self._committed.shared()
            if files is None:
                files = known_files(staging, tree, shared) | trees.still_there(tree, tables)
            trees.check_files(staging, tree, files)
            hashed = {p: (size, known or durable.hash_file(staging / p)[1]) for p, (size, known) in files.items()}
            if not boot:
                trees.sync_tree(staging, tree, shared)
            trees.make_private(staging, tree)
            recorded = {p: RecordedFile(s.st_size, s.st_mtime_ns, hashed[p][1]) for p, s in tree.files.items()}
        with self._changing("cannot adopt a local directory"):
            made = Manifest(state_id, moment(self._clock), self._own().token, recorded, tree.dirs, boot, as_of)
            if instead:
                self._committed.remove(state_id)
            elif (here := self._verified(state_id)) is not None:
                durable.remove(staging)
                return here
            os.rename(staging, self._committed.root / state_id)
            # a sync would wait for everything that the file system is writing; files hashed before use need none
            self._committed.write(made, synced=not boot)
            if not boot:
                durable.sync(self._committed.root)
        return CommittedDirectory(state_id, self._committed.root / state_id, hashed, as_of)

    def clone(self, committed: CommittedDirectory | FinishedDirectory | None) -> Path:
        """Raises: MissingState if the directory was removed meanwhile; DiskFull."""
        live = self._new("live")
        with self._changing("cannot clone a local directory"):
            try:
                os.mkdir(live, 0o700)
                if committed is not None:
                    trees.clone_tree(committed.path, live, committed.files)
            except BaseException:
                with suppress(OSError):
                    durable.remove(live)
                raise
        return live

    def discard(self, directory: Path) -> None:
        """A directory that does not exist is no error. Raises: InvalidError for any other directory."""
        if not self._is_own(directory, "live", "staging"):
            raise InvalidError("only a live or a staging directory can be discarded", path=directory)
        with translated("cannot remove a local directory", directory):
            durable.remove(directory)

    def distrust(self) -> None:
        """A directory whose manifest cannot be changed is no longer used."""
        if not self._is_made():
            return
        with self._changing("cannot note that local directories are in doubt"):
            for found in list(self._committed.manifests()):
                try:
                    self._committed.write(replace(found, boot=IN_DOUBT))
                except OSError:
                    self._committed.forget(found.state_id)

    def remove(self, state_id: str) -> None:
        _check_state_id(state_id)
        with self._changing("cannot remove a local directory"):
            self._committed.remove(state_id)

    def keep_only(self, state_ids: Collection[str]) -> None:
        """Keeps recent directories of other living owners too, because these may still be uploading them."""
        if not self._is_made():
            return
        owner = self._owner  # another thread may leave this root meanwhile
        mine = owner.token if owner is not None else ""
        with self._changing("cannot clean up local directories"):
            alive, now = self._alive(), moment(self._clock)
            there = {found.state_id: found for found in self._committed.manifests()}
            kept = {state_id for state_id in state_ids if state_id in there}
            kept.update(
                found.state_id
                for found in there.values()
                if found.owner in alive - {mine} and now.monotonic_s - found.adopted.monotonic_s < _GRACE_S
            )
            for name in os.listdir(self._committed.root):
                # a crash left one of the two names
                state_id = name.removesuffix(durable.TEMPORARY).removesuffix(SUFFIX)
                if state_id in kept and not name.endswith(durable.TEMPORARY):
                    continue
                if state_id in there or state_id in state_ids or _STATE.match(state_id):
                    durable.remove(self._committed.root / name)
            for part in ("live", "staging"):
                for name in os.listdir(self._root / part):
                    if _OURS.match(name) and name.rpartition(".")[2] not in alive:
                        durable.remove(self._root / part / name)
            self._remove_aside()

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        with translated(what, self._root), self._holding_lock():
            yield

    def _is_made(self) -> bool:
        with translated("cannot look for local directories", self._root):
            return self._exists()

    def _is_own(self, directory: Path, *parts: str) -> bool:
        """Whether a directory is in one of these parts, of this root or one that was left."""
        roots = [self._root, *(root for root, _ in self._left)]
        return directory.parent in [root / part for root in roots for part in parts]

    def _new(self, part: str) -> Path:
        """A new path. If this owner's sign of life and the directory of the part are in place, it needs no lock."""
        what, owner = "cannot make local directories", self._owner
        with translated(what, self._root):
            is_made = durable.check_private(self._base, *self._levels, part).is_dir()
        if owner is None or not is_made or not owner.gives_sign():
            with self._changing(what):
                owner = self._own()
        return self._path(part, owner)

    def _path(self, part: str, owner: Owner) -> Path:
        return self._root / part / f"{self._ids.attempt_id()}.{owner.token}"

    def _reusable(self) -> Sequence[CommittedDirectory]:
        """The caller holds the lock."""
        manifests = sorted(self._committed.manifests(), key=lambda found: found.adopted.wall_ms, reverse=True)
        verified = [self._verified(found.state_id) for found in manifests]
        return [directory for directory in verified if directory is not None]

    def _leftovers(self) -> Sequence[Path]:
        """The caller holds the lock."""
        staging, alive = self._root / "staging", self._alive()
        names = [name for name in sorted(os.listdir(staging)) if _OURS.match(name)]
        left = [staging / name for name in names if name.rpartition(".")[2] not in alive]
        return [path for path in left if stat.S_ISDIR(os.lstat(path).st_mode)]

    def _verified(self, state_id: str) -> CommittedDirectory | None:
        """The directory of a state. One that cannot be used becomes a leftover: a restore may use its files after
        hashing them. The caller holds the lock."""
        found = self._committed.verified(state_id)
        if not isinstance(found, str):
            return found
        path = self._committed.root / state_id
        log.warning("local directory %s is not used: %s", path, found)
        self._committed.forget(state_id)
        if path.is_dir() and not path.is_symlink():
            os.rename(path, self._root / "staging" / (self._ids.attempt_id() + _LEFT))
        else:
            durable.remove(path)
        return None


def _check_state_id(state_id: str) -> None:
    problem = name_problem(state_id)
    if problem or state_id.startswith(".") or state_id.endswith(SUFFIX) or len(state_id) > _MAX_STATE_ID:
        raise InvalidError(f"{state_id!r} {problem or 'is not a name'} for a state")
