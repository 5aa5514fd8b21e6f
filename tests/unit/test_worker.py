"""worker: one piece of work at a time, errors that are reported once, work that is repeated, and a close that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from statemgr.config import JobConfig
from statemgr.errors import ClosedError, FencedError, UnavailableError
from statemgr.flows.worker import TRIES, Worker
from statemgr.local.executors import Threads
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock


class Hurried(ManualClock):
    """A clock whose waits are noted and over at once."""

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Note it."""
        self.sleeps.append(seconds)
        return False


@pytest.fixture
def clock() -> Hurried:
    """Time that nobody waits for."""
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
    """While something runs nothing else is started, and a result is taken once."""
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
    """To who takes the result; or to the log, when nobody waits, or has waited at the close."""
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
    """What has to wait is called again soon, what fails after a pause that doubles; a good call starts afresh."""
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
    """Pauses have a limit, and so have tries; the next time that it is woken is another chance."""
    worker.wake("looking", lambda: fail() is None)
    worker.wait(30)
    assert len(clock.sleeps) == TRIES - 1
    assert clock.sleeps[-1] == 60
    assert "no longer tried" in caplog.messages[-1]
    looked = []
    worker.wake("looking", lambda: not looked.append(1))
    worker.wait(30)
    assert looked == [1]


def test_who_is_fenced_is_done(worker: Worker[Any], clock: Hurried, caplog: pytest.LogCaptureFixture) -> None:
    """A fenced owner has nothing left to look after."""

    def fenced() -> bool:
        raise FencedError("another owner")

    worker.wake("looking", fenced)
    worker.wait(30)
    assert clock.sleeps == []
    assert [message for message in caplog.messages if "ended" in message]


def test_a_wake_in_between_is_not_lost(worker: Worker[Any]) -> None:
    """What happens while it looks is looked at afterwards."""
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
    """Work that asks whether to go on ends early, and nothing runs after the close."""
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
        """At once."""
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


class InlineExecutors(Threads):
    """No threads."""

    def worker(self, name: str, *, background: bool) -> Executor:
        """See the port."""
        return Inline()


def test_the_threads_are_injected(tmp_path: Path) -> None:
    """A simulation runs everything on one thread."""
    config = JobConfig.from_mapping({"job.name": "j", "state.dir": str(tmp_path)})
    services = open_services(config, executors=InlineExecutors())
    worker: Worker[str] = Worker(services, "test", "task Partition 0")
    worker.start(lambda: threading.current_thread().name)
    assert worker.take() == threading.current_thread().name
