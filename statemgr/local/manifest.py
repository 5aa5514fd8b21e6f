"""Manifests list the files of committed directories, so that a later opening can check them. Reads only.

A manifest is the file ``<state id>.manifest`` next to the directory: one line of JSON, then the line's XXH3-128 in
hexadecimal digits. It is written after the directory has got its name, so a directory without a manifest is unfinished.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from statemgr.errors import CorruptFile
from statemgr.local import durable
from statemgr.local.durable import hash_file, read_small
from statemgr.local.trees import SMALL, scan
from statemgr.model.hashing import HASH_SIZE, content_hash
from statemgr.ports import Moment

SUFFIX = ".manifest"
_FORMAT = 3
_MAX_SIZE = 512 * 1024 * 1024
#: Value of ``boot`` for files that are in doubt, even without a restart of the machine.
IN_DOUBT = "in doubt"


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """Size in bytes, time of modification in nanoseconds, XXH3-128."""

    size: int
    mtime_ns: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a directory when it became the one for ``state_id``, the time of that, and the owner that made it.

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


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest file."""
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


def read(path: Path) -> Manifest:
    """Read a manifest. Raises: CorruptError if it is not a whole manifest; OSError."""
    try:
        data = read_small(path, _MAX_SIZE)
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


def deviation(manifest: Manifest, directory: Path) -> tuple[str | None, Mapping[str, RecordedFile]]:
    """Compare a directory with its manifest: names and sizes exactly. Compares the content by hash if a file is small,
    its time deviates, or the machine may have crashed before the file was on the disk.

    Returns: what is wrong (None: nothing), and the files whose time must be recorded again.
    Raises: CorruptError, OSError as :func:`scan`.
    """
    tree = scan(directory)
    if tree.files.keys() != manifest.files.keys() or tree.dirs != manifest.dirs:
        names = sorted({*tree.files, *tree.dirs} ^ {*manifest.files, *manifest.dirs})
        return f"{names[0]!r} is missing or was not there", {}
    touched: dict[str, RecordedFile] = {}
    doubtful = manifest.is_doubtful()
    for path, status in tree.files.items():
        recorded = manifest.files[path]
        if status.st_size != recorded.size:
            return f"{path!r} has {status.st_size} bytes instead of {recorded.size}", {}
        moved = status.st_mtime_ns != recorded.mtime_ns
        to_hash = moved or doubtful or status.st_size <= SMALL
        if to_hash and hash_file(directory / path) != (recorded.size, recorded.hash):
            return f"{path!r} was altered", {}
        if moved:
            touched[path] = RecordedFile(recorded.size, status.st_mtime_ns, recorded.hash)
    return None, touched
