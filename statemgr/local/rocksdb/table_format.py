"""Where the parts of a RocksDB table file are. Reads only its footer and its list of meta blocks.

Source: RocksDB's block-based table format with a footer of version 6 (``table/format.cc``,
``table/block_based/block_builder.cc``), which rocksdict writes. Of any other version, nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from statemgr.local import durable
from statemgr.local.transfer_files import disk_errors

#: The end of the name of a table file.
TABLE_SUFFIX = ".sst"
_FOOTER = 53
_MAGIC = bytes.fromhex("f7cff485b741e288")
_VERSION = 6
#: Bytes after a block, which do not count as its size: its compression and its checksum.
TRAILER = 5
#: Longer than any list of meta blocks: each one takes some fifty bytes.
_MOST = 64 * 1024


def tail_offset(table: Path) -> int | None:
    """The end of the data blocks of a table, behind which are its meta blocks; None if the format is not known.

    Raises: OSError's typed errors.
    """
    with disk_errors(table), durable.open_file(table) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _FOOTER:
            return None
        file.seek(size - _FOOTER)
        footer = file.read(_FOOTER)
        version, length = int.from_bytes(footer[-12:-8], "little"), int.from_bytes(footer[13:17], "little")
        begin = size - _FOOTER - TRAILER - length
        if footer[-8:] != _MAGIC or version != _VERSION or length > _MOST or begin < 0:
            return None
        file.seek(begin)
        block = file.read(length)
    try:
        offsets = [offset for offset in _offsets(block) if offset < begin]
    except IndexError:
        return None
    return min(offsets, default=begin)


def _offsets(block: bytes) -> Iterator[int]:
    """Where the meta blocks begin. An entry has the length of the key's prefix that it shares with the one before, the
    lengths of its own part of the key and of its value, and both; the value begins with the block's offset."""
    restarts = int.from_bytes(block[-4:], "little")
    at, end = 0, len(block) - 4 - 4 * restarts
    while at < end:
        _, at = _varint(block, at)
        own, at = _varint(block, at)
        value, at = _varint(block, at)
        yield _varint(block, at + own)[0]
        at += own + value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
