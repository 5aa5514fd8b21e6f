"""What the log says about a consumer loop: assigned, opened, revoked, waiting, stopping and why, stopped."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import TopicPartition

from statemgr.consumer.assigned_task import AssignedTask
from statemgr.consumer.loop_health import SILENT_S
from statemgr.engine.input_lag import Reached
from statemgr.errors import StatemgrError
from statemgr.ids import task_name
from statemgr.logs import Event, counted, flush_suppressed, ranges, tell
from statemgr.services import Services
from statemgr.telemetry.metrics import Metrics
from statemgr.telemetry.task_metrics import INTERVAL_S, LONG_S, waits_for

log = logging.getLogger(__name__)


class LoopStory:
    """Writes the lines. Only the loop's thread uses it, except :meth:`asked_to_stop`."""

    def __init__(self, services: Services, tasks: Iterable[AssignedTask], metrics: Metrics) -> None:
        self._clock = services.clock
        self._job = services.config.job_name
        self._count = services.config.tasks
        self._tasks = tasks
        self._metrics = metrics
        self._why = "a call of stop()"
        self._stopping_since: float | None = None
        #: When tasks began to wait for their restore, and when a line may say so.
        self._waiting_since: float | None = None
        self._next_line = 0.0
        #: Seconds without an answer after which a line may say so.
        self._next_silent = SILENT_S
        #: Source partition that is held up → seconds after which a line may say so.
        self._blocked: dict[str, float] = {}

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around the loop: how it has ended."""
        begun = self._clock.elapsed()
        try:
            yield
        except Exception as error:
            what = type(error).__name__
            tell(
                log, Event.FAILED, "%s: the loop ends because of an error, and what is not committed is processed "
                "again by the next owner: %s", self._job, error if isinstance(error, StatemgrError) else repr(error),
                level=logging.ERROR, job=self._job, error=what,
            )  # fmt: skip
            self._stopped(begun, what)
            raise
        self._stopped(begun, None)

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Partitions have arrived."""
        tasks = {partition.partition for partition in partitions}
        self._waiting_since = None
        self._line(
            Event.ASSIGNED, "%s: assigned %d of %d tasks (%s), and restores them", tasks, len(tasks), self._count,
            ranges(tasks),
        )  # fmt: skip

    def revoked(self, partitions: Sequence[TopicPartition], *, lost: bool = False) -> None:
        """Partitions leave this member."""
        tasks = {partition.partition for partition in partitions} & {owned.index for owned in self._tasks}
        if not tasks:
            return  # the loop has ended and closed them
        why = (
            "lost without a commit, because another member may already have them"
            if lost
            else "revoked: they are committed and closed, and another member takes them over"
        )
        self._waiting_since = None
        self._line(Event.REVOKED, "%s: tasks %s are " + why, tasks, ranges(tasks))

    def opened(self, owned: AssignedTask) -> None:
        """A task is restored, and its partitions continue."""
        assert owned.task is not None
        checkpoint = owned.task.last_checkpoint
        tell(
            log, Event.OPENED, "%s: open %s; continues at %s",
            owned.task.name, f"at checkpoint {checkpoint.checkpoint_id}" if checkpoint else "without a checkpoint",
            ", ".join(f"{position.source}:{position.next}" for position in owned.inputs),
            job=self._job, task=owned.task.name,
            checkpoint=str(checkpoint.checkpoint_id) if checkpoint else None,
            offsets={position.source: position.next for position in owned.inputs},
        )  # fmt: skip

    def waiting(self) -> None:
        """Say which tasks are not restored yet, or that none is assigned: after some seconds, and then rarely."""
        flush_suppressed()
        closed = [owned for owned in self._tasks if owned.task is None]
        owns = any(True for _ in self._tasks)
        if owns and not closed:
            self._waiting_since = None
            return
        now = self._clock.elapsed()
        if self._waiting_since is None:
            self._waiting_since, self._next_line = now, now + LONG_S
        if now < self._next_line:
            return
        waited = now - self._waiting_since
        # a member that has no partition because there are too few may wait forever
        self._next_line = now + (INTERVAL_S if owns else max(INTERVAL_S, waited))
        if owns:
            self._restoring(closed, waited)
        else:
            self._line(
                Event.WAITING, "%s: waits for the consumer group to assign tasks, for %.0f s now: it has more members "
                "than partitions, or one that was killed and whose session.timeout.ms has not passed, or the brokers "
                "cannot be reached", set(), waited, seconds=round(waited, 1),
            )  # fmt: skip

    def _restoring(self, closed: list[AssignedTask], waited: float) -> None:
        first = closed[0]
        task = task_name(first.index)
        phase = self._metrics.last_phase.get(task)
        if len(first.inputs) < len(first.sources):
            what = "its partitions of the other topics"
        elif (unreachable := first.unreachable()) is not None:
            what = f"another try: {unreachable}"
        else:
            what = waits_for(phase)
        tell(
            log, Event.WAITING, "%s: %s not restored after %.0f s; %s waits for %s",
            self._job, counted(len(closed), "task"), waited, task, what,
            job=self._job, task=task, tasks=len(closed), seconds=round(waited, 1), phase=phase,
        )  # fmt: skip

    def held(self, owned: AssignedTask, held: bool) -> None:
        """The partitions of a task were paused, or continue."""
        name = task_name(owned.index)
        why = "it takes longer than task.commit.max.delay.ms, or has much output to send"
        what = f"paused until its commit ends: {why}" if held else "continues"
        tell(log, Event.WAITING, "%s: %s", name, what, job=self._job, task=name)

    def blocked(self, found: Iterable[tuple[Reached, float]]) -> None:
        """Say which source partitions an open transaction of other software holds up: after some seconds, and then
        rarely."""
        before, self._blocked = self._blocked, {}
        for at, seconds in found:
            source = f"{at.topic}-{at.partition}"
            self._blocked[source] = next_line = before.get(source, LONG_S)
            if seconds >= next_line:
                self._blocked[source] = seconds + max(seconds, INTERVAL_S)
                tell(
                    log, Event.WAITING, "%s: receives nothing of %s from offset %d on, because another producer's "
                    "transaction has been open there for %.0f s or longer; `statemgr doctor` names it",
                    at.task, source, at.next, seconds, level=logging.WARNING,
                    job=self._job, task=at.task, source=source, offset=at.next, seconds=round(seconds, 1),
                )  # fmt: skip

    def unanswered(self, silent_s: float) -> None:
        """Say that the brokers do not answer, also when there is nothing to commit: after some seconds, then rarely."""
        if silent_s <= SILENT_S:
            if self._next_silent > SILENT_S:
                self._line(Event.WAITING, "%s: the brokers answer again", set())
            self._next_silent = SILENT_S
        elif silent_s > self._next_silent:
            self._next_silent = silent_s + max(silent_s, INTERVAL_S)
            tell(
                log, Event.WAITING, "%s: the brokers have not answered for %.0f s, so nothing can be received or "
                "committed", self._job, silent_s, level=logging.WARNING, job=self._job, seconds=round(silent_s, 1),
            )  # fmt: skip

    def asked_to_stop(self, number: object = None, *_: Any) -> None:
        """Note why the loop ends. The handler of a signal calls it, so it must not log."""
        if isinstance(number, int):
            self._why = signal.Signals(number).name

    def stopping(self) -> None:
        """The loop ends as it was asked to."""
        self._stopping_since = self._clock.elapsed()
        tasks = {owned.index for owned in self._tasks if owned.task is not None}
        self._line(
            Event.STOPPING, "%s: stopping because of " + self._why + "; the open tasks (%s) commit and close", tasks,
            ranges(tasks), why=self._why,
        )  # fmt: skip

    def _stopped(self, begun: float, error: str | None) -> None:
        now = self._clock.elapsed()
        took = "" if self._stopping_since is None else f" {now - self._stopping_since:.1f} s after it was asked to"
        # a scrape may come too late to see the last failures in the metrics
        failures = self._metrics.failures()
        counts = ", ".join(f"{count} {kind}" for kind, count in failures.items())
        tell(
            log, Event.STOPPED, "%s: stopped%s%s, after running for %.0f s%s",
            self._job, took, f" by {error}" if error else "", now - begun, f"; failures: {counts}" if counts else "",
            job=self._job, error=error, seconds=round(now - begun, 1), failures=failures,
        )  # fmt: skip

    def _line(self, event: Event, message: str, tasks: set[int], *args: object, **fields: Any) -> None:
        tell(log, event, message, self._job, *args, job=self._job, tasks=ranges(tasks), **fields)
