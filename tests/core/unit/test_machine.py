"""The system's clock, IDs and threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from statemgr.config import JobConfig
from statemgr.errors import RetryableError
from statemgr.ids import CheckpointId
from statemgr.local import machine
from statemgr.local.machine import SystemClock, Threads, moment, processors, system_ids
from statemgr.wiring import open_services
from tests.few_threads import no_new_threads


def test_clock_moves_on() -> None:
    """A sleep takes at least as long as requested, and a negative one does not fail."""
    clock = SystemClock()
    before = clock.monotonic()
    clock.sleep(0.01)
    clock.sleep(-1)
    assert clock.monotonic() - before >= 0.01
    assert clock.time_ns() > 1_600_000_000 * 10**9


def test_only_deadlines_leap_when_work_is_given_up() -> None:
    """J2.21: after ``give_up`` every deadline has passed, but durations and stored moments are true."""
    clock = SystemClock()
    deadline, begun, then = clock.monotonic() + 24 * 3600, clock.elapsed(), moment(clock)
    clock.give_up()
    assert clock.monotonic() > deadline
    assert 0 <= clock.elapsed() - begun < 60
    assert 0 <= (moment(clock).seconds_since(then) or 0) < 60


def test_a_sleep_ends_when_work_is_given_up() -> None:
    """J2.21: what sleeps before its next try does not delay the end of the process."""
    clock = SystemClock()
    sleeping = threading.Thread(target=clock.sleep, args=(3600,), daemon=True)
    sleeping.start()
    clock.give_up()
    sleeping.join(30)
    assert not sleeping.is_alive()


def test_a_close_waits_for_no_try_in_the_background(tmp_path: Path) -> None:
    """J2.21: work that nobody waits for ends when the services are closed, and is not tried again until then."""
    services = open_services(JobConfig.from_mapping({"job.name": "j", "state.dir": str(tmp_path)}))
    waiting = services.executors.worker("check", background=True).submit(services.clock.sleep, 3600)
    closing = threading.Thread(target=services.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    waiting.result(30)


def test_a_pool_goes_on_with_the_threads_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of threads makes its calls slower. Without any thread a call fails, can be repeated, and does not run."""
    ran: list[str] = []
    go = threading.Event()
    with Threads().pool("test", 2) as pool:
        with no_new_threads(monkeypatch), pytest.raises(RetryableError, match="new thread"):
            pool.submit(ran.append, "refused")
        first = pool.submit(go.wait, 30)
        with no_new_threads(monkeypatch):
            second = pool.submit(ran.append, "second")
        assert not second.done()
        go.set()
        assert first.result()
        second.result(30)
    assert ran == ["second"]


def test_work_that_a_thread_has_taken_was_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread becomes free while another one cannot be started: the caller learns that its work runs."""
    executors, go, taken = Threads(), threading.Event(), threading.Event()
    executors.worker("first", background=False).submit(go.wait, 30)

    def refused(_: threading.Thread) -> None:
        go.set()
        assert taken.wait(30)
        raise RuntimeError("can't start new thread")

    second = executors.worker("second", background=False)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert second.submit(taken.set).result(30) is None
    executors.close()


def test_ids_are_unique() -> None:
    """IDs made in quick succession differ, and a checkpoint ID has the known form."""
    ids = system_ids()
    assert len({ids.attempt_id() for _ in range(1000)}) == 1000
    assert CheckpointId.parse(str(ids.checkpoint_id())).millis > 1_600_000_000_000


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("9900000 100000", 4),
        ("max 100000", 4),
        ("", 4),
    ],
)
def test_the_quota_of_a_container_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, count: int
) -> None:
    """A process with the time of two processors of many has two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    assert processors() == 4
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert processors() == count
