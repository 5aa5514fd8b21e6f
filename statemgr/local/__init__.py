"""Floor 2: local stores and the directories that they are in. The disk and the clock are touched here alone."""

from statemgr.local.durable import hash_file
from statemgr.local.rocksdb_memory import use_memory
from statemgr.local.stores import bulk_writer, open_snapshot, open_store
from statemgr.local.trees import cloned, unshare

__all__ = ["bulk_writer", "cloned", "hash_file", "open_snapshot", "open_store", "unshare", "use_memory"]
