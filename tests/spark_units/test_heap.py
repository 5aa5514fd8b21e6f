"""Workers spare the garbage collector what they have anyway, and free what a user's code drops."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Drops a cycle of 200 MB that was frozen, and then runs attempts until it is freed. The heap is one for a process.
_PROGRAM = """
import gc, sys, time, weakref
from spark_integration import heap

class Model:
    def __init__(self):
        self.data, self.itself = bytearray(b"x") * 200_000_000, self

held = Model()
heap.spare_collections()
gone = weakref.ref(held)
held = None
gc.collect()  # as Spark's worker does after each task
heap.spare_collections()
assert gone() is not None, "it was not frozen, so this test shows nothing"
before = heap._resident()
if sys.argv[1] == "memory":
    more = []
    for batch in range(100):
        more.append(bytearray(b"x") * 10_000_000)
        heap.spare_collections()
        if gone() is None:
            break
    assert batch < 10, batch
else:
    later = time.perf_counter() + 301
    time.perf_counter = lambda: later
    heap.spare_collections()
    assert heap._resident() < before - 150_000_000, (before, heap._resident())
assert gone() is None
frozen = gc.get_freeze_count()
assert frozen > 1_000, frozen
heap.spare_collections()
assert gc.get_freeze_count() == frozen, "each attempt collects everything"
"""


@pytest.mark.parametrize("reason", ["memory", "time"])
def test_what_was_frozen_and_is_dropped_later_is_freed(reason: str) -> None:
    """When the process has grown, and after some time."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, reason], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
