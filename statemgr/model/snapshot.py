"""The snapshot index: the content of an index blob, which describes one store's directory. Pure.

It is necessary and sufficient to rebuild the directory: small files are inside, and the blobs of large files are listed
part by part. :func:`validate` checks an index that was read before any I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unicodedata import normalize

from statemgr.errors import ANOTHER_COPY, CorruptBlob
from statemgr.model.checkpoint import BlobRef

#: Files up to this size are stored inside the index blob.
INLINE_LIMIT = 16 * 1024
#: All inline files of one index together.
INLINE_TOTAL_LIMIT = 1024 * 1024
MAX_FILES = 1_000_000
MAX_DEPTH = 32
MAX_FILE_SIZE = 1 << 44
MAX_INDEX_SIZE = 512 * 1024 * 1024
MAX_NAME_LENGTH = 255
TWICE = "appears twice, or differs from another one only in case or Unicode form, which macOS cannot hold"


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a table file, from where its blocks of data end: filter, index, properties and footer.

    ``offset``: where it begins in the file. ``hash``: the XXH3-128 of its bytes. ``foot``: its last bytes, which
    RocksDB needs to open the file (properties and footer); empty if they are many.
    """

    offset: int
    hash: bytes
    foot: bytes = b""


@dataclass(frozen=True, slots=True)
class FileIndex:
    """One file: its name in its directory, its size in bytes, the XXH3-128 of its content, and where the content is.

    Exactly one of ``inline`` and ``parts`` is set. Parts are in order, and their sizes add up to ``size``. ``frames``:
    for each part the bytes of the zstandard frame in its blob, or 0 if it has none; empty if no part has one.
    ``mode``: permission bits. ``modified_ms``: epoch milliseconds. ``tail``: of a table file, so that a reader can
    fetch and verify it before anything else; None if it is not known.
    """

    name: str
    size: int
    hash: bytes
    inline: bytes | None = None
    parts: tuple[BlobRef, ...] = ()
    frames: tuple[int, ...] = ()
    mode: int = 0o600
    modified_ms: int = 0
    tail: Tail | None = None

    @property
    def private_mode(self) -> int:
        """The mode of a local copy: the rights of its owner only."""
        return self.mode & 0o700

    def frame_of(self, part: int) -> int:
        """The size in bytes of the frame that holds a part, 0 if there is none."""
        return self.frames[part] if self.frames else 0

    def stored(self) -> Iterator[tuple[BlobRef, int]]:
        """Every part, and how many bytes it takes in its blob."""
        for number, part in enumerate(self.parts):
            yield part, self.frame_of(number) or part.size

    @property
    def identity(self) -> tuple[int, bytes]:
        """The size and the content hash. Two files are the same if and only if both are equal, whatever their names."""
        return self.size, self.hash


@dataclass(frozen=True, slots=True)
class DirIndex:
    """A directory: its files and sub-directories, each sorted by name. The root's name is empty."""

    name: str
    files: tuple[FileIndex, ...] = ()
    dirs: tuple[DirIndex, ...] = ()

    def walk(self, prefix: str = "") -> Iterator[tuple[str, FileIndex]]:
        """Every file at every depth with its path relative to the root, ``/`` between parts."""
        for file in self.files:
            yield prefix + file.name, file
        for sub in self.dirs:
            yield from sub.walk(f"{prefix}{sub.name}/")

    def walk_dirs(self, prefix: str = "") -> Iterator[str]:
        """Every sub-directory's relative path, parents first."""
        for sub in self.dirs:
            yield prefix + sub.name
            yield from sub.walk_dirs(f"{prefix}{sub.name}/")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for _, file in self.walk())


@dataclass(frozen=True, slots=True)
class SnapshotIndex:
    """An index blob: whose state it is, its directory, and the index that came before it.

    ``attempt`` is in the names of all blobs that this snapshot itself uploaded.
    """

    job_name: str
    job_id: str
    task: str
    store: str
    state_id: str
    attempt: str
    created_ms: int
    root: DirIndex
    previous: BlobRef | None = None

    def blobs(self) -> Iterator[BlobRef]:
        """Every blob that the index refers to (not the index blob itself)."""
        for _, file in self.root.walk():
            yield from file.parts

    def added(self) -> Iterator[BlobRef]:
        """The blobs that this snapshot's own commit uploaded."""
        return (blob for blob in self.blobs() if f"/{self.attempt}/" in blob.blob_id)


def validate(index: SnapshotIndex, blob_id: str, *, job_name: str, job_id: str, task: str, store: str) -> None:
    """Refuse a hostile or foreign index before it is used. Raises: CorruptBlob."""

    def refuse(what: str) -> CorruptBlob:
        where = {"blob": blob_id, "job": job_name, "task": task, "store": store}
        return CorruptBlob(f"index blob refused: {what}", hint=ANOTHER_COPY, **where)

    owner = (index.job_name, index.job_id, index.task, index.store)
    if owner != (job_name, job_id, task, store):
        raise refuse(f"it belongs to job {owner[0]!r}/{owner[1]!r}, task {owner[2]!r}, store {owner[3]!r}")
    if index.previous is not None and (problem := blob_id_problem(index.previous.blob_id, job_name, job_id)):
        raise refuse(f"the index before it {problem}")
    for what, name in (("state ID", index.state_id), ("attempt", index.attempt)):
        if problem := name_problem(name):
            raise refuse(f"its {what} {name!r} {problem}")
    count = inline = 0
    pending = [(index.root, 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise refuse(f"directories deeper than {MAX_DEPTH}")
        seen: set[str] = set()
        for name in [*(f.name for f in directory.files), *(d.name for d in directory.dirs)]:
            problem = name_problem(name)
            if problem or as_on_disk(name) in seen:
                raise refuse(f"file name {name!r} {problem or TWICE}")
            seen.add(as_on_disk(name))
        count += len(directory.files) + len(directory.dirs)
        if count > MAX_FILES:
            raise refuse(f"more than {MAX_FILES} files")
        for file in directory.files:
            problem = _file_problem(file, job_name, job_id)
            if problem:
                raise refuse(f"file {file.name!r} {problem}")
            inline += len(file.inline or b"")
        pending.extend((sub, depth + 1) for sub in directory.dirs)
    if inline > INLINE_TOTAL_LIMIT:
        raise refuse(f"more than {INLINE_TOTAL_LIMIT} bytes of inline files")


def name_problem(name: str) -> str | None:
    """Why a file name may not be used as one, or None."""
    if not name or name in (".", ".."):
        return "is not a file name"
    if "/" in name or "\\" in name or "\0" in name:
        return "contains a separator or NUL"
    if not name.isprintable():  # line breaks and other control characters, halves of surrogate pairs, no characters
        return "has a character that not every file system can hold"
    if len(name.encode()) > MAX_NAME_LENGTH:
        return "is too long"
    return None


def as_on_disk(name: str) -> str:
    """The same text for all names that a file system of macOS takes for one: it ignores case and Unicode's forms."""
    if name.isascii():
        return name.lower()
    return normalize("NFD", normalize("NFD", name).casefold())


def blob_id_problem(blob_id: str, job_name: str, job_id: str) -> str | None:
    """Why a job may not refer to a blob of this name, or None."""
    if not blob_id.startswith(f"{job_name}/{job_id}/") or any(map(name_problem, blob_id.split("/"))):
        return f"names the blob {blob_id!r}, which is not one of this job's"
    return None


def _file_problem(file: FileIndex, job_name: str, job_id: str) -> str | None:
    if not 0 <= file.size <= MAX_FILE_SIZE:
        return f"has an absurd size of {file.size}"
    if len(file.hash) != 16:
        return "has no 16-byte hash"
    if not 0o400 <= file.private_mode <= file.mode <= 0o777:
        return f"has the mode {file.mode:o}, with which nobody could restore it"
    if file.frames and len(file.frames) != len(file.parts):
        return "has not as many frames as parts"
    if (tail := file.tail) is not None and not (
        0 <= tail.offset < file.size and len(tail.hash) == 16 and len(tail.foot) <= file.size - tail.offset
    ):
        return "has an impossible tail"
    if file.inline is not None:
        if file.parts or len(file.inline) != file.size:
            return "has inline content that does not match its size"
        return None
    if any(part.size < 0 for part in file.parts) or sum(part.size for part in file.parts) != file.size:
        return "has parts that do not add up to its size"
    for number, part in enumerate(file.parts):
        frame = file.frame_of(number)
        if frame and (not 0 < frame < part.size or part.offset is not None):
            return f"has an impossible frame of {frame} bytes for the blob {part.blob_id!r}"
        if len(part.hash) != 16:
            return f"has no 16-byte hash for the blob {part.blob_id!r}"
        if problem := blob_id_problem(part.blob_id, job_name, job_id):
            return problem
    return None
