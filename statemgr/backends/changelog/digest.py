"""Hashes the newest value of every key of a changelog, with bounded memory. Writes below the directory it is given.

Steps; each call can run in a process of its own:

1. :func:`read_rows` reads a range of offsets, and writes a row of 32 bytes for each record to one of 16 files
2. :func:`hash_rows` reads the files of one part, of all ranges in order, and adds up the newest row of each key

A part that is too large for memory is split into 16 files again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from statemgr.model import content
from statemgr.model.commit import Change
from statemgr.model.content import Content
from statemgr.os_errors import disk_errors

#: Keys of one part that are held in memory: about 100 MB.
MOST_KEYS = 400_000
#: Rows that are split together.
_WINDOW = 8192
_READ_SIZE = 4096 * content.ROW_SIZE


def read_rows(batches: Iterable[Sequence[Change]], directory: Path) -> int:
    """Write the rows of records to ``directory/0`` … ``directory/15``.

    Returns: the number of records. Raises: DiskFull.
    """
    return _deal((content.rows(batch) for batch in batches), directory, 0)


def hash_rows(files: Sequence[Path], level: int = 1) -> Content:
    """The content of files that have the same part of the keys, oldest first. Removes them. Raises: DiskFull."""
    found = content.newest(_read(files), MOST_KEYS if level < content.LEVELS else None)
    if found is None:
        directory = files[0].with_name(f"{files[0].name}-{level}")
        _deal(map(content.unpacked, _read(files)), directory, level)
        parts = (hash_rows([directory / str(part)], level + 1) for part in range(content.WAYS))
        found = sum(parts, Content())
    for file in files:
        file.unlink(missing_ok=True)
    return found


def _deal(batches: Iterable[list[bytes]], directory: Path, level: int) -> int:
    count = 0
    with disk_errors(directory), ExitStack() as closing:
        directory.mkdir()
        files = [
            closing.enter_context((directory / str(part)).open("xb", buffering=1 << 17)) for part in range(content.WAYS)
        ]
        window: list[list[bytes]] = []
        waiting = 0
        for batch in batches:
            window.append(batch)
            waiting += len(batch)
            count += len(batch)
            if waiting >= _WINDOW:
                _write(window, files, level)
                window, waiting = [], 0
        _write(window, files, level)
    return count


def _write(window: list[list[bytes]], files: Sequence[BinaryIO], level: int) -> None:
    for file, part in zip(files, content.split(list(chain.from_iterable(window)), level), strict=True):
        file.write(part)


def _read(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        with disk_errors(file), file.open("rb") as source:
            while data := source.read(_READ_SIZE):
                yield data
