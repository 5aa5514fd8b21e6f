"""Change segments: the puts and deletes of consecutive sequence numbers, checksummed and compressed. Pure.

::

    header  "SMCS" · version (1 byte, 4) · body (1 byte) · sequence number of the first change u64
    block*  01 · raw size u32 · compressed size u32 · changes u32 · XXH3-64 · one zstandard frame
    end     00 · number of blocks u32 · number of changes u64 · XXH3-128

Integers are little-endian, hashes canonical (big-endian). A block's hash covers the block's number (u64, from 0), its
13 bytes of tag and sizes, and the frame; the hash at the end covers every byte before it. Nothing may follow the end.

A segment has one of two bodies:

- ``00``, records: the raw content of a block is whole changes, in order: key size u32 · value size u32 (``FFFFFFFF``:
  delete) · key · value.
- ``01``, a table: the raw contents of all blocks but the first, joined, are one RocksDB table file with the newest
  change of each key. The first block lists the keys that the table deletes, because RocksDB does not tell them: key
  size u32 · key. The blocks have 0 changes each. The number at the end says how many changes the table stands for; it
  has as many entries or fewer.

Blocks are cut at :data:`BLOCK_SIZE` raw bytes, so both directions hold one block in memory. A block is larger only if a
single change is. No block may be larger than a change of the largest size.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import BinaryIO

import xxhash
import zstandard

from statemgr.errors import ANOTHER_COPY, CorruptBlob, InvalidError
from statemgr.model.commit import Change
from statemgr.model.hashing import HASH_SIZE, hasher

MAGIC = b"SMCS\x04"
#: Raw bytes after which a block is closed.
BLOCK_SIZE = 1024 * 1024
#: Largest key and largest value, in bytes.
MAX_KEY_SIZE = MAX_VALUE_SIZE = 64 * 1024 * 1024
_HEADER = struct.Struct("<5sBQ")
_CHANGE = struct.Struct("<II")
_KEY = struct.Struct("<I")
_BLOCK = struct.Struct("<BIII")
_END = struct.Struct("<BIQ")
_DELETE = 0xFFFFFFFF
_MAX_RAW = BLOCK_SIZE + _CHANGE.size + MAX_KEY_SIZE + MAX_VALUE_SIZE
#: An upper bound for the size of a frame: zstandard's own for incompressible input is lower.
_MAX_COMPRESSED = _MAX_RAW + _MAX_RAW // 128 + 1024
_READ_SIZE = 1024 * 1024


class Body(IntEnum):
    """What the blocks of a segment hold."""

    RECORDS = 0
    TABLE = 1


def write_segment(changes: Iterable[Change], sink: BinaryIO, first: int = 0) -> None:
    """Write a segment of all changes as records, in order and numbered from ``first`` on.

    Raises: InvalidError for a key or value above 64 MiB.
    """
    writer = _Writer(sink, Body.RECORDS, first)
    pieces: list[bytes] = []
    size = count = 0
    for key, value in changes:
        value_size = _DELETE if value is None else len(value)
        if len(key) > MAX_KEY_SIZE or (value is not None and value_size > MAX_VALUE_SIZE):
            raise InvalidError(f"a key or value is larger than {MAX_KEY_SIZE} bytes")
        pieces.append(_CHANGE.pack(len(key), value_size))
        pieces.append(key)
        size += _CHANGE.size + len(key)
        if value is not None:
            pieces.append(value)
            size += value_size
        count += 1
        if size >= BLOCK_SIZE:
            writer.block(b"".join(pieces), count)
            pieces.clear()
            size = count = 0
    if count:
        writer.block(b"".join(pieces), count)
    writer.end()


def encode_segment(changes: Iterable[Change], first: int = 0) -> bytes:
    """A segment as bytes, for changes that fit in memory."""
    sink = io.BytesIO()
    write_segment(changes, sink, first)
    return sink.getvalue()


def write_table_segment(
    table: BinaryIO, changes: int, sink: BinaryIO, first: int, deleted: Sequence[bytes] = ()
) -> None:
    """Write a segment whose body is a table file, which stands for ``changes`` changes numbered from ``first`` on.

    ``deleted``: the keys that the table deletes.
    """
    writer = _Writer(sink, Body.TABLE, first)
    writer.block(b"".join(piece for key in deleted for piece in (_KEY.pack(len(key)), key)), 0)
    while piece := table.read(BLOCK_SIZE):
        writer.block(piece, 0)
    writer.end(changes)


def is_table(source: BinaryIO) -> bool:
    """Whether a segment says that its body is a table. Reads the header of a seekable file and goes back to it."""
    header = source.read(_HEADER.size)
    source.seek(-len(header), io.SEEK_CUR)
    return header[len(MAGIC) : len(MAGIC) + 1] == bytes([Body.TABLE])


def read_table(source: BinaryIO, sink: BinaryIO, first: int, end: int, blob_id: str | None = None) -> list[bytes]:
    """Write the table file of a segment to ``sink``. The table must stand for the changes ``first`` to ``end`` - 1.

    Returns: the keys that the table deletes.

    The file may be used only after this has returned: the last check is at the segment's end. Whoever ingests the
    table applies all of it, although a store may already have the changes below some number between ``first`` and
    ``end``. This is safe, because a put or delete does not depend on the value before it. A key that the table has gets
    its newest value below ``end``. For any other key there is no change from ``first`` to ``end`` - 1, so the store
    already has its newest value below ``end``. A store that also has some changes from ``end`` on (a background
    snapshot may) gets them again from the segments that follow.

    Raises: CorruptBlob naming the blob, for any byte that differs from what was written, and for other changes.
    """
    deleted: list[bytes] | None = None
    for _, _, raw in _blocks(source, blob_id, Body.TABLE, first, end - first):
        if deleted is None:
            deleted = list(_keys(raw, blob_id))
        else:
            sink.write(raw)
    if deleted is None:
        raise _corrupt("it does not list the keys that its table deletes", blob_id)
    return deleted


def read_segment(source: BinaryIO, blob_id: str | None = None) -> Iterator[Change]:
    """Yield the changes of a segment of records in order, holding one block in memory.

    Each block is verified before its changes are yielded. Whether the segment is complete is known only at its end: the
    last step of the iterator may raise, and the changes before it are then only a part. A caller that cannot undo what
    it has applied calls :func:`verify_segment` first.

    Raises: CorruptBlob naming the blob, for any byte that differs from what was written, and for a table.
    """
    for _, count, raw in _blocks(source, blob_id, Body.RECORDS):
        yield from _changes(raw, count, blob_id)


def read_range(source: BinaryIO, first: int, end: int, after: int, blob_id: str | None = None) -> Iterator[Change]:
    """Yield the changes from the number ``after`` on. The segment must have the changes ``first`` to ``end`` - 1.

    Otherwise it is like :func:`read_segment`. Raises: CorruptBlob, also when the segment has other changes.
    """
    found = first
    for number, count, raw in _blocks(source, blob_id, Body.RECORDS, first):
        found = number + count
        if found > after:
            yield from islice(_changes(raw, count, blob_id), max(after - number, 0), None)
    if found != end:
        raise _corrupt(f"it ends before change {found}, not before {end}", blob_id)


def verify_segment(source: BinaryIO, blob_id: str | None = None) -> int:
    """Read a segment to its end and return how many changes it has. Raises: CorruptBlob."""
    return sum(1 for _ in read_segment(source, blob_id))


class _Writer:
    """Frames blocks and counts them."""

    def __init__(self, sink: BinaryIO, body: Body, first: int) -> None:
        self._sink = sink
        self._hash = hasher()
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
        self._blocks = 0
        self._changes = 0
        self._write(_HEADER.pack(MAGIC, body, first))

    def block(self, raw: bytes, count: int) -> None:
        frame = self._compressor.compress(raw)
        header = _BLOCK.pack(1, len(raw), len(frame), count)
        self._write(header)
        self._write(_block_hash(self._blocks, header, frame))
        self._write(frame)
        self._blocks += 1
        self._changes += count

    def end(self, changes: int | None = None) -> None:
        """``changes``: the number for a table, whose blocks have no count."""
        self._write(_END.pack(0, self._blocks, self._changes if changes is None else changes))
        self._sink.write(self._hash.digest())

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._sink.write(data)


def _blocks(
    source: BinaryIO, blob_id: str | None, body: Body, expected_first: int | None = None, of_table: int = 0
) -> Iterator[tuple[int, int, bytes]]:
    """Each block's first sequence number, number of changes and raw content, verified. The iterator ends only at an end
    mark that matches the blocks; of a table, at one that says ``of_table`` changes."""
    whole = hasher()

    def take(size: int) -> bytes:
        data = _read_exactly(source, size, blob_id)
        whole.update(data)
        return data

    magic, found, first = _HEADER.unpack(take(_HEADER.size))
    if magic != MAGIC:
        raise _corrupt("it is not a change segment of a known version", blob_id)
    if found != body:
        raise _corrupt(f"its body is of kind {found}, not {body}", blob_id)
    if expected_first not in (None, first):
        raise _corrupt(f"it begins with change {first}, not {expected_first}", blob_id)
    decompressor = zstandard.ZstdDecompressor()
    blocks, changes = 0, of_table
    while (tag := take(1)) == b"\x01":
        header = tag + take(_BLOCK.size - 1)
        _, raw_size, frame_size, count = _BLOCK.unpack(header)
        if raw_size > _MAX_RAW or frame_size > _MAX_COMPRESSED or count * _CHANGE.size > raw_size:
            raise _corrupt(f"block {blocks} declares absurd sizes", blob_id)
        if (count == 0) != (body is Body.TABLE):
            raise _corrupt(f"block {blocks} declares {count} changes", blob_id)
        expected = take(8)
        frame = take(frame_size)
        if _block_hash(blocks, header, frame) != expected:
            raise _corrupt(f"block {blocks} does not have its checksum", blob_id)
        yield first + changes, count, _decompress(decompressor, frame, raw_size, blob_id)
        blocks += 1
        changes += count
    end = tag + take(_END.size - 1)
    expected_hash = whole.digest()
    if end != _END.pack(0, blocks, changes) or _read_exactly(source, HASH_SIZE, blob_id) != expected_hash:
        raise _corrupt(f"its end does not agree with its {blocks} blocks of {changes} changes", blob_id)
    if source.read(1):
        raise _corrupt("bytes follow its end", blob_id)


def _decompress(decompressor: zstandard.ZstdDecompressor, frame: bytes, raw_size: int, blob_id: str | None) -> bytes:
    """The frame's content. The size that it declares itself is what would be allocated: checked first."""
    try:
        if zstandard.get_frame_parameters(frame).content_size != raw_size:
            raise _corrupt("a compressed frame is not of the declared size", blob_id)
        raw = decompressor.decompress(frame, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _corrupt(f"a block cannot be decompressed: {error}", blob_id) from error
    if len(raw) != raw_size:
        raise _corrupt("a block is not of the declared size", blob_id)
    return raw


def _changes(raw: bytes, count: int, blob_id: str | None) -> Iterator[Change]:
    position, end = 0, len(raw)
    for _ in range(count):
        if position + _CHANGE.size > end:
            raise _corrupt("a block is shorter than its changes", blob_id)
        key_size, value_size = _CHANGE.unpack_from(raw, position)
        value_start = position + _CHANGE.size + key_size
        position = value_start if value_size == _DELETE else value_start + value_size
        if position > end or key_size > MAX_KEY_SIZE or MAX_VALUE_SIZE < value_size != _DELETE:
            raise _corrupt("a change is larger than its block or the limits", blob_id)
        key = raw[value_start - key_size : value_start]
        yield key, None if value_size == _DELETE else raw[value_start:position]
    if position != end:
        raise _corrupt("a block is longer than its changes", blob_id)


def _keys(raw: bytes, blob_id: str | None) -> Iterator[bytes]:
    position = 0
    while position < len(raw):
        start = position + _KEY.size
        size = _KEY.unpack_from(raw, position)[0] if start <= len(raw) else 0
        position = start + size
        if position > len(raw):
            raise _corrupt("a block is shorter than its keys", blob_id)
        yield raw[start:position]


def _block_hash(number: int, header: bytes, frame: bytes) -> bytes:
    state = xxhash.xxh3_64(number.to_bytes(8, "little") + header)
    state.update(frame)
    return state.digest()


def _read_exactly(source: BinaryIO, size: int, blob_id: str | None) -> bytes:
    """Read ``size`` bytes in pieces, so that a declared size does not allocate memory by itself."""
    pieces: list[bytes] = []
    missing = size
    while missing:
        piece = source.read(min(missing, _READ_SIZE))
        if not piece:
            raise _corrupt(f"it ends {missing} bytes too early", blob_id)
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _corrupt(why: str, blob_id: str | None) -> CorruptBlob:
    return CorruptBlob(
        f"change segment refused: {why}",
        blob=blob_id,
        hint=ANOTHER_COPY,
    )
