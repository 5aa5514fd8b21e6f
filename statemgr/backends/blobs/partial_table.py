"""A table file with holes: which of its bytes are here, and which of those are verified. No requests.

Two write to it: the fill, which writes parts from their beginnings on and verifies them, and reads, which write chunks
that RocksDB's checksums protect. What a read writes over a part that the fill has written has to be verified again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from statemgr.local.sparse_file import SparseFile
from statemgr.model.checkpoint import BlobRef
from statemgr.model.snapshot import FileIndex, Tail
from statemgr.transfer.downloads import PIECE
from statemgr.transfer.pool import Counter

#: The least that is fetched of a table.
CHUNK = 16 * 1024
#: The most chunks that are fetched ahead of a scan.
_AHEAD = 512


@dataclass(frozen=True)
class Part:
    """A part of a file: its number, and where it begins."""

    number: int
    offset: int
    ref: BlobRef

    def overlaps(self, start: int, end: int) -> bool:
        return self.offset < end and start < self.offset + self.ref.size


@dataclass
class Table:
    """A table file on this machine. ``here``: one byte for each chunk of its data, 1 if it was written."""

    file: FileIndex
    tail: Tail
    local: SparseFile
    here: bytearray
    has_tail: bool = False
    #: The tail that somebody fetches now.
    coming_tail: Future[None] | None = None
    #: Held to write to it by need. ``coming``: how much the fill has written of the parts that it is writing.
    #: ``written``: those to which a read may have written after the fill. Nothing is written to a verified part.
    lock: threading.Lock = field(default_factory=threading.Lock)
    coming: dict[int, Counter] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    is_whole: bool = False
    #: How often something in it was missing.
    faults: int = 0
    #: The chunk after those that were fetched last, and how many they were.
    next: int = 0
    run: int = 0

    def __post_init__(self) -> None:
        offsets = accumulate((part.size for part in self.file.parts), initial=0)
        self.parts = [Part(number, *at) for number, at in enumerate(zip(offsets, self.file.parts, strict=False))]

    @property
    def waiting(self) -> list[Part]:
        """The parts that are not verified."""
        return [part for part in self.parts if part.number not in self.verified]

    def missing(self, start: int, end: int) -> list[int]:
        """The chunks of a range of bytes that were not written."""
        stop = (min(end, self.tail.offset) + CHUNK - 1) // CHUNK
        return [chunk for chunk in range(start // CHUNK, stop) if not self.here[chunk]]

    def run_to(self, missing: list[int]) -> int:
        """The chunk before which to stop when these are fetched: a scan gets twice as much with each request."""
        start, stop = missing[0], missing[-1] + 1
        self.run = min(2 * self.run, _AHEAD) if start == self.next else 1
        while stop < min(start + self.run, len(self.here)) and not self.here[stop]:
            stop += 1
        self.next = stop
        return stop

    def is_written(self, start: int, end: int) -> bool:
        """Whether the fill has written a range of bytes. They may be of a part that it has not verified yet."""
        with self.lock:
            written = {number: counter.value for number, counter in self.coming.items()}
        return all(
            part.number in self.verified
            or min(end, part.offset + part.ref.size) <= part.offset + written.get(part.number, 0)
            for part in self.parts
            if part.overlaps(start, end)
        )

    @contextmanager
    def filled(self, part: Part) -> Iterator[Counter]:
        """A block that writes a part from its beginning on. Yields what counts its bytes after it has written them."""
        with self.lock:
            self.written.discard(part.number)
            coming = self.coming[part.number] = Counter()
        try:
            yield coming
        finally:
            with self.lock:
                if self.coming.get(part.number) is coming:  # a read that needs all parts may write the same one
                    del self.coming[part.number]

    def put(self, start: int, data: memoryview) -> None:
        """Write what a read needs to parts that are not verified."""
        for part in self.parts:
            first, after = max(part.offset, start), min(part.offset + part.ref.size, start + len(data))
            if first >= after or part.number in self.verified:
                continue
            self.local.put(first, data[first - start : after - start])
            coming = self.coming.get(part.number)
            if coming is None or first < part.offset + coming.value + PIECE:  # otherwise the fill writes over it
                self.written.add(part.number)

    def is_verified(self, start: int, end: int) -> bool:
        """Whether all parts of a range of bytes are verified."""
        return all(part.number in self.verified for part in self.parts if part.overlaps(start, end))
