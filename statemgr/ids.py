"""Identifiers: checkpoint IDs, attempt IDs, names of tasks and topics. Pure: clock and random source are injected."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import total_ordering

from statemgr.errors import InvalidError

_CHECKPOINT_ID = re.compile(r"(\d{1,19})-(\d{6})\Z")
_TASK = re.compile(r"Partition (0|[1-9]\d{0,5})\Z")
_SOURCE = re.compile(r"([A-Za-z0-9._-]{1,249})-(0|[1-9]\d{0,9})\Z")
_MOST_OFFSET = 2**63 - 1
#: The start of the name of a source of a micro-batch that is not Kafka. No topic name contains a space.
OTHER_SOURCE = "source "
#: Names of jobs and stores. They are safe as a file name, an object key and a part of a topic's name.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")


@total_ordering
@dataclass(frozen=True, slots=True)
class CheckpointId:
    """``<epoch millis>-<last 6 digits of the nano clock>`` (the form of Apache Samza's checkpoint IDs).

    The order is for people only. Offsets on the topic decide which checkpoint is newer.
    """

    millis: int
    nanos: int

    @classmethod
    def at(cls, time_ns: int) -> CheckpointId:
        """The ID for a wall-clock time in nanoseconds since the epoch."""
        return cls(time_ns // 1_000_000, time_ns % 1_000_000)

    @classmethod
    def parse(cls, text: str) -> CheckpointId:
        """Raises: InvalidError if ``text`` is not a checkpoint ID."""
        match = _CHECKPOINT_ID.match(text)
        if not match:
            raise InvalidError(
                f"{text!r} is not a checkpoint ID", hint="a checkpoint ID looks like 1700000000000-123456"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.millis}-{self.nanos:06d}"

    def __lt__(self, other: CheckpointId) -> bool:
        return (self.millis, self.nanos) < (other.millis, other.nanos)


def task_name(index: int) -> str:
    """``Partition <index>``. Task i owns partition i of every changelog."""
    return f"Partition {index}"


def task_index(task: str) -> int:
    """The number in a task's name. Raises: InvalidError if it is not a task's name."""
    match = _TASK.match(task)
    if not match:
        raise InvalidError(
            f"{task!r} is not the name of a task", hint="tasks are called 'Partition 0', 'Partition 1', …"
        )
    return int(match[1])


def task_path(task: str) -> str:
    """The form of a task's name in paths and in names of blobs: ``Partition_<index>``."""
    return f"Partition_{task_index(task)}"


def task_prefix(job_key: str, task: str) -> str:
    """The prefix of the names of all blobs of a task; ends in ``/``."""
    return f"{job_key}/{task_path(task)}/"


def attachment_blob(job_key: str, task: str, attempt: str, name: str) -> str:
    """The name of the blob with an attachment of an attempt."""
    return f"{task_prefix(job_key, task)}_commit/{attempt}/{name}"


def task_at(path: str) -> str | None:
    """The task of a :func:`task_path`; None if it is something else."""
    task = path.replace("_", " ", 1)
    return task if _TASK.match(task) else None


def source_topic(source: str) -> str | None:
    """The topic of a source partition (``orders-0`` → ``orders``). None if the name has another form."""
    match = _SOURCE.match(source)
    return match[1] if match else None


def check_offsets(input_offsets: Mapping[str, int], **where: object) -> None:
    """Check input offsets: source partition (``orders-0``) → next offset. Raises: InvalidError for a wrong one."""
    if not isinstance(input_offsets, Mapping):
        raise InvalidError(
            f"input offsets must be a mapping, not {type(input_offsets).__name__}",
            hint='for example {"orders-0": 1234}',
            **where,
        )
    for source, offset in input_offsets.items():
        if not isinstance(source, str) or not _SOURCE.match(source):
            raise InvalidError(
                f"{source!r} is not a source partition", hint='write <topic>-<partition>, such as "orders-0"', **where
            )
        if type(offset) is not int or not 0 <= offset <= _MOST_OFFSET:
            raise InvalidError(
                f"the input offset of {source} is {offset!r}: it must be a whole number that is not negative",
                hint="give the offset of the next message to process",
                source=source,
                **where,
            )


def topic_name(*names: str) -> str:
    """Names joined by ``-``, with every ``-`` inside a name doubled, so that different names never give the same topic.

    No name begins with ``-``, so in a row of an odd number of ``-`` the last one is the separator.
    """
    return "-".join([name.replace("-", "--") for name in names])


def transactional_id(*names: str) -> str:
    """``statemgr`` and the names joined by ``.``. A ``.`` inside a name becomes ``%2E``, which no name contains."""
    return ".".join(["statemgr", *[name.replace(".", "%2E") for name in names]])


def attempt_millis(attempt: str) -> int | None:
    """When an attempt began by the clock of its machine (epoch milliseconds). None if its ID has another form."""
    millis = attempt.partition("-")[0]
    return int(millis) if millis.isdecimal() and len(millis) <= 19 else None


@dataclass(frozen=True)
class IdSource:
    """Makes the IDs of one process.

    Args:
        time_ns: wall clock in nanoseconds since the epoch.
        token: random text, 32 hexadecimal digits.
    """

    time_ns: Callable[[], int]
    token: Callable[[], str]

    def checkpoint_id(self) -> CheckpointId:
        return CheckpointId.at(self.time_ns())

    def epoch(self, newest: int) -> int:
        """A number for a new owner, higher than ``newest``, the highest published one, and different from others'.

        A random step of 32 bits distinguishes owners that read the same topic, whatever their clocks say.
        """
        return newest + 1 + int(self.token()[:8], 16)

    def attempt_id(self) -> str:
        """A unique ID that people can sort by time: ``<epoch millis>-<16 random hexadecimal digits>``."""
        return f"{self.time_ns() // 1_000_000}-{self.token()[:16]}"
