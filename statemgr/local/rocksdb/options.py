"""Makes RocksDB options from a store's configuration, and shares memory between all stores of the process.

``statemgr.config.keys`` has the names of the options. A missing one has its default.

All stores share one block cache that memtables are charged to: blocks, indexes, filters and memtables count against one
budget. The limit is soft: blocks that are in use may exceed it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompactionStyle,
    DBCompressionType,
    MemtableFactory,
    Options,
    WriteBufferManager,
    WriteOptions,
)

from statemgr.config.keys import ROCKSDB_DEFAULTS, lookup

_BULK_BUFFER = 64 * 1024 * 1024
_BULK_BUFFERS = 3
#: An option that only code sets: the store is open briefly, so it begins no compaction, which its close would
#: interrupt.
BRIEF = "opened.briefly"
#: Files in level 0 from which RocksDB delays and stops writes. A restore may leave 80 (statemgr.backends.blobs.tables);
#: with RocksDB's own limits of 20 and 36 the first write would wait for their compaction. If a store compacts later,
#: these limits are higher: otherwise writes would wait for a compaction that never begins.
_LEVEL0_SLOWDOWN, _LEVEL0_STOP = 120, 160
#: From this many files in level 0 when a store begins to compact, these limits are off until it has caught up: in
#: rocksdict, a write that waits keeps all threads of Python from running.
MUCH_BEHIND = 64
_LEVEL0_LIMITS = "level0_slowdown_writes_trigger", "level0_stop_writes_trigger"
_PENDING_LIMITS = "soft_pending_compaction_bytes_limit", "hard_pending_compaction_bytes_limit"
NO_LIMITS = {**dict.fromkeys(_LEVEL0_LIMITS, str(2**30)), **dict.fromkeys(_PENDING_LIMITS, "0")}
#: Bytes that a memtable takes at a time. With RocksDB's own 1 MiB, 56 stores with a few changes each would use up the
#: memtables of the default budget, and every write would flush.
_ARENA_BLOCK = 64 * 1024
#: Bytes from which RocksDB begins a new log, or a new manifest, which grows with the number of files. By default a log
#: never ends, and a manifest, which each snapshot uploads, ends at 1 GiB.
_LOG, _MANIFEST, _MANIFEST_FILE = 1024 * 1024, 2 * 1024 * 1024, 600


def limits(options: Mapping[str, object]) -> dict[str, str]:
    """The limits of :func:`normal`. Those of bytes that wait for compaction are RocksDB's own."""
    slowdown, stop = _level0_limits({**ROCKSDB_DEFAULTS, **options})
    return {
        **dict(zip(_LEVEL0_LIMITS, (str(slowdown), str(stop)), strict=True)),
        **dict(zip(_PENDING_LIMITS, (str(64 * 2**30), str(256 * 2**30)), strict=True)),
    }


def _level0_limits(value: Mapping[str, object]) -> tuple[int, int]:
    room = _LEVEL0_STOP - _LEVEL0_SLOWDOWN
    slowdown = max(_LEVEL0_SLOWDOWN, int(str(value["level0.compaction.trigger"])) + room)
    return slowdown, slowdown + room


def normal(options: Mapping[str, object], *, create: bool, files: int = 0) -> Options:
    """The options for normal reading and writing of a database that has about so many ``files``."""
    value = {**ROCKSDB_DEFAULTS, **options}

    def integer(name: str) -> int:
        return int(str(value[name]))

    made = _common(value, create=create)
    made.set_block_based_table_factory(_table(value))
    made.set_write_buffer_manager(shared_memory().memtables)
    made.set_write_buffer_size(integer("write.buffer.size.bytes"))
    made.set_arena_block_size(min(_ARENA_BLOCK, integer("write.buffer.size.bytes") // 8))
    made.set_max_write_buffer_number(integer("num.write.buffers"))
    made.set_target_file_size_base(integer("target.file.size.bytes"))
    made.set_level_zero_file_num_compaction_trigger(integer("level0.compaction.trigger"))
    slowdown, stop = _level0_limits(value)
    made.set_level_zero_slowdown_writes_trigger(slowdown)
    made.set_level_zero_stop_writes_trigger(stop)
    made.set_level_compaction_dynamic_level_bytes(True)
    made.set_disable_auto_compactions(_is_true(value.get(BRIEF, False)))
    made.set_max_manifest_file_size(max(_MANIFEST, files * _MANIFEST_FILE))
    made.set_optimize_filters_for_hits(_is_true(value["optimize.filters.for.hits"]))
    if _is_true(value["statistics"]):
        made.enable_statistics()
    if value["compaction.style"] == "universal":
        made.set_compaction_style(DBCompactionStyle.universal())
    else:
        made.set_compaction_style(DBCompactionStyle.level())
    return made


def bulk(options: Mapping[str, object]) -> Options:
    """The options of a bulk load: unsorted memtables, no compaction, few large files. It takes the memory of three
    memtables.

    Flush such a database before you read it, and reopen it with :func:`normal`.
    """
    value = {**ROCKSDB_DEFAULTS, **options}
    made = _common(value, create=True)
    made.set_block_based_table_factory(_table(value))
    made.prepare_for_bulk_load()
    made.set_memtable_factory(MemtableFactory.vector())
    # a vector memtable allows one writer at a time
    made.set_allow_concurrent_memtable_write(False)
    made.set_write_buffer_size(_BULK_BUFFER)
    made.set_max_write_buffer_number(_BULK_BUFFERS)
    return made


def uncompressed(options: Mapping[str, object]) -> Options:
    """As :func:`normal`, but without compression: the segment that contains the table compresses it, which saves
    more."""
    return normal({**options, "compression": "none"}, create=True)


def without_wal() -> WriteOptions:
    """Write options without a write-ahead log: a checkpoint has everything that is committed."""
    made = WriteOptions()
    made.disable_wal = True  # type: ignore[method-assign, assignment]
    return made


def _common(value: Mapping[str, object], *, create: bool) -> Options:
    made = Options(raw_mode=True)
    made.create_if_missing(create)
    made.set_compression_type(getattr(DBCompressionType, str(value["compression"]))())
    # by default RocksDB starts 16 threads at each opening
    made.set_max_file_opening_threads(min(os.cpu_count() or 1, 16))
    made.set_max_open_files(int(str(value["max.open.files"])))
    made.set_max_background_jobs(int(str(value["max.background.jobs"])))
    made.set_paranoid_checks(True)
    # stores may be opened and closed per micro-batch: no statistics of their work, one small log
    made.set_keep_log_file_num(1)
    made.set_max_log_file_size(_LOG)
    made.set_stats_dump_period_sec(0)
    made.set_stats_persist_period_sec(0)
    made.set_manifest_preallocation_size(64 * 1024)
    return made


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"


def _table(value: Mapping[str, object]) -> BlockBasedOptions:
    table = BlockBasedOptions()
    table.set_block_size(int(str(value["block.size.bytes"])))
    cache = int(str(value["block.cache.size.bytes"]))
    if cache:
        table.set_block_cache(shared_memory().cache if cache < 0 else Cache(cache))
        # otherwise indexes and filters grow with the state, outside any budget
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    else:
        table.disable_cache()
    bloom = int(str(value["bloom.filter.bits"]))
    if bloom:
        table.set_bloom_filter(bloom, False)
    return table


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The shared objects that a store's options refer to."""

    cache: Cache
    memtables: WriteBufferManager


_lock = threading.Lock()
_shared: SharedMemory | None = None
_budget = 0


def use_memory(budget: int) -> None:
    """Set the budget to ``budget`` bytes, unless it is already higher. Applies to open stores too."""
    global _shared, _budget
    with _lock:
        if budget <= _budget:
            return
        _budget = budget
        if _shared is None:
            cache = Cache(budget)
            # no stall: a writer would wait for another store to flush, which may itself wait for this writer
            _shared = SharedMemory(
                cache, WriteBufferManager.new_write_buffer_manager_with_cache(budget // 2, False, cache)
            )
        else:
            _shared.cache.set_capacity(budget)
            _shared.memtables.set_buffer_size(budget // 2)


def memory_in_use() -> tuple[int, int]:
    """Bytes that the stores of the process use of the shared memory, and the budget."""
    return (_shared.cache.get_usage() if _shared is not None else 0), _budget


def shared_memory() -> SharedMemory:
    """The shared memory, with the default budget if nobody has set one."""
    if _shared is None:
        use_memory(int(str(lookup("state.memory.bytes").default)))
    assert _shared is not None
    return _shared
