"""A stopped broker's log segments on disk, for tests that simulate bit rot."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from statemgr_tools.dev.kafka import KafkaBroker

#: Bytes of a record batch before its checksum, which covers neither them nor itself: see Kafka's message format.
UNCOVERED = 17


@dataclass(frozen=True)
class Batch:
    """A record batch: its position in the segment's file, its size, and the offset of its first record."""

    start: int
    size: int
    offset: int


def segment(broker: KafkaBroker, topic: str, partition: int = 0) -> Path:
    """Return the file of a partition that has one segment."""
    (found,) = (broker.directory / "data" / f"{topic}-{partition}").glob("*.log")
    return found


def batches(data: bytes) -> list[Batch]:
    """Return the record batches of a segment, including control batches."""
    found, at = [], 0
    while at < len(data):
        offset, size = struct.unpack_from(">qi", data, at)
        if size <= 0:  # space that the broker has reserved
            break
        found.append(Batch(at, size + 12, offset))
        at += size + 12
    return found


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, counted from its start."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
