"""Floor 2: local stores and the directories that they are in. The disk and the clock are touched here alone."""

from statemgr.local.rocksdb_memory import use_memory
from statemgr.local.stores import bulk_writer, open_snapshot, open_store

__all__ = ["bulk_writer", "open_snapshot", "open_store", "use_memory"]
