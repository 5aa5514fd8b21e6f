"""Local adapters: stores, the directories that hold them, and the clock. Only this package touches them."""

from statemgr.local.durable import empty_directory, hash_file, remove
from statemgr.local.rocksdb.options import memory_in_use, use_memory
from statemgr.local.rocksdb.split import SortedTables, scan_in_batches, store_of_tables
from statemgr.local.rocksdb.table_format import TABLE_SUFFIX, tail_offsets
from statemgr.local.rocksdb.tables import is_readable, puts_of, write_table
from statemgr.local.stores import (
    ChangeWriter,
    bulk_writer,
    key_ranges,
    open_snapshot,
    open_store,
    snapshot_batches,
    type_of,
)
from statemgr.local.trees import cloned, unshare

__all__ = [
    "TABLE_SUFFIX",
    "ChangeWriter",
    "SortedTables",
    "bulk_writer",
    "cloned",
    "empty_directory",
    "hash_file",
    "is_readable",
    "key_ranges",
    "memory_in_use",
    "open_snapshot",
    "open_store",
    "puts_of",
    "remove",
    "scan_in_batches",
    "snapshot_batches",
    "store_of_tables",
    "tail_offsets",
    "type_of",
    "unshare",
    "use_memory",
    "write_table",
]
