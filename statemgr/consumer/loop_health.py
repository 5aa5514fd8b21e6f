"""Whether a consumer loop is alive and ready, for ``/healthz`` and ``/readyz``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from statemgr.backends.services import Services
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.engine.health import Condition, Health
from statemgr.ids import task_name

#: librdkafka's default of ``max.poll.interval.ms``.
_POLL_INTERVAL_MS = 300_000


class LoopHealth:
    """The loop's thread changes it, and the threads of probes read it.

    The loop counts as stuck if it has not polled for longer than ``max.poll.interval.ms``: then the consumer group has
    removed this member, and has given its tasks to others.
    """

    def __init__(self, services: Services, tasks: Iterable[AssignedTask]) -> None:
        self._clock = services.clock
        self._tasks = tasks
        settings = services.config.kafka_client("consumer")
        self.limit_s = int(settings.get("max.poll.interval.ms", _POLL_INTERVAL_MS)) / 1000
        self._polled = self._clock.monotonic()
        self._joined = False
        self._ended: str | None = None

    @contextmanager
    def watched(self, health: Health) -> Iterator[None]:
        """Around the loop. After an error it stays watched: the process must be restarted if it does not end."""
        self._polled = self._clock.monotonic()
        health.watch(self.condition)
        try:
            yield
        except BaseException as error:
            self._ended = f"the consumer loop has ended with {type(error).__name__}"
            raise
        health.unwatch(self.condition)

    def polls(self) -> None:
        """The loop is about to poll."""
        self._polled = self._clock.monotonic()

    def joined(self, joined: bool = True) -> None:
        """The consumer group has told this member its partitions, or has removed it."""
        self._joined = joined

    def condition(self) -> Condition:
        """Any thread may call this."""
        owned = tuple(self._tasks)
        restoring = tuple(task_name(one.index) for one in owned if one.task is None)
        unready = () if self._joined else ("the consumer group has not assigned tasks yet",)
        return Condition(self._dead(), unready, restoring, len(owned) - len(restoring))

    def _dead(self) -> tuple[str, ...]:
        if self._ended is not None:
            return (self._ended,)
        silent = self._clock.monotonic() - self._polled
        if silent <= self.limit_s:
            return ()
        return (
            f"the consumer loop has not polled for {silent:.0f} s, which is more than max.poll.interval.ms: a call of "
            "process or of a timer, or a last commit, takes too long",
        )
