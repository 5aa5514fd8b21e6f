"""The change segment as docs/format.md describes it, read by a reader that shares no code with the product."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import pytest
import xxhash
import zstandard
from rocksdict import Options, Rdict

from statemgr.local import write_table
from statemgr.model import segment
from statemgr.model.commit import Change
from statemgr.model.segment import encode_segment, write_table_segment

Found = list[tuple[int, bytes, bytes | None]]


def blocks_of(data: bytes, body: int) -> tuple[int, list[tuple[int, bytes]], int]:
    """Return the first sequence number, each block's number of changes and raw content, and the total at the end.

    Raises: ValueError, struct.error.
    """
    if xxhash.xxh3_128(data[:-16]).digest() != data[-16:]:
        raise ValueError("the hash of the whole is wrong")
    if data[:6] != b"SMCS\x04" + bytes([body]):
        raise ValueError("not a segment with this body")
    (first,), at = struct.unpack_from("<Q", data, 6), 14
    found: list[tuple[int, bytes]] = []
    while data[at] == 1:
        header = data[at : at + 13]
        raw_size, frame_size, count = struct.unpack("<III", header[1:])
        frame = data[at + 21 : at + 21 + frame_size]
        if xxhash.xxh3_64(struct.pack("<Q", len(found)) + header + frame).digest() != data[at + 13 : at + 21]:
            raise ValueError(f"the hash of block {len(found)} is wrong")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=raw_size)
        if len(raw) != raw_size:
            raise ValueError("a block has another size")
        found.append((count, raw))
        at += 21 + frame_size
    tag, blocks, changes = struct.unpack("<BIQ", data[at:-16])
    if tag or blocks != len(found):
        raise ValueError("the end mark is wrong")
    return first, found, changes


def read(data: bytes) -> Found:
    """Return the sequence number, key and value (None for a delete) of every change in a segment of records.

    Raises: ValueError, struct.error.
    """
    number, blocks, changes = blocks_of(data, 0)
    found: Found = []
    for count, raw in blocks:
        position = 0
        for _ in range(count):
            key_size, value_size = struct.unpack_from("<II", raw, position)
            position += 8
            key, position = raw[position : position + key_size], position + key_size
            value = None if value_size == 0xFFFFFFFF else raw[position : position + value_size]
            position += 0 if value is None else value_size
            found.append((number + len(found), key, value))
        if position != len(raw):
            raise ValueError("a block has other changes")
    if changes != len(found):
        raise ValueError("the end mark is wrong")
    return found


def applied(data: bytes, before: dict[bytes, bytes], directory: Path) -> tuple[int, int, dict[bytes, bytes]]:
    """Return a table segment's first sequence number and number of changes, and the state after it.

    Stock rocksdict ingests the table into a database with the state before it.
    """
    first, blocks, changes = blocks_of(data, 1)
    assert {count for count, _ in blocks} == {0}
    directory.mkdir()
    deleted, *table = [raw for _, raw in blocks]
    (directory / "1.sst").write_bytes(b"".join(table))
    database = Rdict(str(directory / "db"), Options(raw_mode=True))
    for key, value in before.items():
        database[key] = value
    database.ingest_external_file([str(directory / "1.sst")])
    after = dict(database.items())
    database.close()
    position = 0
    while position < len(deleted):
        (size,) = struct.unpack_from("<I", deleted, position)
        assert deleted[position + 4 : position + 4 + size] not in after
        position += 4 + size
    assert position == len(deleted) > 1000
    return first, changes, after  # type: ignore[return-value]


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


def test_an_independent_reader_applies_a_table(tmp_path: Path) -> None:
    """B8, B10: other software can ingest the table of a segment, with its puts, overwrites and deletes."""
    chance = random.Random(5)
    keys = [b"", *(chance.randbytes(8) for _ in range(3_000))]
    before = dict.fromkeys(keys[::2], b"before")
    changes: list[Change] = [
        (key, None if chance.random() < 0.3 else chance.randbytes(chance.choice([0, 900])))
        for key in chance.choices(keys, k=5_000)
    ]
    after = dict(before)
    for key, value in changes:
        if value is None:
            after.pop(key, None)
        else:
            after[key] = value
    deleted = write_table(tmp_path / "table.sst", changes, {})
    sink = io.BytesIO()
    with open(tmp_path / "table.sst", "rb") as table:
        write_table_segment(table, len(changes), sink, 7_000, deleted)
    data = sink.getvalue()
    assert applied(data, before, tmp_path / "other") == (7_000, 5_000, after)
    for cut in (1, 17, len(data) // 2):
        with pytest.raises((ValueError, struct.error)):
            applied(data[:-cut], before, tmp_path / "cut")
