"""Owners of a job, as there are in production: of a task, members that run the consumer loop, drivers of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from statemgr import JobConfig, StateManager
from statemgr.engine import Epoch, PreparedCommit, open_attempt
from statemgr.engine.attempts import Attempt
from statemgr.engine.coordinator import LOOK_S
from statemgr.engine.host import AttemptHost
from statemgr.engine.task import Task
from statemgr.errors import (
    CorruptError,
    FencedError,
    InvalidError,
    MissingError,
    OutcomeUnknownError,
    RetryableError,
    StatemgrError,
)
from statemgr.ids import task_name
from statemgr.model.checkpoint import Checkpoint
from tests.simulation.model import SOURCE, STORES, TASK, Model, Wrong
from tests.simulation.turns import Process

if TYPE_CHECKING:
    from confluent_kafka import Message

    from tests.simulation.history import History


@dataclass
class Reached:
    """How far the work on a task is: its model, its position in the input, and the stores with changes since the last
    commit. ``failed``: the last commit has failed, and is tried again as it was."""

    model: Model
    position: int
    changed: set[str] = field(default_factory=set)
    failed: bool = False


class Owner:
    """One life of a process that owns the job or a part of it.

    Args:
        moment: the process and the number of the life, for decisions.
        parts: the tasks, and their models; the seed decides which of them it works on, if it does not work on all.
    """

    def __init__(
        self, history: History, manager: StateManager, moment: str, parts: Sequence[tuple[str, Model]]
    ) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._manager = manager
        self._parts = dict(parts)
        self._task, self._model = parts[self._scheduler.decide(f"task of {moment}", len(parts))]
        self._moment = moment

    def run(self) -> None:
        """Live it. Raises: as the calls of the manager."""
        raise NotImplementedError

    def _change_some(self, task: Task | Attempt, at: Reached, changes: int) -> None:
        """Process some input."""
        for number in range(at.position, at.position + changes):
            at.changed |= self._process(task, at.model, number)
            at.position += 1

    def _process(self, task: Task | Attempt, model: Model, number: int) -> set[str]:
        """Process the input at an offset. Returns: the store that it has changed, if the key belongs to the task."""
        self._history.feed(number + 1, model.source)
        store, key, value = model.change(number)
        if not model.owns(key):
            return set()
        for _ in range(self._scheduler.decide(f"drafts {self._moment} {number}", 8) // 6):
            task.store(store).put(key, b"draft")  # so that equal numbers of changes are not equal changes
        with model.making(number):
            task.store(store).delete(key) if value is None else task.store(store).put(key, value)
        return {store}


class TaskOwner(Owner):
    """Opens a task, and commits what it has processed. After a failed commit it may go on."""

    #: turns of a life, beyond two
    _most_turns = 8

    def run(self) -> None:
        decide, acked, losses = self._scheduler.decide, self._model.acked, self._model.losses
        with self._manager.open_task(self._task) as task:
            at = Reached(self._model, self._model.compare(task.last_checkpoint, task, acked, losses))
            self._scheduler.note(f"opened at {at.position}")
            for turn in range(2 + decide(f"turns of {self._moment}", self._most_turns)):
                if self._history.over:
                    break
                moment = f"{self._moment} {turn}"
                self._change_some(task, at, 0 if at.failed else decide(f"changes {moment}", 5))
                self._scheduler.sleep(0.1 * decide(f"rest {moment}", 30))
                task.run_timers()  # deletes what has expired
                try:
                    self._commit(task, at, moment)
                    at.failed = False
                except (RetryableError, OutcomeUnknownError) as error:
                    if decide(f"gives up {moment}", 2):
                        raise
                    if isinstance(error, OutcomeUnknownError):
                        at.changed.add("perhaps none")
                    at.failed = decide(f"tries the same {moment}", 2) == 0
                    self._scheduler.note(f"goes on after {type(error).__name__}: {error.message}")

    def _commit(self, task: Task, at: Reached, moment: str) -> None:
        """Commit, and sometimes process more meanwhile. Raises: as ``Task.commit``; then the task may go on."""
        before, done, position = task.last_checkpoint, at.changed, at.position
        meanwhile = self._scheduler.decide(f"meanwhile {moment}", 6)
        with self._model.committing(position):
            if meanwhile > 2:
                checkpoint = task.commit({self._model.source: position})
                at.changed = set()
            else:
                started, at.changed = task.commit_async({self._model.source: position}), set()
                self._change_some(task, at, meanwhile)
                try:
                    checkpoint = started.result()
                except StatemgrError:
                    at.changed |= done
                    task.forgive()
                    raise
        if checkpoint.input_offsets != {self._model.source: position}:
            raise Wrong(f"a commit of {position} returned {checkpoint.input_offsets}")
        self._model.check_state_ids(before, checkpoint, done)


class OwnerOfAll(TaskOwner):
    """Opens all tasks of the job. They commit at the same time, so that they share blobs, until all but the first one
    have no more input."""

    _most_turns = 20

    def run(self) -> None:
        with ExitStack() as ends:
            names = [task_name(number) for number in range(1, self._manager.config.tasks)]
            self._others = [ends.enter_context(self._manager.open_task(name)) for name in names]
            for other in self._others:
                self._model.compare_other(other.last_checkpoint, other)
            self._together = self._scheduler.decide(f"together {self._moment}", 6)
            self._threads = ends.enter_context(self._history.executors().pool("others", len(names)))
            super().run()

    def _commit(self, task: Task, at: Reached, moment: str) -> None:
        if self._scheduler.decide(f"no input {moment}", 4) == 0:
            self._scheduler.sleep(70.0)  # blobs that no task needs any more are deleted after a minute
        started: list[tuple[Task, Future[Checkpoint]]] = []
        self._together -= 1
        with self._manager._inputs.shared():  # as in the consumer loop
            for other in self._others if self._together >= 0 else ():
                other.store(STORES[0]).put(b"at", self._model.padded(at.position))
                started.append((other, self._threads.submit(other.commit, {SOURCE: at.position})))
            try:
                super()._commit(task, at, moment)
            finally:
                self._wait_for(started)

    def _wait_for(self, started: Sequence[tuple[Task, Future[Checkpoint]]]) -> None:
        for other, commit in started:
            try:
                commit.result()
            except (RetryableError, OutcomeUnknownError) as error:
                self._scheduler.note(f"{other.name} goes on after {type(error).__name__}: {error.message}")


class LastOwner(TaskOwner):
    """Opens the task when no fault happens any more. Everything works."""

    def run(self) -> None:
        acked = self._model.acked
        with self._manager.open_task(self._task) as task:
            at = Reached(self._model, self._model.compare(task.last_checkpoint, task, acked))
            if self._model.was_damaged():
                self._scheduler.sleep(3 * LOOK_S)  # backups that have lost something are made again
            few = 1 + self._scheduler.decide("last commits", 2)
            # the blobs of a checkpoint that is retained again after a loss may be deleted
            for _ in range(max(few, self._manager.config.retained) if self._model.losses else few):
                self._change_some(task, at, 3)
                with self._model.committing(at.position):
                    task.commit({self._model.source: at.position})


class Levelling(TaskOwner):
    """Opens a task, and commits it at the end of its input."""

    #: what somebody permits the opening
    _permissions: Mapping[str, bool] = MappingProxyType({})

    def run(self) -> None:
        acked = self._model.acked
        with self._manager.open_task(self._task, **self._permissions) as task:
            at = Reached(self._model, self._model.compare(task.last_checkpoint, task, acked))
            self._change_some(task, at, self._history.end(self._model.source) - at.position)
            with self._model.committing(at.position):
                task.commit({self._model.source: at.position})


class Permitted(Levelling):
    """Processes all input again, because somebody permits that the task starts empty."""

    _permissions = MappingProxyType({"allow_empty_start": True, "overwrite_changelog": True})


class LoopMember(Owner):
    """A member of the consumer group that runs the consumer loop, until somebody stops it."""

    def run(self) -> None:
        #: task → the next offset, and the one that its timer has seen
        self._expected, self._ticked = dict.fromkeys(self._parts, 0), dict.fromkeys(self._parts, 0)
        #: losses before its first opening, which may have read what is lost later
        self._losses = self._model.losses
        config, broker = self._manager.config, self._history.broker
        self._fits = all(broker.partitions(topic) == config.tasks for topic in config.inputs)
        consumer = config.consumer("simulated")
        process = self._moment.partition(" ")[0]
        self._history.loops[process] = loop = self._manager.loop(consumer, self._processed, on_open=self._opened)
        try:
            loop.run()
        finally:
            consumer.close()
            del self._history.loops[process]

    def _opened(self, task: Task) -> None:
        if not self._fits:
            raise Wrong("a member runs, although its topic had another number of partitions than the job has tasks")
        # what was acknowledged while the opening was in progress may be newer: then this member is fenced
        self._expected[task.name] = at = self._parts[task.name].compare(task.last_checkpoint, task, 0)
        self._scheduler.note(f"loop opened {task.name} at {at}")
        task.every(2.0, self._tick)

    def _tick(self, task: Task) -> None:
        """A timer of the application, which changes state between two messages."""
        assert self._scheduler.current is not None
        if self._scheduler.current.process.gave_back:
            raise Wrong("a timer of a task that was given back")
        if self._ticked[task.name] != (at := self._expected[task.name]):
            task.store(STORES[0]).put(self._parts[task.name].ticks, b"%d" % at)
            self._ticked[task.name] = at

    def _processed(self, task: Task, message: Message) -> None:
        offset, model, expected = message.offset(), self._parts[task.name], self._expected[task.name]
        assert offset is not None
        if (source := f"{message.topic()}-{message.partition()}") != model.source:
            raise Wrong(f"{task.name} gets a message of {source}")
        if offset != expected:
            raise Wrong(f"the input continues at {offset} instead of {expected}")
        if task.last_checkpoint is not None and self._losses == model.losses:
            model.has_published(task.last_checkpoint)
        self._process(task, model, offset)
        model.tried[offset + 1] += 1
        self._expected[task.name] = offset + 1


class Driver(Owner):
    """The driver of an engine, which publishes what its executors prepare."""

    def run(self) -> None:
        decide, config = self._scheduler.decide, self._manager.config
        acked = {task: model.acked for task, model in self._parts.items()}
        epoch = self._manager.acquire()
        with closing(self._history.services(config)) as services:
            host = AttemptHost(services)
            if self._history.prepared:
                self._publish_late(self._history.prepared)
            for turn in range(2 + decide(f"turns of {self._moment}", 6)):
                if self._history.over:
                    break
                moment = f"{self._moment} {turn}"
                prepared, positions = [], dict[str, int]()
                for task, model in self._parts.items():
                    commit, positions[task] = self._attempt(epoch, host, acked[task], moment, task, model)
                    prepared.append(commit)
                others = [other for other in epoch.checkpoints if other not in self._parts]
                prepared += [self._other(epoch, host, other, positions[TASK]) for other in others]
                self._history.prepared = prepared
                self._scheduler.sleep(0.1 * decide(f"rest {moment}", 30))
                with ExitStack() as commits:
                    for task, position in positions.items():
                        commits.enter_context(self._parts[task].committing(position))
                    published = self._manager.publish(prepared)
                epoch = replace(epoch.after_publish(), checkpoints=published, refill=self._manager.damaged())

    def _attempt(
        self, epoch: Epoch, host: AttemptHost, acked: int, moment: str, task: str, model: Model
    ) -> tuple[PreparedCommit, int]:
        """An executor's work on a task that has a model. Returns: its commit, and the new position."""
        with self._opened(task, epoch, host) as attempt:
            at = Reached(model, model.compare(epoch.checkpoints[task], attempt, acked))
            self._scheduler.note(f"an attempt begins at {at.position}")
            named = moment if task == TASK else f"{moment} {task}"
            self._change_some(attempt, at, self._scheduler.decide(f"changes {named}", 5))
            prepared = attempt.prepare({model.source: at.position})
        return prepared, at.position

    def _other(self, epoch: Epoch, host: AttemptHost, task: str, position: int) -> PreparedCommit:
        """An executor's work on another task, which only stores the position."""
        with self._opened(task, epoch, host) as attempt:
            self._model.compare_other(epoch.checkpoints[task], attempt)
            attempt.store(STORES[0]).put(b"at", b"%d" % position)
            return attempt.prepare({SOURCE: position})

    @contextmanager
    def _opened(self, task: str, epoch: Epoch, host: AttemptHost) -> Iterator[Attempt]:
        try:
            attempt = open_attempt(self._manager.config, task, epoch.checkpoints[task], epoch, host=host)
        except (MissingError, CorruptError):
            self._manager.confirm()  # a newer owner may have evicted the checkpoint
            raise
        with attempt:
            yield attempt

    def _publish_late(self, prepared: list[PreparedCommit]) -> None:
        """A driver is given commits that were prepared for an older one."""
        with suppress(FencedError, InvalidError):
            self._manager.publish(prepared)
            raise Wrong("commits that were prepared for an older owner were published")


def live(
    history: History, config: JobConfig, process: Process, kind: type[Owner], parts: Sequence[tuple[str, Model]]
) -> None:
    """The lives of an owner: after an error it begins again, in some histories with the manager that it has."""
    manager: StateManager | None = None
    try:
        with ExitStack() as process_end:
            for life in range(4):
                if history.over:
                    return
                try:
                    with ExitStack() as life_end:
                        if manager is None or not history.keeps_managers:
                            end = process_end if history.keeps_managers else life_end
                            manager = end.enter_context(StateManager(config, services=history.services))
                        kind(history, manager, f"{process.name} {life}", parts).run()
                    return
                except StatemgrError as error:
                    explain(history, config, error)
                history.scheduler.sleep(1.0)
    except StatemgrError as error:
        explain(history, config, error)


def explain(history: History, config: JobConfig, error: StatemgrError) -> None:
    """Raises: Wrong for an error that no situation explains."""
    history.scheduler.note(f"{type(error).__name__}: {error.message}")
    history.expect(error, config)
