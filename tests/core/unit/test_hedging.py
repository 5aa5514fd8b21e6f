"""Hedged calls: which attempt wins, what happens to the losers, the learned delay and the budget."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from statemgr.errors import UnavailableError
from statemgr.local.machine import Threads
from statemgr.transfer.hedging import Hedger
from tests.blob_faults import ManualClock
from tests.few_threads import no_new_threads
from tests.kafka_jobs import wait_until

LIMIT_S = 20


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock, so that the test decides which latencies are learned."""
    return ManualClock()


@pytest.fixture
def hedger(clock: ManualClock) -> Iterator[Hedger]:
    """A hedger that has learned that attempts take no time, so it hedges at once."""
    made = Hedger(clock, Threads(), threads=8, budget=1, least_samples=5, least_delay=0)
    for _ in range(5):
        made.call(lambda number: number)
    yield made
    made.close()


def waiting(event: threading.Event) -> None:
    """Wait, but not for ever."""
    assert event.wait(LIMIT_S)


def test_one_attempt_is_enough(clock: ManualClock) -> None:
    """A call is not hedged until enough latencies are known."""
    hedger = Hedger(clock, Threads(), threads=2, budget=1, least_samples=100, least_delay=0)
    assert [hedger.call(lambda number: number) for _ in range(50)] == [0] * 50
    hedger.close()
    assert (hedger.first, hedger.extra, hedger.lost) == (50, 0, 0)


def test_the_second_attempt_wins_and_the_loser_is_handed_over(hedger: Hedger) -> None:
    """C8: a second attempt overtakes one that hangs. The late result goes to the function that cleans up."""
    release, handed = threading.Event(), threading.Event()
    late: list[str] = []

    def attempt(number: int) -> str:
        if number != 1:
            waiting(release)
        return f"attempt {number}"

    def lost(result: str) -> None:
        late.append(result)
        handed.set()

    assert hedger.call(attempt, lost) == "attempt 1"
    assert late == []
    release.set()
    waiting(handed)
    hedger.close()
    assert "attempt 0" in late
    assert hedger.lost == len(late) == hedger.extra


def test_a_failure_is_no_result_while_another_attempt_runs(hedger: Hedger) -> None:
    """An attempt that fails while another one runs loses, and the other one's result counts."""
    extra_runs, failed = threading.Event(), threading.Event()

    def attempt(number: int) -> int:
        if number == 0:
            waiting(extra_runs)
            failed.set()
            raise UnavailableError("broke off")
        extra_runs.set()
        waiting(failed)
        return number

    assert hedger.call(attempt) in (1, 2)


def test_when_all_attempts_fail_the_last_error_is_raised(hedger: Hedger) -> None:
    """If both attempts fail, the caller gets the error."""
    extra_runs = threading.Event()

    def attempt(number: int) -> int:
        if number == 0:
            waiting(extra_runs)
        else:
            extra_runs.set()
        raise UnavailableError(f"attempt {number}")

    with pytest.raises(UnavailableError, match="attempt"):
        hedger.call(attempt)


def test_a_first_attempt_that_fails_before_the_delay_is_the_answer(clock: ManualClock) -> None:
    """Hedging is not retrying: a quick failure is raised at once, without a second attempt."""
    hedger = Hedger(clock, Threads(), threads=2, budget=1, least_samples=1, least_delay=LIMIT_S)
    hedger.call(lambda number: number)

    def attempt(number: int) -> None:
        raise UnavailableError("refused")

    with pytest.raises(UnavailableError, match="refused"):
        hedger.call(attempt)
    hedger.close()
    assert hedger.extra == 0


def test_an_extra_attempt_without_a_thread_is_done_without(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that can start no more threads does not hedge, and the first attempt counts."""
    hedger = Hedger(clock, Threads(), threads=8, budget=1, least_samples=1, least_delay=0)
    hedger.call(lambda number: number)  # starts the only thread
    with no_new_threads(monkeypatch):

        def attempt(number: int) -> int:
            wait_until(lambda: hedger.extra == 2)
            return number

        assert hedger.call(attempt) == 0
    hedger.close()
    assert (hedger.first, hedger.extra, hedger.lost) == (2, 0, 0)


def test_an_error_in_lost_changes_nothing(hedger: Hedger, caplog: pytest.LogCaptureFixture) -> None:
    """A late result that cannot be cleaned up is logged."""
    release = threading.Event()

    def attempt(number: int) -> int:
        if number == 0:
            waiting(release)
        return number

    def lost(result: int) -> None:
        raise UnavailableError("cannot delete")

    assert hedger.call(attempt, lost) in (1, 2)
    release.set()
    hedger.close()
    assert "could not be deleted" in caplog.text


def test_the_budget_caps_the_extra_attempts(clock: ManualClock) -> None:
    """C8: a store that is slow for every request gets at most the budget's extra requests."""
    hedger = Hedger(clock, Threads(), threads=4, budget=0.1, least_samples=1, least_delay=0)

    def attempt(number: int) -> int:
        threading.Event().wait(0.001)  # longer than the delay learned from the clock, which stands still
        return number

    for _ in range(200):
        hedger.call(attempt)
    hedger.close()
    assert hedger.first == 200
    assert 1 <= hedger.extra <= 20


def test_the_delay_is_a_high_percentile_of_recent_latencies(clock: ManualClock) -> None:
    """An attempt of the usual duration is not hedged. The delay follows the observed latencies."""
    hedger = Hedger(clock, Threads(), threads=1, budget=1, least_samples=20, least_delay=0)

    def taking(seconds: float) -> Callable[[int], None]:
        def attempt(number: int) -> None:
            clock.now += seconds

        return attempt

    for n in range(100):
        hedger.call(taking(1_000 + n))
    assert hedger.delay() == pytest.approx(1_093)
    for _ in range(500):
        hedger.call(taking(5_000))
    hedger.close()
    assert hedger.delay() == pytest.approx(5_000)
    assert hedger.extra == 0


def test_calls_beyond_the_threads_queue(clock: ManualClock) -> None:
    """More calls than threads all end, even if extra attempts wait behind them and are no longer needed."""
    hedger = Hedger(clock, Threads(), threads=2, budget=1, least_samples=1, least_delay=0)
    dice = random.Random(7)
    naps = [dice.random() / 200 for _ in range(100)]

    def one(number: int) -> int:
        def attempt(_: int) -> int:
            threading.Event().wait(naps[number])
            return number

        return hedger.call(attempt)

    with ThreadPoolExecutor(20) as callers:
        assert list(callers.map(one, range(100))) == list(range(100))
    hedger.close()
    assert hedger.first == 100
    assert 0 <= hedger.extra <= 200


def test_a_caller_that_is_interrupted_leaves_nothing_behind(hedger: Hedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt ends the wait. An attempt that succeeds afterwards is handed over as lost."""
    late: list[int] = []
    release = threading.Event()

    def interrupted(race: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("statemgr.transfer.hedging._Race.result", interrupted)

    def attempt(number: int) -> int:
        waiting(release)
        return number

    with pytest.raises(KeyboardInterrupt):
        hedger.call(attempt, late.append)
    release.set()
    hedger.close()
    assert 0 in late
