"""What a transfer moves, and in which pieces. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from statemgr.model.snapshot import FileIndex

#: Most bytes of neighbouring files in one blob that are fetched together: they are in memory meanwhile.
RUN_SIZE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Upload:
    """A local file to upload: its path, its size and XXH3-128, and the name before its parts' numbers.

    Without a hash, any content is accepted, and the upload computes its hash.
    """

    path: Path
    size: int
    hash: bytes | None
    blob_prefix: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """A file of an index and the path to write it to, which must not exist yet.

    ``continued``: an earlier try left the file at its full size; correct parts of it are kept.
    """

    file: FileIndex
    target: Path
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Files that follow each other in one blob, from ``offset`` on: ``size`` bytes for one request."""

    blob_id: str
    offset: int
    size: int
    fetches: tuple[Fetch, ...]


def cut(size: int, part_size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of a file's parts; a small rest (up to a quarter) goes with the last one."""
    offset = 0
    while offset < size:
        left = size - offset
        length = left if left <= part_size + part_size // 4 else part_size
        yield offset, length
        offset += length


def runs(fetches: Iterable[Fetch]) -> tuple[list[Run], list[Fetch]]:
    """Combine files that one request can fetch. Returns: the runs of two files or more, and all other files."""
    slices: list[tuple[str, int, Fetch]] = []
    others: list[Fetch] = []
    for fetch in fetches:
        parts = fetch.file.parts
        packed = len(parts) == 1 and parts[0].offset is not None and 0 < parts[0].size <= RUN_SIZE
        if packed and not fetch.continued:
            assert parts[0].offset is not None
            slices.append((parts[0].blob_id, parts[0].offset, fetch))
        else:
            others.append(fetch)
    found: list[Run] = []
    for blob_id, offset, fetch in sorted(slices, key=lambda piece: piece[:2]):
        last = found[-1] if found else None
        size = fetch.file.size
        if last and last.blob_id == blob_id and last.offset + last.size == offset and last.size + size <= RUN_SIZE:
            found[-1] = Run(blob_id, last.offset, last.size + size, (*last.fetches, fetch))
        else:
            found.append(Run(blob_id, offset, size, (fetch,)))
    others += (run.fetches[0] for run in found if len(run.fetches) == 1)
    return [run for run in found if len(run.fetches) > 1], others
