"""The two formats of the log: text for people, and one JSON object on each line for machines."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

#: Attributes of every record; all others are fields.
_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
#: A task, or a task and a store, as they begin many lines.
_PLACE = re.compile(r"(?:task )?(Partition \d+)(?:/([\w-]+))?")
_WHERE = ("job", "task", "store")
#: Warnings and errors of these loggers that name no event have ``failed``.
_OURS = ("statemgr.", "spark_integration.")


def utc(seconds: float) -> str:
    """A time in seconds since the epoch, to the millisecond: ``2026-01-31T12:00:00.000Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormat(logging.Formatter):
    """``2026-01-31T12:00:00.000Z INFO statemgr.consumer.loop: …``; only a traceback takes further lines."""

    def format(self, record: logging.LogRecord) -> str:
        message = " ".join(record.getMessage().splitlines())
        line = f"{utc(record.created)} {record.levelname} {record.name}: {message}"
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        return f"{line}\n{record.exc_text}" if record.exc_text else line


class JsonFormat(logging.Formatter):
    """One JSON object on each line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``event``, ``message``, ``job``,
    ``task``, ``store``, the fields of the event, and ``traceback``. What is not known is null. A field
    that JSON cannot show is text, as Python shows it.

    Args:
        job: the name of the job, for lines that do not name one.
    """

    def __init__(self, job: str) -> None:
        super().__init__()
        self._job = job

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "failed" if record.levelno >= logging.WARNING and record.name.startswith(_OURS) else None,
            "message": record.getMessage(),
            "job": self._job,
            "task": None,
            "store": None,
        }
        line |= _where(record)
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["traceback"] = record.exc_text
        # in ASCII, so that no encoding of the stream and no line separator of Unicode can break the line
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except (TypeError, ValueError):  # a field of the application with keys that are no text, NaN, or a cycle
            return json.dumps({name: _plain(value) for name, value in line.items()}, default=str)


def _plain(value: object) -> object:
    """The value if JSON has it, else as Python shows it."""
    try:
        json.dumps(value, default=str, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _where(record: logging.LogRecord) -> dict[str, str]:
    """The task and the store that the arguments of a message name: as text, or as an object that has both."""
    found: dict[str, str] = {}
    for one in record.args if isinstance(record.args, tuple) else ():
        if isinstance(one, str):
            if place := _PLACE.fullmatch(one):
                found.setdefault("task", place[1])
                if place[2]:
                    found.setdefault("store", place[2])
            continue
        places = getattr(one, "where", None)  # of an error
        for name in _WHERE:
            value = places.get(name) if isinstance(places, dict) else getattr(one, name, None)
            if isinstance(value, str):
                found.setdefault(name, value)
    return found
