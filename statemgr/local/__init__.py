"""Floor 2: local stores and the directories that they are in. The disk and the clock are touched here alone."""

from statemgr.local.durable import hash_file, remove
from statemgr.local.rocksdb.memory import use_memory
from statemgr.local.stores import ChangeWriter, bulk_writer, open_snapshot, open_store
from statemgr.local.trees import cloned, unshare

__all__ = [
    "ChangeWriter",
    "bulk_writer",
    "cloned",
    "hash_file",
    "open_snapshot",
    "open_store",
    "remove",
    "unshare",
    "use_memory",
]
