"""Whether a consumer loop is alive and ready, for ``/healthz`` and ``/readyz``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from statemgr.config.contradictions import POLL_INTERVAL_MS
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.ids import task_name
from statemgr.services import Services
from statemgr.telemetry.liveness import Condition, Health

#: Seconds without an answer after which the brokers count as gone.
SILENT_S = 5.0


class LoopHealth:
    """The loop's thread changes it, and the threads of probes read it.

    The loop counts as stuck if it has not polled for longer than ``max.poll.interval.ms``: then the consumer group has
    removed this member, and has given its tasks to others.

    Attributes:
        polled_s: when the loop last polled, on the clock of durations. The loop sets it for every message.
    """

    def __init__(self, services: Services, tasks: Iterable[AssignedTask]) -> None:
        self._clock = services.clock
        self._tasks = tasks
        settings = services.config.kafka_client("consumer")
        self.limit_s = int(settings.get("max.poll.interval.ms", POLL_INTERVAL_MS)) / 1000
        self.polled_s = self._clock.elapsed()
        self._joined = self._was_joined = False
        #: For how long the brokers have not answered.
        self.silent_s: Callable[[], float] = float
        self._ended: str | None = None

    @contextmanager
    def watched(self, health: Health) -> Iterator[None]:
        """Around the loop. After an error it stays watched: the process must be restarted if it does not end."""
        self.polled_s = self._clock.elapsed()
        health.watch(self.condition)
        try:
            yield
        except BaseException as error:
            self._ended = f"the consumer loop has ended with {type(error).__name__}"
            raise
        health.unwatch(self.condition)

    def joined(self, joined: bool = True) -> None:
        """The consumer group has told this member its partitions, or has removed it."""
        self._joined = joined
        self._was_joined |= joined

    def condition(self) -> Condition:
        """Any thread may call this."""
        owned = tuple(self._tasks)
        restoring = tuple(task_name(one.index) for one in owned if one.task is None)
        unready = () if self._joined else (self._why_unready(),)
        return Condition(self._dead(), unready, restoring, len(owned) - len(restoring))

    def _why_unready(self) -> str:
        silent = self.silent_s()
        if silent > SILENT_S:
            return f"the brokers have not answered for {silent:.0f} s"
        if self._was_joined:
            return (
                "this process has lost its tasks, because it and the consumer group did not hear of each other for "
                "session.timeout.ms, and it has not been assigned others yet"
            )
        return "the consumer group has not assigned tasks yet"

    def _dead(self) -> tuple[str, ...]:
        if self._ended is not None:
            return (self._ended,)
        silent = self._clock.elapsed() - self.polled_s
        if silent <= self.limit_s:
            return ()
        return (
            f"the consumer loop has not polled for {silent:.0f} s, which is more than max.poll.interval.ms: a call of "
            "process or of a timer, or a last commit, takes too long",
        )
