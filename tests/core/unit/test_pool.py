"""The pool of transfers: fair turns, a limit of bytes and the first error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from statemgr.local.machine import SystemClock, Threads
from statemgr.transfer.pool import Pool

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
