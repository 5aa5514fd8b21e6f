"""Those who act in a history besides the owners of a task: a driver with its attempts, and operators with commands."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from statemgr import JobConfig, StateManager
from statemgr.engine import (
    Epoch,
    PreparedCommit,
    checkpoint_from_bytes,
    checkpoint_to_bytes,
    open_attempt,
    prepared_from_bytes,
    prepared_to_bytes,
)
from statemgr.engine.host import AttemptHost
from statemgr.engine.task import Task
from statemgr.errors import MissingState, OutcomeUnknownError, PermissionNeeded, RetryableError, StatemgrError
from statemgr.flows.opening.open_job import JobTopics
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import Checkpoint
from statemgr.operations.gc.gc import collect_garbage
from statemgr.operations.rollback.owner import Goal, keep, roll_back
from statemgr.ports import no_progress
from tests.simulation.scheduler import Process

TASK, TOPIC, SOURCE = "Partition 0", "orders", "orders-0"
if TYPE_CHECKING:
    from confluent_kafka import Message

    from tests.simulation.history import History

#: Seconds that a driver waits for an attempt.
_ATTEMPT_S = 300.0
#: Attempts of a batch that may fail.
_ATTEMPTS = 4
#: Why a command finds nothing to do: the job has not begun, or has moved on meanwhile.
_TOO_LATE = ("the checkpoint topic does not exist", "the job has no checkpoint", "is not retained")


class Driver:
    """Owns the whole job, as a Spark driver does: attempts prepare each commit elsewhere, and it publishes one."""

    def __init__(self, history: History, manager: StateManager, process: Process, number: int) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._manager = manager
        self._process = process
        self._number = number

    def run(self, turns: int) -> None:
        """Take the job, and commit some batches."""
        history = self._history
        acked = history.acked
        epoch = self._manager.acquire()
        checkpoint = epoch.checkpoints[TASK]
        position = history.position(checkpoint, acked)
        self._scheduler.note(f"acquired at {position}")
        for turn in range(turns):
            if history.over:
                return
            number = 1 + self._scheduler.decide(f"batch {self._process.name} {turn}", 4)
            prepared = self._prepared(epoch, checkpoint, position, number)
            history.feed(position + number)
            history.tried.add(position + number)
            checkpoint = self._published(prepared)
            position += number
            history.acked = max(history.acked, position)
            self._scheduler.note(f"published {position}")
            epoch = epoch.after_publish()

    def _prepared(self, epoch: Epoch, checkpoint: Checkpoint | None, position: int, number: int) -> PreparedCommit:
        """What one of the attempts prepared. Some run twice at the same time, as speculative ones do."""
        scheduler, done = self._scheduler, list[bytes]()
        for attempt in range(_ATTEMPTS):
            threads = []
            for twin in range(1 + scheduler.chance(f"speculative {self._process.name} {position} {attempt}", 0.3)):
                name = f"{self._process.name}.{position}.{attempt}.{twin}"
                machine = f"machine-{scheduler.decide(f'machine of {name}', 2)}"
                process = Process(name, machine)

                def work(machine: str = machine) -> None:
                    if (made := self._attempt(machine, epoch, checkpoint, position, number)) is not None:
                        done.append(made)

                threads.append((process, scheduler.start(name, process, work)))
            for process, thread in threads:
                if not done:
                    thread.join(_ATTEMPT_S)
                if done and scheduler.chance(f"ended {process.name}", 0.7):
                    scheduler.kill(process)  # Spark ends the attempts that it no longer needs, and not at once
            if done:
                return prepared_from_bytes(done[0])
        raise RetryableError("no attempt succeeded")

    def _attempt(
        self, machine: str, epoch: Epoch, checkpoint: Checkpoint | None, position: int, number: int
    ) -> bytes | None:
        history = self._history
        known = None if checkpoint is None else checkpoint_from_bytes(checkpoint_to_bytes(checkpoint))
        config = history.config(machine, self._number)
        try:
            with closing(history.services(config)) as services:
                host = AttemptHost(services)
                there = Epoch.from_bytes(epoch.to_bytes())
                with open_attempt(config, TASK, known, there, host=host) as attempt:
                    history.check({name: dict(attempt.store(name).range()) for name in attempt.stores}, position)
                    for offset in range(position, position + number):
                        store, key, value = history.change(offset)
                        changed = attempt.store(store)
                        changed.delete(key) if value is None else changed.put(key, value)
                    prepared = prepared_to_bytes(attempt.prepare({SOURCE: position + number}))
                host.closing.wait()
            return prepared
        except MissingState as error:
            if history.acked == position:
                raise
            self._scheduler.note(f"the attempt is too late: {error.message}")  # others have published since
            return None
        except StatemgrError as error:
            history.expect(error)
            return None

    def _published(self, prepared: PreparedCommit) -> Checkpoint:
        for _ in range(3):
            try:
                return self._manager.publish([prepared])[TASK]
            except OutcomeUnknownError as error:
                self._history.expect(error)
        raise RetryableError("the outcome of the publish stays unknown")


class Loop:
    """A member of the consumer group that runs the consumer loop."""

    def __init__(self, history: History, manager: StateManager) -> None:
        self._history = history
        self._consumer = manager.config.consumer("simulated")
        self._expected: dict[str, int] = {}
        self.loop = manager.loop(self._consumer, self._processed, on_open=self._opened)

    def run(self) -> None:
        """Run until somebody stops the loop."""
        try:
            self.loop.run()
        finally:
            self._consumer.close()

    def _opened(self, task: Task) -> None:
        # what was acknowledged while the opening was in progress may be newer: then this one is fenced
        position = self._history.opened(task, 0)
        self._history.scheduler.note(f"loop opened at {position}")
        self._expected[task.name] = position

    def _processed(self, task: Task, message: Message) -> None:
        history, offset = self._history, message.offset()
        assert offset is not None
        if offset != self._expected[task.name]:
            raise AssertionError(f"the input continues at {offset} instead of {self._expected[task.name]}")
        history.process(task, offset, 1)
        history.tried.add(offset + 1)
        self._expected[task.name] = offset + 1
        if task.last_checkpoint is not None:
            history.acknowledged(task.last_checkpoint)


def operate(history: History, config: JobConfig, name: str) -> None:
    """An operator types a command."""
    scheduler = history.scheduler
    try:
        with closing(history.services(config)) as services:
            owned = (False, True, True)[(kind := scheduler.decide(f"command of {name}", 3))]
            with closing(CheckpointTopic(config, services.clock, owned=owned)) as log:
                if kind == 0:
                    scheduler.note("gc --write")
                    report = collect_garbage(services, log, no_progress, delete=True)
                    history.check_collected(report)
                    return
                record = log.read().get(TASK)
                retained = () if record is None else record.checkpoints
                if not retained:
                    return
                chosen = retained[scheduler.decide(f"checkpoint of {name}", len(retained))]
                if kind == 1:
                    scheduler.note(f"checkpoints keep {chosen.checkpoint_id}")
                    keep(services, log, JobTopics(services), str(chosen.checkpoint_id), is_kept=bool(len(name) % 2))
                else:
                    target = history.position(chosen, 0)
                    history.acked = min(history.acked, target)
                    scheduler.note(f"rollback to {target}")
                    roll_back(services, log, JobTopics(services), Goal((str(chosen.checkpoint_id),), None))
                    scheduler.note(f"rolled back to {target}")
    except (MissingState, PermissionNeeded) as error:
        if not any(reason in error.message for reason in _TOO_LATE):
            raise
        scheduler.note(error.message)
    except StatemgrError as error:
        history.expect(error)
