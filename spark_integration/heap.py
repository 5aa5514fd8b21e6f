"""Spares Python's garbage collector the objects that a worker has anyway.

Spark's worker collects garbage after every task. Each time, it would look at a hundred thousand objects of imported
modules, and take 50 ms of processor time that the driver needs for its publish. So the objects that exist after the
first attempt are *frozen*: collections ignore them.

A frozen object that is part of a reference cycle and is dropped later would never be freed. So from time to time, and
as soon as the process has grown much, all objects are collected once, and those that are left are frozen again.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress

#: Seconds after which all objects are collected, and the growth of the process in bytes that makes it due earlier: a
#: share of what it had, and at least so much.
_SECONDS = 300.0
_SHARE, _LEAST = 0.25, 64 * 1024 * 1024


#: When all objects are collected again at the latest, and above how many bytes of memory earlier.
_due_s, _most = 0.0, 0


def spare_collections() -> None:
    """Call this after each attempt, on the thread that runs attempts."""
    global _due_s, _most
    if time.perf_counter() < _due_s and _resident() <= _most:
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    resident = _resident()
    _due_s, _most = time.perf_counter() + _SECONDS, resident + max(_LEAST, int(resident * _SHARE))


def _resident() -> int:
    """Bytes of memory of this process; 0 if the system does not say so."""
    with suppress(OSError), open("/proc/self/statm", "rb") as sizes:
        return int(sizes.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
