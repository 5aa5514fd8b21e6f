"""The change segment as docs/format.md has it, read by a reader that shares no code with the product."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash
import zstandard

from statemgr.model import segment
from statemgr.model.commit import Change
from statemgr.model.segment import encode_segment


def read(data: bytes) -> list[tuple[int, bytes, bytes | None]]:
    """(sequence number, key, value or None for a delete) of every change. Raises: ValueError, struct.error."""
    if xxhash.xxh3_128(data[:-16]).digest() != data[-16:]:
        raise ValueError("the hash of the whole is wrong")
    if data[:4] != b"SMCS" or data[4] not in (1, 2):
        raise ValueError("not a segment")
    number, at = (struct.unpack_from("<Q", data, 5)[0], 13) if data[4] == 2 else (0, 5)
    found: list[tuple[int, bytes, bytes | None]] = []
    blocks = 0
    while data[at] == 1:
        header = data[at : at + 13]
        raw_size, frame_size, count = struct.unpack("<III", header[1:])
        frame = data[at + 21 : at + 21 + frame_size]
        if xxhash.xxh3_64(struct.pack("<Q", blocks) + header + frame).digest() != data[at + 13 : at + 21]:
            raise ValueError(f"the hash of block {blocks} is wrong")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=raw_size)
        if len(raw) != raw_size:
            raise ValueError("a block has another size")
        position = 0
        for _ in range(count):
            key_size, value_size = struct.unpack_from("<II", raw, position)
            position += 8
            key, position = raw[position : position + key_size], position + key_size
            value = None if value_size == 0xFFFFFFFF else raw[position : position + value_size]
            position += 0 if value is None else value_size
            found.append((number + len(found), key, value))
        if position != raw_size:
            raise ValueError("a block has other changes")
        at, blocks = at + 21 + frame_size, blocks + 1
    if data[at:-16] != struct.pack("<BIQ", 0, blocks, len(found)):
        raise ValueError("the end mark is wrong")
    return found


@pytest.mark.parametrize("count", [0, 1, 500])
def test_an_independent_reader_reads_what_is_written(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """B10: numbers, keys, values and deletes are where the documentation says, over several blocks."""
    monkeypatch.setattr(segment, "BLOCK_SIZE", 4000)
    chance = random.Random(count)
    changes: list[Change] = [
        (chance.randbytes(chance.randrange(20)), None if chance.random() < 0.2 else chance.randbytes(100))
        for _ in range(count)
    ]
    data = encode_segment(changes, first=7_000)
    assert read(data) == [(7_000 + n, key, value) for n, (key, value) in enumerate(changes)]
    for cut in (1, 17, len(data) // 2):
        with pytest.raises((ValueError, struct.error)):
            read(data[:-cut])
