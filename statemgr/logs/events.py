"""The events of the log: each line that tells the story of a job has one, and fields that JSON lines contain."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import StrEnum

from statemgr.logs.limit import flush_suppressed

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Event(StrEnum):
    """What a line is about. The values are part of the public surface: filters and alerts use them."""

    #: The consumer group, or an engine such as Spark, gave this process tasks.
    ASSIGNED = "assigned"
    REVOKED = "revoked"
    #: A task is restored, and processes messages from now on.
    OPENED = "opened"
    #: A store is restored.
    RESTORED = "restored"
    COMMITTED = "committed"
    SNAPSHOT = "snapshot"
    #: Something failed, and will be tried again.
    RETRYING = "retrying"
    #: Something takes long. The line says what it waits for.
    WAITING = "waiting"
    #: Something failed, and will not be tried again by itself.
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"
    #: A line of a client library: librdkafka, botocore or urllib3.
    CLIENT = "client"


def tell(
    log: logging.Logger, event: Event, message: str, *args: object, level: int = logging.INFO, **fields: object
) -> None:
    """Write one line. Any thread may call this.

    Args:
        message: the line, with ``%s`` for each of ``args``. It is complete without the fields.
        fields: attributes of the record, and members of a JSON line: ``job``, ``task``, ``store``, ``bytes``,
            ``seconds`` and others. None is left out.
    """
    flush_suppressed()
    if log.isEnabledFor(level):
        given = {name: value for name, value in fields.items() if value is not None}
        log.log(level, message, *args, extra={"event": event.value, **given}, stacklevel=2)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things for people, such as ``1 task`` or ``2 tasks``. ``plural``: if it is not ``noun`` with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size(count: int) -> str:
    """A number of bytes for people, such as ``12.3 MiB``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers for people, such as ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"
