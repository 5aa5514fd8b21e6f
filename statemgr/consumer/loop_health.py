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
#: Seconds after which a member counts as one without tasks if the brokers assign them: the client does not say so.
_NONE_S = 30.0


class LoopHealth:
    """The loop's thread changes it, and the threads of probes read it.

    The loop counts as stuck if it has not polled for longer than ``max.poll.interval.ms``: then the consumer group has
    removed this member, and has given its tasks to others.

    Args:
        by_brokers: whether the brokers assign tasks, and no member.

    Attributes:
        polled_s: when the loop last polled, on the clock of durations. The loop sets it for every message.
    """

    def __init__(self, services: Services, tasks: Iterable[AssignedTask], *, by_brokers: bool = False) -> None:
        self._clock = services.clock
        self._tasks = tasks
        self._by_brokers = by_brokers
        settings = services.config.kafka_client("consumer")
        self.limit_s = int(settings.get("max.poll.interval.ms", POLL_INTERVAL_MS)) / 1000
        #: Why the group has assigned nothing to this member at this moment, and since when; empty if it has assigned
        #: what is due.
        self._unassigned = "the consumer group has not assigned tasks yet"
        self.polled_s = self._since_s = self._clock.elapsed()
        #: For how long the brokers have not answered.
        self.silent_s: Callable[[], float] = float
        self._ended: str | None = None

    @contextmanager
    def watched(self, health: Health) -> Iterator[None]:
        """Around the loop. After an error it stays watched: the process must be restarted if it does not end."""
        self.polled_s = self._since_s = self._clock.elapsed()
        health.watch(self.condition)
        try:
            yield
        except BaseException as error:
            self._ended = f"the consumer loop has ended with {type(error).__name__}"
            raise
        health.unwatch(self.condition)

    def assigned(self) -> None:
        """The consumer group has told this member its partitions, or that it has none."""
        self._unassigned = ""

    def revoked(self) -> None:
        """The group has taken all partitions back, and will tell this member which ones it has from now on."""
        self._unassigned = (
            "the consumer group is dividing its tasks again, and has not assigned any to this process yet"
        )

    def lost(self) -> None:
        """The group has removed this member."""
        self._since_s = self._clock.elapsed()
        self._unassigned = (
            "this process has lost its tasks, because it and the consumer group did not hear of each other for "
            "session.timeout.ms, and it has not been assigned others yet"
        )

    def condition(self) -> Condition:
        """Any thread may call this."""
        owned = tuple(self._tasks)
        restoring = tuple(task_name(one.index) for one in owned if one.task is None)
        return Condition(self._dead(), self._unready(), restoring, len(owned) - len(restoring))

    def _unready(self) -> tuple[str, ...]:
        why = self._unassigned
        if why and (silent := self.silent_s()) > SILENT_S:
            why = f"the brokers have not answered for {silent:.0f} s"
        elif self._by_brokers and self._clock.elapsed() - self._since_s > _NONE_S:
            why = ""
        return (why,) if why else ()

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
