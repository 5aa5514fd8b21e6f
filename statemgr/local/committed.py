"""The committed directories of a store, each for exactly one state, and the manifests that list their files.

::

    <state id>/            the directory
    <state id>.manifest    one line of JSON, then the line's XXH3-128 in hexadecimal digits

A manifest is written after the directory has got its name, so a directory without one is unfinished. A directory that
does not match its manifest is not used.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from statemgr.errors import CorruptError, CorruptFile
from statemgr.local import durable
from statemgr.local.trees import SMALL, Tree, scan
from statemgr.model.hashing import HASH_SIZE, content_hash
from statemgr.os_errors import Fault, fault_of
from statemgr.ports import CommittedDirectory, Moment

SUFFIX = ".manifest"
_FORMAT = 3
_MAX_SIZE = 512 * 1024 * 1024
#: Value of ``boot`` for files that must be hashed before they are used, even without a restart of the machine.
IN_DOUBT = "in doubt"
#: Faults of a directory that another copy replaces. The others concern the process or the whole disk.
_UNUSABLE = {Fault.GONE, Fault.ALTERED, Fault.FAILED}


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """Size in bytes, time of modification in nanoseconds, XXH3-128."""

    size: int
    mtime_ns: int
    hash: bytes

    def is_as_recorded(self, status: os.stat_result) -> bool:
        """Whether kind, size and time say that the file has not changed."""
        return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a directory, the state that it has, when it was committed, and the owner that made it.

    ``as_of``: a moment at which no newer state was published yet, if one is known. ``boot``: the run of the operating
    system in which the directory was made without syncing its files; empty if the files are known to be on the disk.
    """

    state_id: str
    adopted: Moment
    owner: str
    files: Mapping[str, RecordedFile]
    dirs: tuple[str, ...]
    boot: str = ""
    as_of: Moment | None = None

    def is_doubtful(self) -> bool:
        """Whether files may have changed unnoticed: the machine may have crashed before they were on the disk, or one
        of them was found damaged."""
        return self.boot not in ("", durable.boot_id())


class Known(NamedTuple):
    """The recorded content of a file that directories share, and whether the file certainly still has it."""

    file: RecordedFile
    is_certain: bool


class CommittedDirectories:
    """The directories below ``root``. The caller holds the lock of the store's directories."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, manifest: Manifest, *, synced: bool = True) -> None:
        """Write a manifest, which makes the directory of its state a finished one. Raises: OSError."""
        durable.write_file(self._manifest_path(manifest.state_id), _encoded(manifest), synced=synced)

    def remove(self, state_id: str) -> None:
        """Remove the directory of a state and its manifest. Raises: OSError."""
        self.forget(state_id)
        durable.remove(self.root / state_id)

    def forget(self, state_id: str) -> None:
        """Remove a manifest, so that the directory is no longer used. Raises: OSError."""
        durable.remove(self._manifest_path(state_id))

    def manifests(self) -> Iterator[Manifest]:
        """All readable manifests."""
        for name in os.listdir(self.root):
            if name.endswith(SUFFIX):
                found = self.manifest(name.removesuffix(SUFFIX))
                if isinstance(found, Manifest):
                    yield found

    def manifest(self, state_id: str) -> Manifest | str:
        """The manifest of a state, or a text that says why there is no usable one. Raises: OSError."""
        try:
            found = _read(self._manifest_path(state_id))
        except (CorruptError, ValueError, KeyError, TypeError) as error:
            return f"its manifest is damaged: {error}"
        except OSError as error:
            if fault_of(error) not in _UNUSABLE:
                raise
            return f"its manifest cannot be read: {error.strerror}"
        return found if found.state_id == state_id else "its manifest is another state's"

    def verified(self, state_id: str) -> CommittedDirectory | str | None:
        """The directory of a state, a text that says why it is unusable, or None if there is none. Raises: OSError."""
        path = self.root / state_id
        found = self.manifest(state_id)
        if isinstance(found, str):
            return found if os.path.lexists(path) or os.path.lexists(self._manifest_path(state_id)) else None
        try:
            problem, touched = _deviation(found, path)
        except CorruptError as error:
            return str(error)
        except OSError as error:
            if fault_of(error) not in _UNUSABLE:
                raise
            return f"it cannot be read: {error.strerror}"
        if problem is not None:
            return problem
        if touched or found.is_doubtful():
            boot = found.boot
            if found.is_doubtful():  # its files have now been hashed: after a restart of the machine, as on the disk
                boot = durable.boot_id() if boot == IN_DOUBT else ""
            found = replace(found, files={**found.files, **touched}, boot=boot)
            self.write(found)
        files = {name: (file.size, file.hash) for name, file in found.files.items()}
        return CommittedDirectory(state_id, path, files, found.as_of)

    def shared(self) -> dict[tuple[int, int], Known]:
        """Device and inode → content, for every file that a committed directory shares with others by hard links.

        While a hard link holds an inode, no other file can get it, so a new link to it has the same content.
        """
        shared: dict[tuple[int, int], Known] = {}
        if not self.root.is_dir():
            return shared
        for found in self.manifests():
            doubtful = found.is_doubtful()
            for name, file in found.files.items():
                try:
                    status = os.lstat(self.root / found.state_id / name)
                except OSError:
                    continue
                inode = status.st_dev, status.st_ino
                is_certain = not doubtful and file.is_as_recorded(status)
                if is_certain or (status.st_nlink > 1 and inode not in shared):
                    shared[inode] = Known(file, is_certain)
        return shared

    def _manifest_path(self, state_id: str) -> Path:
        return self.root / (state_id + SUFFIX)


def known_files(
    directory: Path, tree: Tree, shared: Mapping[tuple[int, int], Known]
) -> dict[str, tuple[int, bytes | None]]:
    """The sizes of a tree's files, and the hashes of those in ``shared``, which must never change.

    Raises: CorruptFile if one has changed: a commit must not upload it as a new file.
    """
    files: dict[str, tuple[int, bytes | None]] = {}
    for path, status in tree.files.items():
        known = shared.get((status.st_dev, status.st_ino))
        if known is None:
            files[path] = status.st_size, None
            continue
        content = known.file.size, known.file.hash
        is_same = known.is_certain and known.file.is_as_recorded(status)
        if not is_same and durable.hash_file(directory / path) != content:
            raise CorruptFile(
                "a local file was altered after it was committed",
                hint="open the task again: the store is then restored",
                path=directory / path,
            )
        files[path] = content
    return files


def _encoded(manifest: Manifest) -> bytes:
    line = json.dumps(
        {
            "format": _FORMAT,
            "state_id": manifest.state_id,
            "adopted": astuple(manifest.adopted),
            "as_of": astuple(manifest.as_of) if manifest.as_of else None,
            "owner": manifest.owner,
            "files": {path: [f.size, f.mtime_ns, f.hash.hex()] for path, f in sorted(manifest.files.items())},
            "dirs": list(manifest.dirs),
            "boot": manifest.boot,
        }
    ).encode()
    return line + b"\n" + content_hash(line).hex().encode() + b"\n"


def _read(path: Path) -> Manifest:
    """Raises: CorruptError, ValueError, KeyError, TypeError if it is not a whole manifest; OSError."""
    try:
        data = durable.read_small(path, _MAX_SIZE)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptFile("a manifest is far too large", path=path) from error
        raise
    line, _, rest = data.partition(b"\n")
    if rest != content_hash(line).hex().encode() + b"\n":
        raise CorruptFile("a manifest does not match its checksum", path=path)
    content = json.loads(line)
    if content["format"] != _FORMAT:
        raise CorruptFile(f"a manifest has the unknown format {content['format']}", path=path)
    files = {
        name: RecordedFile(size, mtime_ns, bytes.fromhex(digest))
        for name, (size, mtime_ns, digest) in content["files"].items()
    }
    assert all(len(file.hash) == HASH_SIZE for file in files.values())
    dirs = tuple(content["dirs"])
    as_of = Moment(*content["as_of"]) if content["as_of"] else None
    adopted = Moment(*content["adopted"])
    return Manifest(content["state_id"], adopted, content["owner"], files, dirs, content["boot"], as_of)


def _deviation(manifest: Manifest, directory: Path) -> tuple[str | None, Mapping[str, RecordedFile]]:
    """Compare a directory with its manifest: names and sizes exactly, and the content by hash if a file is small, its
    time deviates, or the machine may have crashed before the file was on the disk.

    Returns: what is wrong (None: nothing), and the files whose time must be recorded again.
    Raises: CorruptError, OSError as :func:`scan`.
    """
    tree = scan(directory)
    # a directory in place of a file has the file's name
    if odd := (tree.files.keys() ^ manifest.files.keys()) | (set(tree.dirs) ^ set(manifest.dirs)):
        return f"{min(odd)!r} is missing, was not there, or is another kind of file", {}
    touched: dict[str, RecordedFile] = {}
    doubtful = manifest.is_doubtful()
    for path, status in tree.files.items():
        recorded = manifest.files[path]
        if status.st_size != recorded.size:
            return f"{path!r} has {status.st_size} bytes instead of {recorded.size}", {}
        moved = status.st_mtime_ns != recorded.mtime_ns
        to_hash = moved or doubtful or status.st_size <= SMALL
        if to_hash and durable.hash_file(directory / path) != (recorded.size, recorded.hash):
            return f"{path!r} was altered", {}
        if moved:
            touched[path] = RecordedFile(recorded.size, status.st_mtime_ns, recorded.hash)
    return None, touched
