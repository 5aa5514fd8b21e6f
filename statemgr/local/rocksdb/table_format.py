"""Where the parts of a RocksDB table file are. Reads only its footer and its list of meta blocks.

Source: RocksDB's block-based table format with a footer of version 6 (``table/format.cc``,
``table/block_based/block_builder.cc``), which rocksdict writes. Of any other version, nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from statemgr.local import durable
from statemgr.os_errors import disk_errors

#: The end of the name of a table file.
TABLE_SUFFIX = ".sst"
_FOOTER = 53
_MAGIC = bytes.fromhex("f7cff485b741e288")
_VERSION = 6
#: Bytes after a block, which do not count as its size: its compression and its checksum.
TRAILER = 5
#: Longer than any list of meta blocks: each one takes some fifty bytes.
_MOST = 64 * 1024


#: Meta blocks that a table is opened without, by the beginnings of their names.
_READ_LATER = (b"fullfilter.", b"filter.", b"partitionedfilter.", b"rocksdb.index")


def tail_offsets(table: Path) -> tuple[int, int] | None:
    """Where the blocks of data of a table end, and where its foot begins; None if the format is not known.

    Behind the data are the filter and the index, which RocksDB reads when it looks for a key. The foot has everything
    behind these: deletes of ranges, properties and footer, which RocksDB reads when it opens the table.

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
        blocks = {name: offset for name, offset in _blocks(block) if offset < begin}
    except IndexError:
        return None
    foot = min((offset for name, offset in blocks.items() if not name.startswith(_READ_LATER)), default=begin)
    return min(foot, *blocks.values()) if blocks else foot, foot


def _blocks(block: bytes) -> Iterator[tuple[bytes, int]]:
    """The names of the meta blocks, and where they begin. An entry has the length of the key's prefix that it shares
    with the one before, the lengths of its own part of the key and of its value, and both; the value begins with the
    block's offset."""
    restarts = int.from_bytes(block[-4:], "little")
    at, end, name = 0, len(block) - 4 - 4 * restarts, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        value, at = _varint(block, at)
        name = name[:shared] + block[at : at + own]
        yield name, _varint(block, at + own)[0]
        at += own + value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
