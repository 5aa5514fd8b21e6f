"""worker: it does one piece of work at a time, reports errors once, repeats work, and waits for it on close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from statemgr.config import JobConfig
from statemgr.errors import ClosedError, FencedError, RetryableError, UnavailableError
from statemgr.flows.worker import TRIES, Worker
from statemgr.local.machine import Threads
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock
from tests.few_threads import no_new_threads


class Hurried(ManualClock):
    """A clock that records waits and ends them at once."""

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Record the wait."""
        self.sleeps.append(seconds)
        return False


@pytest.fixture
def clock() -> Hurried:
    """A clock on which waits take no time."""
    return Hurried()


@pytest.fixture(params=[False, True], ids=["pool", "background"])
def worker(tmp_path: Path, clock: Hurried, request: pytest.FixtureRequest) -> Iterator[Worker[Any]]:
    """A worker of either kind."""
    services = open_services(JobConfig.from_mapping({"job.name": "j", "state.dir": str(tmp_path)}), clock)
    worker: Worker[Any] = Worker(services, "test", "task Partition 0", background=request.param)
    yield worker
    worker.close()
    services.close()


def fail() -> None:
    """Work that fails."""
    raise UnavailableError("told to")


def test_one_piece_of_work_at_a_time(worker: Worker[Any]) -> None:
    """While work is running no other work starts, and a result can be taken once."""
    go_on = threading.Event()
    assert worker.start(lambda: go_on.wait(30)) is not None
    assert worker.busy
    assert worker.start(fail) is None
    assert not worker.attempt("more", fail)
    assert not worker.wait(0.01)
    go_on.set()
    assert worker.wait(30)
    assert worker.take() is True
    assert worker.take() is None


def test_an_error_is_reported_once(worker: Worker[Any], caplog: pytest.LogCaptureFixture) -> None:
    """The error goes to the caller that takes the result, or to the log if nobody takes it."""
    worker.start(fail)
    with pytest.raises(UnavailableError):
        worker.take()
    worker.start(fail)
    worker.wait()
    worker.forget()
    assert caplog.messages == []
    worker.attempt("storing changes", fail)
    worker.wait()
    assert caplog.messages.pop() == "task Partition 0: storing changes failed and will be tried again: told to"
    caplog.clear()
    worker.start(fail)
    worker.close("the last commit failed")
    assert caplog.messages == ["task Partition 0: the last commit failed: told to"]
    assert worker.start(fail) is None


def test_work_is_repeated_until_nothing_is_left_to_do(worker: Worker[Any], clock: Hurried) -> None:
    """Unfinished work runs again soon. Failed work runs after a pause that doubles until a call succeeds."""
    answers: Iterator[Callable[[], bool]] = iter(
        [lambda: False, lambda: fail() is None, lambda: fail() is None, lambda: False, lambda: fail() is None,
         lambda: True]
    )  # fmt: skip
    worker.wake("looking", lambda: next(answers)())
    worker.wait(30)
    assert clock.sleeps == [0.5, 0.5, 1.0, 0.5, 0.5]
    assert next(answers, None) is None


def test_work_that_keeps_failing_is_given_up(
    worker: Worker[Any], clock: Hurried, caplog: pytest.LogCaptureFixture
) -> None:
    """Pauses and tries have a limit. The next wake is a new chance."""
    worker.wake("looking", lambda: fail() is None)
    worker.wait(30)
    assert len(clock.sleeps) == TRIES - 1
    assert clock.sleeps[-1] == 60
    assert "times in a row" in caplog.messages[-1]
    looked = []
    worker.wake("looking", lambda: not looked.append(1))
    worker.wait(30)
    assert looked == [1]


def test_who_is_fenced_is_done(worker: Worker[Any], clock: Hurried, caplog: pytest.LogCaptureFixture) -> None:
    """A fenced owner has nothing left to do."""

    def fenced() -> bool:
        raise FencedError("another owner")

    worker.wake("looking", fenced)
    worker.wait(30)
    assert clock.sleeps == []
    assert [message for message in caplog.messages if "ended" in message]


def test_work_starts_when_there_are_threads_again(worker: Worker[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process under a limit of threads is not without its background work for good."""
    ran: list[str] = []
    with no_new_threads(monkeypatch):
        with pytest.raises(RetryableError, match="can't start new thread"):
            worker.start(lambda: ran.append("start"))
        assert not worker.attempt("trying", lambda: ran.append("attempt"))
        worker.wake("looking", lambda: not ran.append("wake"))
    worker.wake("looking", lambda: not ran.append("later"))
    worker.wait(30)
    worker.start(lambda: ran.append("started"))
    worker.wait(30)
    assert ran == ["later", "started"]


def test_work_that_a_close_breaks_off_has_not_failed(worker: Worker[Any], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing in the log says that it will be tried again."""

    def broken_off() -> bool:
        while not worker.closing:
            pass
        return fail() is None

    worker.wake("looking", broken_off)
    worker.close()
    assert caplog.messages == []


def test_a_wake_in_between_is_not_lost(worker: Worker[Any]) -> None:
    """A wake during a call causes another call afterwards."""
    looking, go_on, looks = threading.Event(), threading.Event(), []

    def look() -> bool:
        looks.append(1)
        looking.set()
        return go_on.wait(30)

    worker.wake("looking", look)
    assert looking.wait(30)
    worker.wake("looking", look)
    go_on.set()
    worker.wait(30)
    assert len(looks) == 2


def test_the_end_is_waited_for(worker: Worker[Any]) -> None:
    """Work that checks whether to go on ends early, and nothing runs after the close."""
    ended = []

    def work() -> None:
        try:
            while True:
                worker.go_on()
        except ClosedError:
            ended.append(1)
            raise

    worker.attempt("working", work)
    worker.close()
    assert ended == [1]
    assert not worker.pause(60)


class Inline(Executor):
    """Runs work where it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it at once."""
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


class InlineExecutors(Threads):
    """Executors without threads."""

    def worker(self, name: str, *, background: bool) -> Executor:
        """Return an inline executor."""
        return Inline()


def test_the_threads_are_injected(tmp_path: Path) -> None:
    """A simulation can run everything on one thread."""
    config = JobConfig.from_mapping({"job.name": "j", "state.dir": str(tmp_path)})
    services = open_services(config, executors=InlineExecutors())
    worker: Worker[str] = Worker(services, "test", "task Partition 0")
    worker.start(lambda: threading.current_thread().name)
    assert worker.take() == threading.current_thread().name
