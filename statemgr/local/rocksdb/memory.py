"""The memory that all RocksDB stores of the process share: one block cache that memtables are charged to.

Blocks, indexes, filters and memtables count against one budget. The limit is soft: blocks that are pinned at a moment
may exceed it. Touches only memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rocksdict import Cache, WriteBufferManager

from statemgr.config.table import lookup


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
            # no stall: a writer that waits for the flush of another store could wait for itself
            _shared = SharedMemory(
                cache, WriteBufferManager.new_write_buffer_manager_with_cache(budget // 2, False, cache)
            )
        else:
            _shared.cache.set_capacity(budget)
            _shared.memtables.set_buffer_size(budget // 2)


def shared_memory() -> SharedMemory:
    """The shared memory, with the default budget if nobody has set one."""
    if _shared is None:
        use_memory(int(str(lookup("state.memory.bytes").default)))
    assert _shared is not None
    return _shared
