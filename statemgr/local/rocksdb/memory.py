"""The memory that all RocksDB stores of the process share: one block cache, which memtables are charged to.

Filled blocks, indexes, filters and memtables count against one budget. It is kept softly: what is pinned at a moment
may exceed it. Touches nothing but memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rocksdict import Cache, WriteBufferManager

#: Bytes, where no job says otherwise.
DEFAULT_BUDGET = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What a store's options refer to."""

    cache: Cache
    memtables: WriteBufferManager


_lock = threading.Lock()
_shared: SharedMemory | None = None
_budget = 0


def use_memory(budget: int) -> None:
    """Let the process have ``budget`` bytes, unless it has more already. Open stores follow."""
    global _shared, _budget
    with _lock:
        if budget <= _budget:
            return
        _budget = budget
        if _shared is None:
            cache = Cache(budget)
            # no stall: a writer that waits for another store's flush could wait for itself
            _shared = SharedMemory(
                cache, WriteBufferManager.new_write_buffer_manager_with_cache(budget // 2, False, cache)
            )
        else:
            _shared.cache.set_capacity(budget)
            _shared.memtables.set_buffer_size(budget // 2)


def shared_memory() -> SharedMemory:
    """The memory of the process; with the default budget if nobody has said what it may have."""
    if _shared is None:
        use_memory(DEFAULT_BUDGET)
    assert _shared is not None
    return _shared
