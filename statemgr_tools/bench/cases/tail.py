"""``commit-tail``: 100 writers commit at once to a store with a long tail, with hedged uploads and without.

The store is memory behind latencies that are drawn from a seeded distribution; time runs :data:`_FASTER` times faster,
so that enough rounds fit for a 99.9th percentile. Everything is what a commit uses: the hedger with its defaults, a
blob name of its own for each attempt, losers deleted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from statemgr.blobs.memory import MemoryBlobStore
from statemgr.local.clock import SystemClock
from statemgr.local.executors import Threads
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
#: Attempts that run at a time: all writers, and what is hedged.
_THREADS = 3 * _WRITERS
_SEGMENT = bytes(1000)


@case("commit-tail")
def commit_tail(session: Session) -> Iterator[Line]:
    """Time until all of 100 writers' commits are durable, and what hedging costs in requests."""
    rounds = session.count(_ROUNDS, least=20)
    store = SlowStore(FLIP_158, _FASTER)
    hedger = Hedger(SystemClock(), Threads(), threads=_THREADS, least_delay=_LEAST_DELAY_S / _FASTER)
    plain: list[float] = []
    hedged: list[float] = []
    with ThreadPoolExecutor(2 * _WRITERS) as writers, ThreadPoolExecutor(2) as sides:
        for number in range(-_WARM_UP, rounds):
            if number % 100 == 0:
                session.report(f"commit-tail, round {number + 1} of {rounds}")
            # both at once: they only wait, and what disturbs one disturbs the other
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
    """A blob store in memory whose writes take as long as drawn, ``faster`` times less."""

    def __init__(self, latencies: Latencies, faster: float) -> None:
        self.blobs = MemoryBlobStore(SystemClock(), "bench-tail")
        self._latencies = latencies
        self._faster = faster
        self._clock = SystemClock()

    def put(self, name: str, attempt: int) -> str:
        """Write a blob; the latency follows from its name without the side, so that both meet the same ones."""
        blob_id = f"{name}-{attempt}"
        drawn = random.Random(blob_id.partition("/")[2])
        self._clock.sleep(self._latencies.sample(drawn) / self._faster)
        self.blobs.put(blob_id, _SEGMENT, ttl_days=None)
        return blob_id


def _round(writers: ThreadPoolExecutor, store: SlowStore, number: int, hedger: Hedger | None) -> float:
    """All writers begin together; how long until the last is durable."""
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
