"""Floor 2: local stores and the directories that they are in. The disk and the clock are touched here alone."""

from statemgr.local.stores import bulk_writer, open_store

__all__ = ["bulk_writer", "open_store"]
