"""``commit-tail``: 100 writers commit at once to a store with a long tail, with and without hedged uploads.

The store is memory behind random latencies from a seeded distribution. Time runs :data:`_FASTER` times faster,
so that enough rounds fit for a 99.9th percentile. Everything else is as in a commit: the hedger with its defaults, a
separate blob name for each attempt, losers deleted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from statemgr.blobs.memory import MemoryBlobStore
from statemgr.local.machine import SystemClock, Threads
from statemgr.transfer.hedging import Hedger
from statemgr_tools.bench.measure import percentile, seconds
from statemgr_tools.bench.proxy import FLIP_158, Latencies
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, alone, compared
from statemgr_tools.bench.session import Session

_WRITERS = 100
_ROUNDS = 400
_WARM_UP = 3
_FASTER = 4
_LEAST_DELAY_S = 0.05
#: Maximum number of attempts at the same time: all writers, and the hedged ones.
_THREADS = 3 * _WRITERS
_SEGMENT = bytes(1000)


@case("commit-tail")
def commit_tail(session: Session) -> Iterator[Line]:
    """The time until the commits of all 100 writers are durable, and the cost of hedging in requests."""
    rounds = session.count(_ROUNDS, least=20)
    store = SlowStore(FLIP_158, _FASTER)
    hedger = Hedger(SystemClock(), Threads(), threads=_THREADS, least_delay=_LEAST_DELAY_S / _FASTER)
    plain: list[float] = []
    hedged: list[float] = []
    with ThreadPoolExecutor(2 * _WRITERS) as writers, ThreadPoolExecutor(2) as sides:
        for number in range(-_WARM_UP, rounds):
            if number % 100 == 0:
                session.report(f"commit-tail, round {number + 1} of {rounds}")
            # both at once: they only wait, and a disturbance of one also affects the other
            running = [sides.submit(_round, writers, store, number, side) for side in (None, hedger)]
            times = [future.result() for future in running]
            if number >= 0:
                plain.append(times[0])
                hedged.append(times[1])
    hedger.close()
    for share in (0.5, 0.99, 0.999):
        ours, theirs = (percentile(times, share) * _FASTER for times in (hedged, plain))
        unit = f"s until {_WRITERS} commits are durable, p{share * 100:g}, {rounds:,} rounds"
        target = Target("at most", 0.5) if share == 0.999 else None
        yield compared("commit-tail", ours, unit, "the same without hedging", theirs, target)
    extra = hedger.extra / hedger.first
    limit = Target("at most", 0.1, of="value")
    yield alone("commit-tail", extra, "extra requests for each first one", FLIP_158.name, limit)


class SlowStore:
    """An in-memory blob store whose writes take a random time, divided by ``faster``."""

    def __init__(self, latencies: Latencies, faster: float) -> None:
        self.blobs = MemoryBlobStore(SystemClock(), "bench-tail")
        self._latencies = latencies
        self._faster = faster
        self._clock = SystemClock()

    def put(self, name: str, attempt: int) -> str:
        """Write a blob. The latency follows from its name without the side, so both sides meet the same latencies."""
        blob_id = f"{name}-{attempt}"
        drawn = random.Random(blob_id.partition("/")[2])
        self._clock.sleep(self._latencies.sample(drawn) / self._faster)
        self.blobs.put(blob_id, _SEGMENT, ttl_days=None)
        return blob_id


def _round(writers: ThreadPoolExecutor, store: SlowStore, number: int, hedger: Hedger | None) -> float:
    """Start all writers together, and return the time until the last one is durable."""
    gate = threading.Barrier(_WRITERS + 1)
    written: list[str] = []

    def write(writer: int) -> None:
        name = f"{'plain' if hedger is None else 'hedged'}/{number}/{writer}"
        gate.wait()
        if hedger is None:
            written.append(store.put(name, 0))
        else:
            written.append(hedger.call(lambda attempt: store.put(name, attempt), lost=store.blobs.delete))

    running = [writers.submit(write, writer) for writer in range(_WRITERS)]

    def all_durable() -> None:
        gate.wait()
        for future in running:
            future.result()

    took = seconds(all_durable)
    for blob_id in written:
        store.blobs.delete(blob_id)
    return took
