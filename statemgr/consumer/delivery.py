"""Calls the application of a consumer loop: with one message, with a batch, when a task is open, and for its timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statemgr.consumer.application import Application
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.consumer.assigned_tasks import AssignedTasks
from statemgr.engine.timers import check_ran
from statemgr.errors import LocalStateLost, StatemgrError, StateUnreachable

if TYPE_CHECKING:
    from confluent_kafka import Message

    from statemgr.kafka.input_position import InputPosition

#: Bytes of keys and values after which no more messages are gathered.
GATHERED_BYTES = 16 * 1024 * 1024


@dataclass
class Batch:
    """Messages of one task that were polled together, in the order of each source partition."""

    owned: AssignedTask
    polled: list[tuple[InputPosition, Message]] = field(default_factory=list)


class Delivery:
    """Only the loop's thread uses it.

    Args:
        gather_most: number of messages that are gathered for batches.
        open_again: called if the application finds that the local state of a task is lost, or that a part of it that is
            not here yet cannot be fetched.
    """

    def __init__(
        self,
        tasks: AssignedTasks,
        application: Application,
        gather_most: int,
        open_again: Callable[[AssignedTask, LocalStateLost | StateUnreachable], None],
    ) -> None:
        self._tasks = tasks
        self._application = application
        self._gather_most = gather_most
        self._open_again = open_again
        #: Whether the application takes batches.
        self.in_batches = application.process_batch is not None

    def one(self, message: Message) -> bool:
        """Pass a message to ``process``. Returns: whether it was processed. Raises: its error; MissingState when input
        was skipped."""
        owned, position = self._tasks.find(message.topic(), message.partition()) or (None, None)
        if owned is None or position is None or owned.task is None or not _is_next(position, message):
            return False
        process, offset = self._application.process, message.offset()
        assert process is not None
        assert offset is not None
        owned.task.note_input(message.timestamp()[1])
        try:
            check_ran(process(owned.task, self._application.message(message)))
        except (LocalStateLost, StateUnreachable) as lost:
            self._open_again(owned, lost)
            return False
        except Exception as failure:
            _placed(failure, topic=message.topic(), partition=message.partition(), offset=offset)
            raise
        position.next = offset + 1
        owned.dirty = True
        owned.processed += 1
        return True

    def gather(self, first: Message, poll: Callable[[], Message | None]) -> tuple[list[Batch], Message | None]:
        """Sort the messages that have already arrived by task, without waiting for more.

        Returns: a batch per task; and the event that is not a message and ended the gathering, or None.
        """
        batches: dict[int, Batch] = {}
        count = size = 0
        message: Message | None = first
        while message is not None and message.error() is None:
            found = self._tasks.find(message.topic(), message.partition())
            if found is not None and found[1].next is not None:
                batches.setdefault(id(found[0]), Batch(found[0])).polled.append((found[1], message))
                count += 1
                size += len(message.key() or b"") + len(message.value() or b"")
            full = count >= self._gather_most or size >= GATHERED_BYTES
            message = None if full else poll()
        return list(batches.values()), message

    def batch(self, batch: Batch) -> bool:
        """Pass a batch to ``process_batch``, without messages of before a seek, or of partitions that have left, or of
        a task that was opened again, since they were polled. Returns and raises: as :meth:`one`.
        """
        owned, messages = batch.owned, []
        for position, message in batch.polled:
            found = self._tasks.find(message.topic(), message.partition())
            if found is not None and found[1] is position and _is_next(position, message):
                position.next = (message.offset() or 0) + 1  # nothing commits before the batch has been processed
                messages.append(message)
        if not messages or owned.task is None:
            return False
        process_batch = self._application.process_batch
        assert process_batch is not None
        owned.task.note_input(max(message.timestamp()[1] for message in messages))
        try:
            check_ran(process_batch(owned.task, [self._application.message(message) for message in messages]))
        except (LocalStateLost, StateUnreachable) as lost:
            self._open_again(owned, lost)
            return False
        except Exception as failure:
            _placed(failure, task=owned.task.name, batch=_range(messages))
            raise
        owned.dirty = True
        owned.processed += len(messages)
        return True

    def announce(self, owned: AssignedTask) -> bool:
        """Call ``on_open`` once for an open task. Returns: whether the task is still open. Raises: its error."""
        on_open, task = self._application.on_open, owned.task
        if owned.announced or on_open is None or task is None:
            return True
        owned.announced = True

        return self._call(owned, lambda: check_ran(on_open(task)))

    def run_timers(self) -> None:
        """Call the timers that are due. Those of a task wait until its partitions are resumed, and while it is held
        back. Raises: their errors."""
        for owned in self._tasks:
            if owned.task is not None and not owned.held and all(at.next is not None for at in owned.inputs):
                self._call(owned, owned.task.run_timers)

    def _call(self, owned: AssignedTask, call: Callable[[], object]) -> bool:
        """Call the application between messages; if ``call`` returns False, nothing happened."""
        task = owned.task
        assert task is not None
        try:
            if call() is not False:
                owned.dirty |= task.has_changes
        except (LocalStateLost, StateUnreachable) as lost:
            self._open_again(owned, lost)
            return False
        except Exception as failure:
            _placed(failure, task=task.name)
            raise
        return True


def _is_next(position: InputPosition, message: Message) -> bool:
    """Whether to process a message. A message of before a pause took effect is left out; the seek reads it again."""
    offset = message.offset()
    if position.next is None or offset is None:
        return False
    return offset == position.next or position.follows(offset)


def _placed(failure: Exception, **where: object) -> None:
    """Add to an error of the application what it was processing: fields of a typed error, a note of any other.

    If the error is about another topic, a field ``input`` names the message.
    """
    if isinstance(failure, StatemgrError):
        if "topic" in failure.where and "offset" in where and "offset" not in failure.where:
            where = {"input": f"{where['topic']}-{where['partition']} offset {where['offset']}"}
        failure.with_where(**where)
    else:
        failure.add_note("while processing " + ", ".join(f"{name}={value}" for name, value in where.items()))


def _range(messages: list[Message]) -> str:
    """The source partitions and offsets of messages, for an error: ``orders-0 from 120 to 339``."""
    ends: dict[str, tuple[int | None, int | None]] = {}
    for message in messages:
        source = f"{message.topic()}-{message.partition()}"
        ends[source] = ends.get(source, (message.offset(), None))[0], message.offset()
    return "; ".join(f"{source} from {first} to {last}" for source, (first, last) in ends.items())
