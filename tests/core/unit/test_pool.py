"""The pool of transfers: fair turns, a limit of bytes and the first error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from statemgr.errors import ClosedError
from statemgr.local.machine import SystemClock, Threads
from statemgr.transfer.pool import Mover, Movers, Pace, Pool
from tests.blob_faults import ManualClock
from tests.kafka_jobs import wait_until

LIMIT_S = 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool with one thread, which runs jobs one after the other."""
    made = Pool(SystemClock(), Threads(), 1, most_bytes=100)
    yield made
    made.close()


def test_batches_take_turns(pool: Pool) -> None:
    """Batches alternate, so that a huge one does not starve a small one."""
    order: list[str] = []
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        assert go.wait(LIMIT_S)

    with pool.batch() as huge, pool.batch() as small:
        huge.submit(first)
        assert started.wait(LIMIT_S)
        for _ in range(50):
            huge.submit(lambda: order.append("huge"))
        for _ in range(3):
            small.submit(lambda: order.append("small"))
        go.set()
    assert order[:6] == ["huge", "small"] * 3
    assert order.count("huge") == 50


def test_bytes_in_flight_are_bounded() -> None:
    """Invariant 13: jobs run together only while their sizes are within the limit. A larger job runs alone."""
    pool = Pool(SystemClock(), Threads(), 8, most_bytes=100)
    running: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def job(size: int) -> None:
        with lock:
            running.append(size)
            most.append(sum(running) if len(running) > 1 else 0)
        threading.Event().wait(0.002)
        with lock:
            running.remove(size)

    with pool.batch() as batch:
        for number in range(60):
            size = 150 if number % 10 == 9 else 40
            batch.submit(partial(job, size), size)
    pool.close()
    assert len(most) == 60
    assert max(most) == 80


def test_the_jobs_of_a_failed_batch_are_given_up(pool: Pool) -> None:
    """A30: the first error is raised and the jobs that wait are dropped. Other batches continue."""
    done: list[int] = []

    def fail() -> None:
        raise ValueError("the first")

    def failing_batch() -> None:
        with pool.batch() as batch:
            for number in range(20):
                batch.submit(fail if number == 3 else partial(done.append, number))

    with pool.batch() as other:
        with pytest.raises(ValueError, match="the first"):
            failing_batch()
        other.submit(lambda: done.append(100))
    assert done == [0, 1, 2, 100]


def test_a_close_ends_the_batches_of_other_threads(pool: Pool) -> None:
    """Their waiting jobs never run, so nobody waits for them, and no other job is taken."""
    started, go, done = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        started.set()
        assert go.wait(LIMIT_S)

    def transfer() -> None:
        with pool.batch() as batch:
            batch.submit(first)
            batch.submit(lambda: done.append(1))

    with ThreadPoolExecutor(2) as threads:
        transferring = threads.submit(transfer)
        assert started.wait(LIMIT_S)
        wait_until(lambda: bool(pool._turns))
        closing = threads.submit(pool.close)
        wait_until(lambda: pool._closed)
        go.set()
        closing.result(LIMIT_S)
        with pytest.raises(ClosedError, match="before the transfer had ended"):
            transferring.result(LIMIT_S)
    with pytest.raises(ClosedError):
        transfer()
    assert done == []


def test_a_wait_after_work_is_given_up_keeps_no_processor_busy() -> None:
    """Every deadline has passed, but whoever waits for a job that has not ended yet still waits."""
    clock, go, looks = SystemClock(), threading.Event(), list[int]()
    pool = Pool(clock, Threads(), 1, most_bytes=100)
    clock.give_up()

    def report() -> None:
        looks.append(1)
        if len(looks) > 5:
            go.set()

    began = clock.elapsed()
    with pool.batch(report) as batch:
        batch.submit(lambda: go.wait(LIMIT_S))
    pool.close()
    assert clock.elapsed() - began > 0.02


def read(clock: ManualClock, pace: Pace, seconds: float, *, alike: bool = True) -> int:
    """Read something that takes so long. Returns: how many jobs may run in the background then."""
    with pace.read(alike=alike):
        clock.now += seconds
    return pace.allowed()


def test_a_background_gives_way_while_reads_wait_behind_it() -> None:
    """It gets slower as long as reads take longer than the fastest, and faster again when they do not."""
    clock = ManualClock()
    pace = Pace(clock, 8)
    assert pace.allowed() == 8
    with pace.read(alike=True):
        assert pace.allowed() == 3
        clock.now += 0.02
    assert [read(clock, pace, 0.021) for _ in range(30)][-1] == 8
    assert [read(clock, pace, 0.04) for _ in range(8)] == [7, 6, 5, 4, 3, 3, 3, 3]
    assert read(clock, pace, 2.0, alike=False) == 3  # a read of much more says nothing
    clock.now += 0.9
    assert pace.allowed() == 3
    clock.now += 0.2
    assert pace.allowed() == 8


class PausingClock(ManualClock):
    """A clock on which each wait takes its whole time. ``waits``: how long."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Move the clock."""
        self.waits.append(seconds)
        self.now += seconds
        return False


def test_jobs_that_run_already_pause_between_two_pieces() -> None:
    """Those beyond what is allowed move little by little while somebody waits, and at full speed before and after."""
    clock = PausingClock()
    pace = Pace(clock, 8)
    with ExitStack() as jobs:
        give_way = [jobs.enter_context(pace.job()) for _ in range(8)]
        give_way[0]()
        assert not clock.waits
        with pace.read(alike=True):
            give_way[0]()
            give_way[1]()
        assert clock.waits == [0.2, 0.2]
        clock.now += 2.0
        give_way[0]()
        assert len(clock.waits) == 2
    with ExitStack() as jobs, pace.read(alike=True):
        for pause in [jobs.enter_context(pace.job()) for _ in range(3)]:
            pause()
    assert len(clock.waits) == 2


def test_no_more_jobs_begin_than_a_pace_allows() -> None:
    """A job of a batch with a pace waits in its caller, and takes no thread of the pool."""
    pool, pace = Pool(SystemClock(), Threads(), 8, most_bytes=1000), Pace(SystemClock(), 8)
    lock, running, most = threading.Lock(), list[int](), list[int]()

    def job(number: int) -> None:
        with lock:
            running.append(number)
            most.append(len(running))
        threading.Event().wait(0.01)
        with lock:
            running.remove(number)

    with pace.read(alike=True), pool.batch() as batch:
        for number in range(12):
            batch.submit(partial(job, number), pace=pace)
    pool.close()
    assert len(most) == 12
    assert max(most) <= 3


def test_what_has_arrived_is_moved_by_few_at_a_time() -> None:
    """A quick piece is followed by a wait for others, a slow one by none; the wait ends when another one is done."""
    clock = SystemClock()
    movers = Movers(clock, 1)
    first, second, ended = Mover(movers), Mover(movers), threading.Event()

    def move() -> None:
        with second:
            ended.set()

    move()
    ended.clear()
    with first:
        mover = threading.Thread(target=move)
        mover.start()
        assert not ended.wait(0.05)
    assert ended.wait(LIMIT_S)
    mover.join()
    clock = PausingClock()
    movers = Movers(clock, 1)
    slow = Mover(movers)
    for _ in range(2):
        with Mover(movers), slow:
            clock.now += 0.03
    assert not clock.waits


def test_a_mover_that_hangs_delays_the_others_and_does_not_stop_them() -> None:
    """A connection that sends nothing any more keeps nobody else from what has arrived."""
    clock = PausingClock()
    movers = Movers(clock, 1)
    quick = Mover(movers)
    with quick:
        pass
    with Mover(movers), quick:
        assert sum(clock.waits) == pytest.approx(0.2)
