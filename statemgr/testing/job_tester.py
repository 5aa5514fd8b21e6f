"""Runs a consumer-loop job in memory, for the tests of an application.

Only the servers are replaced: Kafka by :mod:`statemgr.testing.memory_kafka`, the blob store by ``memory://``. The loop,
the commits, the restores and RocksDB are those of production. Each member of the consumer group is a thread with its
own state manager and state directory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Self, Unpack

from statemgr.config import JobConfig
from statemgr.consumer.application import Application
from statemgr.engine.task import Task
from statemgr.errors import InvalidError, UnavailableError
from statemgr.ids import task_name
from statemgr.manager import StateManager
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.jobs.permissions import PermissionFlags
from statemgr.serdes import SERDES, Serde, SerdeLike
from statemgr.services import Services
from statemgr.stores.store import Store
from statemgr.testing.memory_clients import MemoryGroupConsumer
from statemgr.testing.memory_servers import START_MS, MemoryServers

Process = Callable[[Task, Any], None]
ProcessBatch = Callable[[Task, Sequence[Any]], None]
#: Real seconds that a call of the tester may take.
_PATIENCE_S = 60.0
#: Real seconds between two looks at whether the job rests.
_LOOK_S = 0.002
#: Settings of a topic that refuses no record.
_ANYTHING = {"max.message.bytes": str(2**31 - 1), "message.timestamp.after.max.ms": str(2**63 - 1)}
_RESTORE_HINT = "call restore() first"


class OutputRecord(NamedTuple):
    """A committed record of an output topic. ``timestamp_ms`` is in epoch milliseconds."""

    key: bytes | None
    value: bytes | None
    partition: int
    offset: int
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...]


class JobTester:
    """A job that runs in memory until the ``with`` block ends. Each call returns when the job has nothing left to do.

    An exception of ``process`` or of a commit ends the job, as in production. The call that caused it raises it, and
    :meth:`restore` starts the job again. Use a tester from one thread only.

    Args:
        config: the job's configuration, or its mapping. It needs ``task.inputs``. The tester replaces the settings of
            Kafka, of the blob store's place, of ``state.dir`` and of the metrics' port.
        process: called as ``process(task, message)``. This, ``process_batch``, ``on_open`` and the serdes of the input
            are those of :meth:`statemgr.StateManager.run`.
        members: how many members of the consumer group share the tasks.
        start_ms: the time at which the clock begins, in epoch milliseconds.

    Attributes:
        config: the configuration that applies.
    """

    def __init__(
        self,
        config: JobConfig | Mapping[str, object],
        process: Process | None = None,
        *,
        process_batch: ProcessBatch | None = None,
        on_open: Callable[[Task], None] | None = None,
        key_serde: SerdeLike | None = None,
        value_serde: SerdeLike | None = None,
        members: int = 1,
        start_ms: int = START_MS,
    ) -> None:
        self._servers = servers = MemoryServers(config, start_ms)
        given = servers.config
        if not given.inputs:
            raise InvalidError("the job has no input topics to send to", hint="set task.inputs in its configuration")
        self._application = _Application(process, process_batch, on_open, key_serde, value_serde)
        self._clock, self._broker = servers.clock, servers.broker
        self.config = self._given = given
        self._serdes = self._input_serdes()
        self._members: list[_Member] = []
        self._count = _checked_members(members)
        self._broker.creates_topics = False
        self._create_topics()

    def __enter__(self) -> Self:
        self._servers.open()
        try:
            self._start(self._count)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()
        self._servers.close()

    def _create_topics(self) -> None:
        """The topics that others create: those of the input, and those of ``task.outputs``. They take records of any
        size and time, because a test says nothing about their settings."""
        given = self._given
        for topic in dict.fromkeys([*given.inputs, *given.outputs]):
            if topic not in self._broker.topics:
                self._broker.create(topic, given.tasks if topic in given.inputs else None, _ANYTHING)

    # --- input, output and state ---------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        key: Any = None,
        value: Any = None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> int:
        """Write a record to an input topic and wait until the job has processed it.

        While the job does not run, the record waits on its topic.

        Args:
            key: is written with the serde of the input's keys. Bytes are sent as they are, and so can be what the serde
                does not read. The serde ``bytes`` also takes text, as UTF-8.
            value: the same for values; None for a tombstone.
            partition: the task that gets it; without one, the key chooses as librdkafka's default partitioner does.
            timestamp_ms: epoch milliseconds; without one, the time of the tester's clock.

        Returns: its offset. Raises: InvalidError for another topic or partition, for headers or a timestamp that a
            record cannot have, or a value that the serde does not take; what the job raises.
        """
        self._check_open()
        if topic not in self.config.inputs:
            raise InvalidError(
                f"{topic} is not an input topic of the job",
                hint=f"send to {', '.join(self.config.inputs)}, or add it to task.inputs",
                topic=topic,
            )
        if partition is not None and partition not in range(self.config.tasks):
            raise InvalidError(
                f"the input has no partition {partition!r}",
                hint=f"choose one from 0 to {self.config.tasks - 1}, or raise job.tasks",
                topic=topic,
            )
        if timestamp_ms is not None and not (isinstance(timestamp_ms, int) and abs(timestamp_ms) < 2**63):
            raise InvalidError(
                f"the timestamp is {timestamp_ms!r}", hint="give epoch milliseconds as a whole number", topic=topic
            )
        headers = [*headers]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in headers):
            raise InvalidError(
                f"the headers are {headers!r}", hint="give pairs of a name and its bytes, or None", topic=topic
            )
        _, offset, _ = self._broker.append(
            topic,
            partition,
            self._encoded("key", key),
            self._encoded("value", value),
            headers,
            timestamp_ms=timestamp_ms,
        )
        if self._members:
            self._settle()
        return offset

    def store(self, name: str, *, task: str | None = None) -> Store:
        """A store of a running task, with changes that are not committed yet.

        Args:
            task: ``Partition <i>``; needed if the job has several tasks.

        Raises: InvalidError, ConfigError for an unknown store.
        """
        return self._task(task).store(name)

    def checkpoint(self, task: str | None = None) -> Checkpoint | None:
        """The last checkpoint of a running task; None before its first commit. Raises: InvalidError."""
        return self._task(task).last_checkpoint

    def output(self, topic: str) -> list[OutputRecord]:
        """The committed records of a topic so far, by partition and offset. Raises: InvalidError if there is none."""
        if topic not in self._broker.topics:
            raise InvalidError(
                f"there is no topic {topic}", hint=f"name one of {', '.join(sorted(self._broker.topics))}", topic=topic
            )
        return [
            OutputRecord(entry.key, entry.value, partition, offset, entry.timestamp[1], tuple(entry.headers))
            for partition, offset, entry in self._broker.committed(topic)
        ]

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time of the clock, in epoch milliseconds."""
        return self._clock.time_ns() // 1_000_000

    def advance(self, *, seconds: float) -> None:
        """Move the clock ahead, and wait until the job has done what is due: a commit, once ``task.commit.ms`` is over.

        Raises: InvalidError if ``seconds`` is negative or no number; what the job raises.
        """
        self._check_open()
        if not (isinstance(seconds, int | float) and 0 <= seconds < inf):
            raise InvalidError(f"the clock cannot move by {seconds!r} s", hint="give a positive number of seconds")
        self._clock.advance(seconds)
        if self._members:
            self._settle()

    def commit(self) -> None:
        """Commit every task that has something to commit, without moving the clock. Raises: what the job raises."""
        self._check_running("commit")
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for member in self._members:
                member.loop.commit_soon()
            self._settle()
            if not any(member.lags() for member in self._members):
                return
            self._in_time(deadline)

    # --- the life of the job -------------------------------------------------------------------------------------

    def crash(self, *, lose_disk: bool = False) -> None:
        """End all members at once, without a commit. What they have not published is lost.

        Args:
            lose_disk: their state directories are lost too, as on new machines. Otherwise the next start may use them.

        Raises: InvalidError if the job does not run.
        """
        self._check_running("crash")
        self._kill()
        if lose_disk:
            self._servers.lose_disk()

    def stop(self) -> None:
        """End all members as SIGTERM does: each commits what it has processed. Raises: what the job raises."""
        self._check_running("stop")
        members, self._members = self._members, []
        for member in members:
            member.loop.stop()
        for member in members:
            member.end()
        for member in members:
            member.raise_error()

    def restore(
        self,
        backend: str | None = None,
        *,
        settings: Mapping[str, object] | None = None,
        process: Process | None = None,
        process_batch: ProcessBatch | None = None,
        **permissions: Unpack[PermissionFlags],
    ) -> None:
        """Start the job again after :meth:`crash`, :meth:`stop` or an error. It continues after its checkpoint.

        Args:
            backend: the factory that restores all stores, for example ``blob-store``. The local disk is lost first, so
                that the state comes from there. Without one, the job restores as it is configured.
            settings: keys of the configuration that change with this start and stay changed, as in a step of a
                migration.
            process: a new version of the application; ``process_batch``: the same for one that takes batches.
            permissions: those of :meth:`statemgr.StateManager.run`, such as ``allow_new_stores``, for this start.

        Raises: InvalidError if the job runs, or if it has no backup in ``backend``; ConfigError; what a restore raises.
        """
        self._check_open()
        if self._members:
            raise InvalidError("the job is running", hint="call crash() or stop() before restore()")
        if settings is not None:
            self._given = self._servers.reconfigure(settings)
            self._create_topics()
        config = self._given
        if backend is not None:
            config = self._servers.restoring_from(backend)
        if process is not None or process_batch is not None:
            self._application = self._application._replace(process=process, process_batch=process_batch)
        self._serdes = self._input_serdes()
        self.config = config
        self._start(self._count, **permissions)

    def rebalance(self, *, members: int) -> None:
        """Let members join or leave the group, until it has this many, and wait until all tasks are open again.

        Each new member has an empty disk. Members that leave, and those that give tasks away, commit first.

        Raises: InvalidError if the job does not run; what the job raises.
        """
        self._check_running("rebalance")
        self._count = _checked_members(members)
        leaving = self._members[members:]
        del self._members[members:]
        for member in leaving:
            member.loop.stop()
        for number, member in enumerate(leaving, members):
            member.end()
            self._servers.lose_disk(_disk(number))  # a later member has the same number
        for member in leaving:
            member.raise_error()
        self._start(members)

    def owner(self, task: str | None = None) -> int:
        """The number of the member that runs a task, from 0. Raises: InvalidError."""
        wanted = self._task(task)
        return next(number for number, member in enumerate(self._members) if wanted in member.manager.open.values())

    # --- inside --------------------------------------------------------------------------------------------------

    def _input_serdes(self) -> Mapping[str, Serde[Any]]:
        used = Application.of(self._given, **self._application._asdict())
        return {"key": used.key_serde, "value": used.value_serde}

    def _encoded(self, what: str, given: Any) -> bytes | None:
        if given is None or isinstance(given, bytes):
            return given
        serde = self._serdes[what]
        if serde is not SERDES["bytes"]:
            return serde.serialize(given)
        if isinstance(given, str):
            return given.encode()
        raise InvalidError(
            f"the {what} is {type(given).__name__}, and the input's {what}s have the serde bytes",
            hint="set task.input.key.serde or task.input.value.serde, or pass a serde to the tester",
        )

    def _start(self, members: int, **permissions: Unpack[PermissionFlags]) -> None:
        """Start the members that are missing, and wait until the job rests."""
        while len(self._members) < members:
            config = self._servers.on_disk(self.config, _disk(len(self._members)))
            self._members.append(_Member(config, self._application, self._servers, permissions))
        self._settle()

    def _settle(self) -> None:
        """Wait until every member has taken a whole turn and has nothing left to do. Raises: the error of a member."""
        for member in self._members:
            member.consumer.nudge()
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for member in self._members:
                if not member.thread.is_alive():
                    self._kill()
                    member.raise_error()
                    return
            if all(member.rests() for member in self._members):
                return
            self._in_time(deadline)
            time.sleep(_LOOK_S)

    def _in_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            self._clock.give_up()
            raise UnavailableError(
                f"the job was still busy after {_PATIENCE_S:.0f} s",
                hint="look for a call in process() that waits, or for an error in the log",
            )

    def _kill(self) -> None:
        members, self._members = self._members, []
        with self._broker.changed:  # otherwise a member that outlives another gives its tasks up, with a commit
            for member in members:
                member.consumer.kill(_Crashed())
        for member in members:
            member.end()

    def _task(self, name: str | None) -> Task:
        self._check_running("look at a task")
        if name is None and self.config.tasks > 1:
            raise InvalidError("the job has several tasks", hint=f'name one, for example task="{task_name(0)}"')
        name = name or task_name(0)
        for member in self._members:
            found = member.manager.open.get(name)
            if found is not None and not found.closed:
                return found
        raise InvalidError(
            f"the job has no task {name!r}", hint=f"it has {task_name(0)} to {task_name(self.config.tasks - 1)}"
        )

    def _check_running(self, what: str) -> None:
        self._check_open()
        if not self._members:
            raise InvalidError(f"cannot {what}: the job does not run", hint=_RESTORE_HINT)

    def _check_open(self) -> None:
        self._servers.check_open("JobTester")


class _Application(NamedTuple):
    """What the loop calls."""

    process: Process | None
    process_batch: ProcessBatch | None
    on_open: Callable[[Task], None] | None
    key_serde: SerdeLike | None
    value_serde: SerdeLike | None


class _Crashed(BaseException):
    """Ends the thread of a member. No handler of errors catches it."""


class _Manager(StateManager):
    """Knows the tasks that the loop has opened: ``open``, by name."""

    def __init__(self, config: JobConfig, services: Callable[[JobConfig], Services]) -> None:
        super().__init__(config, services=services)
        self.open: dict[str, Task] = {}

    def open_task(self, task: str, **options: Any) -> Task:
        self.open[task] = opened = super().open_task(task, **options)
        return opened


class _Member:
    """A process of the job: a thread that runs the loop."""

    def __init__(
        self, config: JobConfig, application: _Application, servers: MemoryServers, permissions: PermissionFlags
    ) -> None:
        self.manager = _Manager(config, servers.services)
        consumer = config.consumer("job-tester")
        assert isinstance(consumer, MemoryGroupConsumer)
        self.consumer = consumer
        self.loop = self.manager.loop(consumer, **application._asdict(), **permissions)
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="job-tester", daemon=True)
        self.thread.start()

    def rests(self) -> bool:
        """Whether the loop waits for input, no commit is in progress, and the loop knows how the last one ended."""
        if not self.consumer.rests() or any(
            not task.closed and task.pending_commit_seconds is not None for task in list(self.manager.open.values())
        ):
            return False
        if self.loop.committing:
            self.consumer.nudge()  # the loop looks at commits between two polls
            return False
        return True

    def lags(self) -> bool:
        """Whether a task has processed input that is in no checkpoint."""
        published: dict[str, int] = {}
        for task in self.manager.open.values():
            if not task.closed and task.last_checkpoint is not None:
                published |= task.last_checkpoint.input_offsets
        return any(position > published.get(source, 0) for source, position in self.consumer.positions().items())

    def end(self) -> None:
        """Wait until the loop has ended, and close what it used. A thread that does not end is left alone."""
        self.thread.join(_PATIENCE_S)
        if not self.thread.is_alive():
            self.manager.close()
            self.consumer.close()

    def raise_error(self) -> None:
        """Raise what ended the loop, if it was no crash."""
        if self._error is not None and not isinstance(self._error, _Crashed):
            raise self._error

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self._error = error


def _checked_members(members: int) -> int:
    if members < 1:
        raise InvalidError(f"a group cannot have {members} members", hint="give at least 1, or call stop()")
    return members


def _disk(number: int) -> str:
    """The name of the directory that a member has as its disk."""
    return f"member-{number}"
