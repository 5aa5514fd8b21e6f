"""The closed list of RocksDB options that a store may set, as ``stores.<name>.rocksdb.<option>``. Pure.

What is not here is decided by statemgr: anything else could change what a checkpoint holds.
First-in-first-out compaction, for one, would drop keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from statemgr.config.values import BOOLEAN, Kind, Value, choice, integer

_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class RocksDbOption:
    """One option: its name after ``rocksdb.``, kind, default and meaning."""

    name: str
    kind: Kind
    default: Value
    doc: str


ROCKSDB_OPTIONS: tuple[RocksDbOption, ...] = (
    RocksDbOption(
        name="compression",
        kind=choice("none", "snappy", "lz4", "zstd"),
        default="lz4",
        doc="Compression of table files.",
    ),
    RocksDbOption(
        name="compaction.style",
        kind=choice("level", "universal"),
        default="level",
        doc="How table files are merged.",
    ),
    RocksDbOption(
        name="write.buffer.size.bytes",
        kind=integer(64 * 1024, 4096 * _MEBIBYTE, "bytes"),
        default=16 * _MEBIBYTE,
        doc="Size of one memtable; at most half of `state.memory.bytes`.",
    ),
    RocksDbOption(
        name="num.write.buffers",
        kind=integer(1, 64),
        default=3,
        doc="Memtables before writers wait.",
    ),
    RocksDbOption(
        name="block.size.bytes",
        kind=integer(1024, 16 * _MEBIBYTE, "bytes"),
        default=4096,
        doc="Size of a block in a table file.",
    ),
    RocksDbOption(
        name="block.cache.size.bytes",
        kind=integer(-1, 1024 * 1024 * _MEBIBYTE, "bytes"),
        default=-1,
        doc="A block cache of this store's own, per task, beside `state.memory.bytes`; -1 shares the process's, "
        "0 is none.",
    ),
    RocksDbOption(
        name="bloom.filter.bits",
        kind=integer(0, 64),
        default=10,
        doc="Bits per key of the Bloom filter; 0 switches it off.",
    ),
    RocksDbOption(
        name="target.file.size.bytes",
        kind=integer(64 * 1024, 4096 * _MEBIBYTE, "bytes"),
        default=64 * _MEBIBYTE,
        doc="Size that table files are cut at.",
    ),
    RocksDbOption(
        name="level0.compaction.trigger",
        kind=integer(1, 1000),
        default=4,
        doc="Files in level 0 that start a compaction.",
    ),
    RocksDbOption(
        name="max.open.files",
        kind=integer(-1, 1_000_000),
        default=512,
        doc="Table files held open; -1 is all of them.",
    ),
    RocksDbOption(
        name="max.background.jobs",
        kind=integer(1, 64),
        default=2,
        doc="Threads that flush and compact, per store and task.",
    ),
    RocksDbOption(
        name="optimize.filters.for.hits",
        kind=BOOLEAN,
        default=False,
        doc="No Bloom filter on the last level: smaller files where most look-ups find their key.",
    ),
    RocksDbOption(
        name="statistics",
        kind=BOOLEAN,
        default=False,
        doc="RocksDB's own counters and latencies in `Store.statistics()`; counting costs some speed.",
    ),
)


def rocksdb_defaults() -> dict[str, Value]:
    """Every option at its default, by its name after ``rocksdb.``."""
    return {option.name: option.default for option in ROCKSDB_OPTIONS}
