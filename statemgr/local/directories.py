"""The local directories of one store of one task. Touches only what is below its root, and follows no link.

::

    <root>/committed/<state id>/            has exactly that state
    <root>/committed/<state id>.manifest    lists its files; without a manifest the directory is unfinished
    <root>/live/<attempt>.<owner>/          an open store
    <root>/staging/<attempt>.<owner>/       a directory that is being filled
    <root>/owners/<owner>                   a file that is locked while the owner lives
    <root>/lock                             locked for changes of committed/ and for removals

All of it is a cache. A directory that does not verify is removed, and the state is restored from a backend. So large
files are not synced. If a directory is older than the last start of the machine, the hashes of its files are checked
instead.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from statemgr.errors import CorruptError, CorruptFile, InvalidError
from statemgr.ids import IdSource
from statemgr.local import durable, levels, manifest, trees
from statemgr.local.clock import moment
from statemgr.local.manifest import IN_DOUBT, SUFFIX, Manifest, RecordedFile
from statemgr.local.owners import Owner, exclusive, is_alive
from statemgr.local.trees import Tree
from statemgr.model.snapshot import name_problem
from statemgr.os_errors import translated
from statemgr.ports import Clock, CommittedDirectory, FinishedDirectory, Moment

log = logging.getLogger(__name__)

_PARTS = ("committed", "live", "staging", "owners")
_UNUSABLE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
#: Suffix of a staging directory that nobody owns any more.
_LEFT = ".left"
_MAX_STATE_ID = 200
#: Longer than a commit may take. Directories of another living owner are kept at least this long.
_GRACE_S = 15 * 60
#: Names of live and staging directories. Anything with another name is not ours, and stays.
_OURS = re.compile(r"\d{1,19}-[0-9a-f]{16}(\.[0-9a-f]{16}|\.left)\Z")
#: The state IDs that commits make: an attempt's ID and the store's name.
_STATE = re.compile(r"\d{1,19}-[0-9a-f]{16}-[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


class StoreDirectories:
    """Implements ``ports.LocalDirectories`` below one root directory, which is created when it is needed.

    Keep the object as long as you use one of its directories: when it is closed (or the process dies), its live and
    staging directories count as abandoned. Safe to use from many threads and processes.

    Args:
        base: a directory above the root, at any depth. No level in between may be a link. Default: the root's parent.
    """

    def __init__(self, root: Path, clock: Clock, ids: IdSource, base: Path | None = None) -> None:
        self._root = root
        self._base = base or root.parent
        self._levels = root.relative_to(self._base).parts
        self._clock = clock
        self._ids = ids
        self._owner: Owner | None = None

    def find(self, state_id: str) -> CommittedDirectory | None:
        """Raises: InvalidError (not a state ID), UnavailableError, AccessDenied."""
        _check_state_id(state_id)
        if not self._exists():
            return None
        with self._changing("cannot look for a local directory"):
            return self._verified(state_id)

    def reusable(self) -> Sequence[CommittedDirectory]:
        if not self._exists():
            return []
        with self._changing("cannot look for local directories"):
            newest_first = sorted(self._manifests(), key=lambda found: found.adopted.wall_ms, reverse=True)
            verified = [self._verified(found.state_id) for found in newest_first]
        return [directory for directory in verified if directory is not None]

    def staging(self) -> Path:
        return self._new("staging")

    def abandon(self, staging: Path) -> None:
        """A directory that does not exist is no error."""
        if staging.parent != self._root / "staging":
            raise InvalidError("only a staging directory can be abandoned", path=staging)
        with translated("cannot abandon a local directory", staging), suppress(FileNotFoundError):
            os.rename(staging, staging.with_name(staging.name.partition(".")[0] + _LEFT))

    def leftovers(self) -> Sequence[Path]:
        if not self._exists():
            return []
        with self._changing("cannot look for unfinished local directories"):
            staging, alive = self._root / "staging", self._alive()
            names = [name for name in sorted(os.listdir(staging)) if _OURS.match(name)]
            left = [staging / name for name in names if name.rpartition(".")[2] not in alive]
            return [path for path in left if stat.S_ISDIR(os.lstat(path).st_mode)]

    def finished(self, directory: Path) -> FinishedDirectory:
        """Raises: InvalidError (not flushed), CorruptFile (altered, a link in it), MissingFile."""
        with translated("cannot read a local directory", directory):
            tree = trees.only_state(directory)
            return FinishedDirectory(directory, _known(directory, tree, self._held()))

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
        before = self._manifest(state_id)
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
        owner = self._own()
        boot = durable.boot_id()
        with translated("cannot finish a local directory", staging):
            tree = trees.only_state(staging)
            held = self._held()
            if files is None:
                files = _known(staging, tree, held) | trees.still_there(tree, tables)
            trees.check_files(staging, tree, files)
            hashed = {p: (size, known or durable.hash_file(staging / p)[1]) for p, (size, known) in files.items()}
            if not boot:
                trees.sync_tree(staging, tree, held)
            trees.make_private(staging, tree)
            recorded = {p: RecordedFile(s.st_size, s.st_mtime_ns, hashed[p][1]) for p, s in tree.files.items()}
            made = Manifest(state_id, moment(self._clock), owner.token, recorded, tree.dirs, boot, as_of)
        with self._changing("cannot adopt a local directory"):
            target = self._committed / state_id
            if instead:
                durable.remove(_manifest_path(target))
                durable.remove(target)
            elif (here := self._verified(state_id)) is not None:
                durable.remove(staging)
                return here
            os.rename(staging, target)
            # a sync would wait for everything that the file system is writing; a directory in doubt needs none
            durable.write_file(_manifest_path(target), manifest.encode(made), synced=not boot)
            if not boot:
                durable.sync(self._committed)
        return CommittedDirectory(state_id, target, hashed, as_of)

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
        if directory.parent not in (self._root / "live", self._root / "staging"):
            raise InvalidError("only a live or a staging directory can be discarded", path=directory)
        with translated("cannot remove a local directory", directory):
            durable.remove(directory)

    def distrust(self) -> None:
        """A directory whose manifest cannot be changed is no longer used."""
        if not self._exists():
            return
        with self._changing("cannot note that local directories are in doubt"):
            for found in list(self._manifests()):
                path = _manifest_path(self._committed / found.state_id)
                try:
                    durable.write_file(path, manifest.encode(replace(found, boot=IN_DOUBT)))
                except OSError:
                    durable.remove(path)

    def remove(self, state_id: str) -> None:
        _check_state_id(state_id)
        with self._changing("cannot remove a local directory"):
            durable.remove(_manifest_path(self._committed / state_id))
            durable.remove(self._committed / state_id)

    def keep_only(self, state_ids: Collection[str]) -> None:
        """Keeps recent directories of other living owners too, because these may still be uploading them."""
        if not self._exists():
            return
        mine = self._owner.token if self._owner is not None else ""
        with self._changing("cannot clean up local directories"):
            alive, now = self._alive(), moment(self._clock)
            there = {found.state_id: found for found in self._manifests()}
            kept = {state_id for state_id in state_ids if state_id in there}
            kept.update(
                found.state_id
                for found in there.values()
                if found.owner in alive - {mine} and now.monotonic_s - found.adopted.monotonic_s < _GRACE_S
            )
            for name in os.listdir(self._committed):
                # a crash left one of the two names
                state_id = name.removesuffix(durable.TEMPORARY).removesuffix(SUFFIX)
                if state_id in kept and not name.endswith(durable.TEMPORARY):
                    continue
                if state_id in there or state_id in state_ids or _STATE.match(state_id):
                    durable.remove(self._committed / name)
            for part in ("live", "staging"):
                for name in os.listdir(self._root / part):
                    if _OURS.match(name) and name.rpartition(".")[2] not in alive:
                        durable.remove(self._root / part / name)

    def _alive(self) -> set[str]:
        """Living owners, including this one even if its file was deleted. The caller holds the lock."""
        signs = self._root / "owners"
        alive = {token for token in os.listdir(signs) if is_alive(signs, token)}
        return alive | {self._owner.token} if self._owner is not None else alive

    def close(self) -> None:
        """Give up all live and staging directories of this object. Idempotent."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _committed(self) -> Path:
        return self._root / "committed"

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Create the directory structure and hold the root's lock."""
        with translated(what, self._root):
            self._make()
            with exclusive(self._root / "lock", self._clock):
                yield

    def _make(self) -> None:
        levels.make(self._base, *self._levels)
        for part in _PARTS:
            levels.make(self._root, part)

    def _exists(self) -> bool:
        """Whether the root exists. Raises: InvalidError for a link in its path."""
        with translated("cannot look for local directories", self._root):
            return levels.check(self._base, *self._levels).is_dir()

    def _own(self) -> Owner:
        """This owner, with its locked file in place."""
        with self._changing("cannot make local directories"):
            if self._owner is None:
                self._owner = Owner(self._root / "owners", self._ids.token()[:16])
            else:
                self._owner.renew()
        return self._owner

    def _new(self, part: str) -> Path:
        owner = self._own()
        return self._root / part / f"{self._ids.attempt_id()}.{owner.token}"

    def _manifests(self) -> Iterator[Manifest]:
        """All readable manifests."""
        for name in os.listdir(self._committed):
            if name.endswith(SUFFIX):
                found = self._manifest(name.removesuffix(SUFFIX))
                if isinstance(found, Manifest):
                    yield found

    def _manifest(self, state_id: str) -> Manifest | str:
        """The manifest of a state, or a text that says why there is no usable one."""
        try:
            found = manifest.read(_manifest_path(self._committed / state_id))
        except (CorruptError, ValueError, KeyError, TypeError) as error:
            return f"its manifest is damaged: {error}"
        except OSError as error:
            if error.errno not in _UNUSABLE:
                raise
            return "it has no manifest"
        return found if found.state_id == state_id else "its manifest is another state's"

    def _verified(self, state_id: str) -> CommittedDirectory | None:
        """The directory of a state if it matches its manifest; otherwise it becomes unfinished. The caller holds the
        lock."""
        path = self._committed / state_id
        found = self._manifest(state_id)
        if isinstance(found, Manifest):
            problem, touched = _deviation(found, path)
            if problem is None:
                if touched or found.is_doubtful():
                    # its files were in doubt, and have now been hashed as they are on the disk
                    found = replace(
                        found, files={**found.files, **touched}, boot="" if found.is_doubtful() else found.boot
                    )
                    durable.write_file(_manifest_path(path), manifest.encode(found))
                files = {p: (f.size, f.hash) for p, f in found.files.items()}
                return CommittedDirectory(state_id, path, files, found.as_of)
        else:
            problem = found
        if os.path.lexists(path) or os.path.lexists(_manifest_path(path)):
            log.warning("local directory %s is not used: %s", path, problem)
            durable.remove(_manifest_path(path))
            self._leave(path)
        return None

    def _leave(self, path: Path) -> None:
        """Turn a directory that does not verify into a leftover: a restore may use its files after hashing them."""
        if path.is_dir() and not path.is_symlink():
            os.rename(path, self._root / "staging" / (self._ids.attempt_id() + _LEFT))
        else:
            durable.remove(path)

    def _held(self) -> dict[tuple[int, int], _Held]:
        """Device and inode → content, for every file that a committed directory shares with others by hard links.

        While a hard link holds an inode, no other file can get it, so a new link to it has the same content.
        """
        held: dict[tuple[int, int], _Held] = {}
        if not self._committed.is_dir():
            return held
        for found in self._manifests():
            doubtful = found.is_doubtful()
            for name, file in found.files.items():
                try:
                    status = os.lstat(self._committed / found.state_id / name)
                except OSError:
                    continue
                inode = status.st_dev, status.st_ino
                is_certain = not doubtful and _is_as_recorded(status, file)
                if is_certain or (status.st_nlink > 1 and inode not in held):
                    held[inode] = _Held(file, is_certain)
        return held


class _Held(NamedTuple):
    """The recorded content of a shared file, and whether the file certainly still has it."""

    file: RecordedFile
    is_certain: bool


def _known(directory: Path, tree: Tree, held: Mapping[tuple[int, int], _Held]) -> dict[str, tuple[int, bytes | None]]:
    """The sizes of a tree's files, and the hashes of those in ``held``. Shared files must never change.

    Raises: CorruptFile if one has changed: its content must not pass for something new.
    """
    files: dict[str, tuple[int, bytes | None]] = {}
    for path, status in tree.files.items():
        known = held.get((status.st_dev, status.st_ino))
        if known is None:
            files[path] = status.st_size, None
            continue
        file, is_certain = known
        if not (is_certain and _is_as_recorded(status, file)) and durable.hash_file(directory / path) != (
            file.size,
            file.hash,
        ):
            raise CorruptFile(
                "a local file was altered after it was committed",
                hint="open the task again: the store is then restored",
                path=directory / path,
            )
        files[path] = file.size, file.hash
    return files


def _is_as_recorded(status: os.stat_result, file: RecordedFile) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size == file.size and status.st_mtime_ns == file.mtime_ns


def _manifest_path(directory: Path) -> Path:
    return directory.with_name(directory.name + SUFFIX)


def _check_state_id(state_id: str) -> None:
    problem = name_problem(state_id)
    if problem or state_id.startswith(".") or state_id.endswith(SUFFIX) or len(state_id) > _MAX_STATE_ID:
        raise InvalidError(f"{state_id!r} {problem or 'is not a name'} for a state")


def _deviation(found: Manifest, path: Path) -> tuple[str | None, Mapping[str, RecordedFile]]:
    try:
        return manifest.deviation(found, path)
    except CorruptError as error:
        return str(error), {}
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        return "it is gone", {}
