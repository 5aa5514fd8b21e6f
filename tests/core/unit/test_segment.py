"""segment: a cut or altered segment is an error and never a shorter history. Memory is bounded in both directions."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
import zstandard

from statemgr.errors import CorruptBlob, InvalidError
from statemgr.model import segment
from statemgr.model.commit import Change
from statemgr.model.hashing import content_hash
from statemgr.model.segment import (
    encode_segment,
    is_table,
    read_range,
    read_segment,
    read_table,
    verify_segment,
    write_segment,
    write_table_segment,
)

CHANGES: list[Change] = [(b"a", b"1"), (b"a", None), (b"a", b"2"), (b"", b""), (b"absent", None), (b"b", b"x" * 99)]

#: Number of bytes before the first block.
HEADER = 14


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few changes, so that a small segment has several."""
    monkeypatch.setattr(segment, "BLOCK_SIZE", 16)


def read(data: bytes) -> list[Change]:
    """Return all changes of a segment in memory."""
    return list(read_segment(io.BytesIO(data), "j/1/seg"))


def test_order_deletes_and_empty_values_are_kept() -> None:
    """B8: put, delete and put of one key, an empty key and value, and a delete of an absent key come back."""
    assert read(encode_segment(CHANGES)) == CHANGES


def test_empty_segment() -> None:
    """A commit without changes is a segment without blocks, and still has its end mark."""
    data = encode_segment([])
    assert read(data) == []
    assert verify_segment(io.BytesIO(data)) == 0
    assert data[:HEADER] == b"SMCS\x04\x00" + bytes(8)


@pytest.mark.usefixtures("small_blocks")
def test_cut_at_every_byte_is_refused() -> None:
    """B9, B10: any missing end is found, even if complete blocks are missing."""
    data = encode_segment(CHANGES)
    assert data.count(b"\x28\xb5\x2f\xfd") > 2
    for end in range(len(data)):
        with pytest.raises(CorruptBlob):
            read(data[:end])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_refused(mask: int) -> None:
    """B9: any changed byte is found, and the changes read before it are a correct prefix."""
    data = encode_segment(CHANGES)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= mask
        seen: list[Change] = []
        with pytest.raises(CorruptBlob) as caught:
            seen.extend(read_segment(io.BytesIO(damaged), "j/1/seg"))
        assert caught.value.where == {"blob": "j/1/seg"}
        assert seen == CHANGES[: len(seen)]
        with pytest.raises(CorruptBlob):
            verify_segment(io.BytesIO(damaged))


def blocks_of(data: bytes) -> list[bytes]:
    """Return the segment's complete blocks."""
    found, at = [], HEADER
    while data[at] == 1:
        size = 21 + struct.unpack_from("<I", data, at + 5)[0]
        found.append(data[at : at + size])
        at += size
    return found


@pytest.mark.usefixtures("small_blocks")
def test_dropped_swapped_and_repeated_blocks_are_refused() -> None:
    """Intact blocks that are missing, repeated or out of order are refused, even with a new end mark."""
    data = encode_segment(CHANGES)
    blocks = blocks_of(data)
    end = data[HEADER + sum(map(len, blocks)) : -16]
    assert sealed(blocks, end) == data
    for forged in (blocks[1:], blocks[:-1], blocks[::-1], [*blocks, blocks[-1]], [blocks[1], *blocks[1:]]):
        with pytest.raises(CorruptBlob):
            read(sealed(forged, end))


def sealed(blocks: list[bytes], end: bytes, body: int = 0) -> bytes:
    """Return a segment of these blocks with a correct hash."""
    data = b"SMCS\x04" + bytes([body]) + bytes(8) + b"".join(blocks) + end
    return data + content_hash(data)


def forged(raw_size: int, count: int, frame: bytes, body: int = 0) -> bytes:
    """Return a segment of one block with correct checksums, whatever it declares."""
    header = struct.pack("<BIII", 1, raw_size, len(frame), count)
    block = header + segment._block_hash(0, header, frame) + frame
    return sealed([block], struct.pack("<BIQ", 0, 1, count), body)


def raw(*changes: tuple[int, int, bytes]) -> bytes:
    """Return changes as they are in a block: key size, value size and the bytes of both."""
    return b"".join(struct.pack("<II", key, value) + data for key, value, data in changes)


ONE = raw((1, 1, b"kv"))


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (ONE, 0),
        (ONE, 2),
        (ONE + b"more", 1),
        (ONE[:5], 1),
        (raw((1, 5, b"kv")), 1),
        (raw((0xFFFFFFFF, 1, b"kv")), 1),
        (raw((1, 0xFFFFFFFE, b"kv")), 1),
    ],
)
def test_block_that_contradicts_itself_is_refused(content: bytes, count: int) -> None:
    """A block whose changes do not fill it exactly is refused, even with correct checksums."""
    with pytest.raises(CorruptBlob):
        read(forged(len(content), count, zstandard.compress(content)))
    assert read(forged(len(ONE), 1, zstandard.compress(ONE))) == [(b"k", b"v")]


def test_unknown_version_is_refused() -> None:
    """A segment of another version is refused."""
    data = encode_segment(CHANGES)
    for version in (1, 2, 3, 5):
        with pytest.raises(CorruptBlob, match="known version"):
            read(data[:4] + bytes([version]) + data[5:])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("after", range(95, 110))
def test_changes_after_a_sequence_number(after: int) -> None:
    """A read of a range returns the changes from a number on, wherever blocks end."""
    data = encode_segment(CHANGES, first=100)
    found = list(read_range(io.BytesIO(data), 100, 100 + len(CHANGES), after))
    assert found == CHANGES[max(after - 100, 0) :]


@pytest.mark.parametrize(("first", "end"), [(99, 106), (100, 105), (100, 107), (0, 6)])
def test_other_numbers_than_expected_are_refused(first: int, end: int) -> None:
    """A segment whose numbers differ from those expected is refused."""
    with pytest.raises(CorruptBlob):
        list(read_range(io.BytesIO(encode_segment(CHANGES, first=100)), first, end, 0))


def test_decompression_bomb_is_refused_before_it_is_allocated() -> None:
    """Frames and blocks that declare too much, or contradict each other, are refused without taking memory."""
    bomb = zstandard.compress(bytes(64 * 1024 * 1024))
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(ONE)
    tracemalloc.start()
    try:
        for raw_size, frame in ((8, bomb), (0xFFFFFFFF, bomb), (len(ONE), streamed), (len(ONE), bomb[:-9])):
            with pytest.raises(CorruptBlob):
                read(forged(raw_size, 1, frame))
        with pytest.raises(CorruptBlob):
            read(b"SMCS\x04" + bytes(9) + struct.pack("<BIII", 1, 100 << 20, 100 << 20, 1) + bytes(8) + b"short")
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_large_keys_and_values() -> None:
    """The largest key and value survive a round trip. One byte more is refused."""
    largest = bytes(segment.MAX_VALUE_SIZE)
    assert read(encode_segment([(largest, largest), (b"k", b"v")])) == [(largest, largest), (b"k", b"v")]
    for change in ((largest + b"x", None), (b"k", largest + b"x")):
        with pytest.raises(InvalidError):
            encode_segment([change])


class ShortReads(io.RawIOBase):
    """A source that returns a few bytes at a time, as sockets do."""

    def __init__(self, data: bytes) -> None:
        self._source = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        """Return at most 7 bytes."""
        return self._source.read(min(size, 7) if size >= 0 else 7)


def test_short_reads_are_put_together() -> None:
    """A source may return less than requested before its end."""
    assert list(read_segment(ShortReads(encode_segment(CHANGES)))) == CHANGES  # type: ignore[arg-type]


def test_memory_is_bounded_by_a_block(tmp_path: object) -> None:
    """Writing and reading 64 MB of changes takes the memory of about one block."""
    numbers = random.Random(1)

    def many() -> Iterator[Change]:
        for n in range(64_000):
            yield n.to_bytes(8, "big"), numbers.randbytes(1000)

    path = f"{tmp_path}/segment"
    tracemalloc.start()
    try:
        with open(path, "wb") as sink:
            write_segment(many(), sink)
        with open(path, "rb") as source:
            assert verify_segment(source) == 64_000
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
    finally:
        tracemalloc.stop()


#: Stands for a table file, whose content the codec does not parse.
TABLE = b"key and value, " * 5 + b"footer"


#: The keys that the table deletes, according to the segment.
DELETED = [b"", b"a key", b"z" * 300]


def of_table(table: bytes, changes: int = 7, first: int = 100) -> bytes:
    """Return a segment whose body is a table."""
    sink = io.BytesIO()
    write_table_segment(io.BytesIO(table), changes, sink, first, DELETED)
    return sink.getvalue()


def table_in(data: bytes, first: int = 100, end: int = 107) -> bytes:
    """Return the table in a segment."""
    sink = io.BytesIO()
    assert read_table(io.BytesIO(data), sink, first, end, "j/1/seg") == DELETED
    return sink.getvalue()


@pytest.mark.usefixtures("small_blocks")
def test_a_table_comes_back_byte_for_byte() -> None:
    """The table's file is cut into blocks and joined again, and the header marks it as a table."""
    data = of_table(TABLE)
    assert data.count(b"\x28\xb5\x2f\xfd") > 2
    assert table_in(data) == TABLE
    source = io.BytesIO(data)
    assert is_table(source)
    assert source.tell() == 0
    for other in (encode_segment(CHANGES), b"", b"SMCS\x04"):
        assert not is_table(io.BytesIO(other))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_of_a_table_is_refused(mask: int) -> None:
    """B9: a changed byte anywhere in the header, the blocks or the end is found, so a damaged table is never used."""
    data = of_table(TABLE)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= mask
        with pytest.raises(CorruptBlob) as caught:
            table_in(bytes(damaged))
        assert caught.value.where == {"blob": "j/1/seg"}


@pytest.mark.usefixtures("small_blocks")
def test_a_table_that_is_cut_or_followed_by_bytes_is_refused() -> None:
    """B9, B10: a missing end and additional bytes are found."""
    data = of_table(TABLE)
    for wrong in (*(data[:end] for end in range(len(data))), data + b"x"):
        with pytest.raises(CorruptBlob):
            table_in(wrong)


@pytest.mark.parametrize(("first", "end"), [(99, 106), (100, 106), (100, 108), (101, 107), (0, 7)])
def test_a_table_of_other_changes_than_expected_is_refused(first: int, end: int) -> None:
    """A table for other numbers than expected is refused."""
    with pytest.raises(CorruptBlob):
        table_in(of_table(TABLE), first, end)


@pytest.mark.parametrize("keys", [b"\x01", b"\x05\0\0\0abc", struct.pack("<I", 0xFFFFFFFF)])
def test_a_table_without_its_deleted_keys_is_refused(keys: bytes) -> None:
    """B9: a first block that ends within a key, or is missing, is refused."""
    with pytest.raises(CorruptBlob, match="shorter than its keys"):
        table_in(forged(len(keys), 0, zstandard.compress(keys), body=1), 0, 0)
    with pytest.raises(CorruptBlob, match="does not list the keys"):
        table_in(sealed([], struct.pack("<BIQ", 0, 0, 7), body=1), 0, 7)


def test_neither_body_passes_for_the_other() -> None:
    """A table cannot be read as changes, nor changes as a table, even with correct checksums."""
    with pytest.raises(CorruptBlob, match="kind 1"):
        read(of_table(TABLE))
    with pytest.raises(CorruptBlob, match="kind 0"):
        table_in(encode_segment(CHANGES, first=100), 100, 106)
    with pytest.raises(CorruptBlob, match="declares 0 changes"):
        read(forged(len(TABLE), 0, zstandard.compress(TABLE)))
    with pytest.raises(CorruptBlob, match="declares 1 changes"):
        table_in(forged(len(ONE), 1, zstandard.compress(ONE), body=1), 0, 1)
    with pytest.raises(CorruptBlob, match="kind 2"):
        read(forged(len(ONE), 1, zstandard.compress(ONE), body=2))
