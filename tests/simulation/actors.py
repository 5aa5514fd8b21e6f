"""Those who act in a history besides the owners of single tasks: members that run the consumer loop, and operators."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from statemgr import JobConfig, StateManager
from statemgr.engine.task import Task
from statemgr.errors import MissingState, StatemgrError
from statemgr.flows.opening.open_job import JobTopics
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.rollback.owner import Goal, roll_back

if TYPE_CHECKING:
    from confluent_kafka import Message

    from tests.simulation.history import History

TASK, TOPIC, SOURCE = "Partition 0", "orders", "orders-0"
#: Why a command finds nothing to do: the job has not begun, or has moved on meanwhile.
_TOO_LATE = ("the checkpoint topic does not exist", "the job has no checkpoint", "is not retained")


class Loop:
    """A member of the consumer group that runs the consumer loop."""

    def __init__(self, history: History, manager: StateManager) -> None:
        self._history = history
        self._consumer = manager.config.consumer("simulated")
        self._expected = 0
        self.loop = manager.loop(self._consumer, self._processed, on_open=self._opened)

    def run(self) -> None:
        """Run until somebody stops the loop. Raises: what the loop raises."""
        try:
            self.loop.run()
        finally:
            self._consumer.close()

    def _opened(self, task: Task) -> None:
        # what was acknowledged while the opening was in progress may be newer: then this member is fenced
        self._expected = self._history.compare(task.last_checkpoint, task, 0)
        self._history.scheduler.note(f"loop opened at {self._expected}")

    def _processed(self, task: Task, message: Message) -> None:
        history, offset = self._history, message.offset()
        assert offset is not None
        if offset != self._expected:
            raise AssertionError(f"the input continues at {offset} instead of {self._expected}")
        if task.last_checkpoint is not None:
            history.acked = max(history.acked, task.last_checkpoint.input_offsets[SOURCE])
        history.process(task, offset)
        history.tried[offset + 1] += 1
        self._expected = offset + 1


def go_back(history: History, config: JobConfig, name: str) -> None:
    """An operator makes an older checkpoint current again."""
    scheduler = history.scheduler
    try:
        with (
            closing(history.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=True)) as log,
        ):
            record = log.read().get(TASK)
            if record is None:
                return
            chosen = record.checkpoints[scheduler.decide(f"checkpoint of {name}", len(record.checkpoints))]
            target = chosen.input_offsets[SOURCE]
            scheduler.note(f"rollback to {target}")
            history.tried[target] += 1
            history.going_back.append(target)
            roll_back(services, log, JobTopics(services), Goal((str(chosen.checkpoint_id),), None))
            history.acked = min(history.acked, target)
            history.going_back.remove(target)
            scheduler.note(f"rolled back to {target}")
    except MissingState as error:
        if not any(reason in error.message for reason in _TOO_LATE):
            raise
        scheduler.note(error.message)
    except StatemgrError as error:
        history.expect(error)
