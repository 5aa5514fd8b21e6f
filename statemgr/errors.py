"""Every error that statemgr raises, in one tree. The kind of an error says what to do about it.

::

    StatemgrError
    ├── RetryableError          try again later: nothing was changed
    │   ├── UnavailableError    a broker or a blob store was not reached within its deadline
    │   │   └── StateUnreachable    a part of an open store is still in the blob store, and cannot be fetched
    │   └── LocalStateLost      an open store's files are damaged or gone: open the task again, it is restored
    ├── FencedError             another owner took over: stop, do not retry
    ├── OutcomeUnknownError     it may have happened: the next commit or opening settles it
    ├── CorruptError            bytes are not what was written: use another copy
    │   ├── CorruptBlob
    │   ├── CorruptFile         a local file: the local copy is a cache, and is restored
    │   └── CorruptRecord
    ├── MissingError            something that must exist does not
    │   ├── MissingBlob
    │   └── MissingState
    │       └── MissingFile     a local file or directory: the local copy is a cache, and is restored
    ├── InvalidError            the request cannot be right: correct it and call again
    │   ├── ConfigError
    │   ├── LayoutMismatch
    │   ├── TopicMisconfigured
    │   ├── PermissionNeeded    refused without a one-shot permission
    │   ├── BatchMismatch       a micro-batch that does not continue the checkpoint
    │   └── ClosedError
    │       └── OpeningCancelled    the task was taken away while it was being opened
    ├── AccessDenied            credentials or rights: a retry cannot help
    ├── DiskFull                free space, then call again: the old state is untouched
    └── PrerequisiteMissing     a program that must be installed is not

Pure: no I/O. Errors carry what (message), where (keyword fields) and a hint, and survive pickling and JSON.
"""

from __future__ import annotations

import json
from typing import Any

#: The hint if one copy of a state cannot be used.
ANOTHER_COPY = (
    "put another factory first in task.restore.factories, or restore an older checkpoint with "
    "`statemgr restore --checkpoint ID --into DIR`"
)
#: The hint of a fenced owner.
NEW_OWNER = (
    "stop this process; nothing is lost, and the new owner processes what it did not publish. If a command has taken "
    "over, such as `statemgr checkpoints rollback`, start the job again"
)


class StatemgrError(Exception):
    """Root of all errors of statemgr.

    Args:
        message: what happened, one sentence.
        hint: what the operator can do about it.
        where: names of things (``job``, ``task``, ``store``, ``blob``, ``topic``, ``partition``, ``offset``, ``key``…).
    """

    #: Exit status of the command line for this kind.
    exit_status = 1

    def __init__(self, message: str, *, hint: str | None = None, **where: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where: dict[str, object] = {name: value for name, value in where.items() if value is not None}

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text += " [" + ", ".join(f"{name}={value}" for name, value in self.where.items()) + "]"
        if self.hint:
            text += f" Hint: {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.where)

    def with_where(self, **where: object) -> StatemgrError:
        """Add fields that an outer caller knows, without replacing any. Returns: this error."""
        for name, value in where.items():
            if value is not None:
                self.where.setdefault(name, value)
        return self

    def to_json(self) -> str:
        """One line of JSON from which :func:`from_json` rebuilds an error of the same kind."""
        where = {k: v if isinstance(v, int | float | bool) else str(v) for k, v in self.where.items()}
        return json.dumps({"error": type(self).__name__, "message": self.message, "hint": self.hint, "where": where})


def _rebuild(kind: type[StatemgrError], message: str, hint: str | None, where: dict[str, object]) -> StatemgrError:
    return kind(message, hint=hint, **where)


class RetryableError(StatemgrError):
    """The call failed and changed nothing. The same call may succeed later."""

    exit_status = 3


class UnavailableError(RetryableError):
    """A broker or a blob store could not be reached, or did not answer, within its deadline."""


class StateUnreachable(UnavailableError):
    """A part of an open store is still in the blob store, which cannot be reached now. The same read may succeed later.
    A consumer loop pauses the task, and goes on from its checkpoint when the blob store can be reached.
    """


class LocalStateLost(RetryableError):
    """The files of an open store were damaged or deleted. Open the task (or the attempt) again: the store is restored
    from a backend as of its checkpoint, and input is processed again from that checkpoint's offsets.
    """


class FencedError(StatemgrError):
    """Another owner has taken over this task or job. Stop. The other owner processes again what was not published."""


class OutcomeUnknownError(StatemgrError):
    """A publish may have happened: its acknowledgement was lost, it still runs, or it is known and its backup is not
    whole. Nothing may be deleted until the next commit has settled it."""

    exit_status = 3


class CorruptError(StatemgrError):
    """Bytes that were read are not the bytes that were written."""

    exit_status = 4


class CorruptBlob(CorruptError):
    """A blob has the wrong length, hash or format."""


class CorruptFile(CorruptError):
    """A local file or directory is not what it was when it was written. The next opening restores it."""


class CorruptRecord(CorruptError):
    """A record on a Kafka topic is not one that statemgr wrote, or of an unknown version."""


class MissingError(StatemgrError):
    """Something that a published checkpoint needs does not exist."""

    exit_status = 4


class MissingBlob(MissingError):
    """A blob is gone (deleted, or expired)."""


class MissingState(MissingError):
    """No restore factory can supply a store that the checkpoint lists."""


class MissingFile(MissingState):
    """A local file or directory is gone. The next opening restores it."""


class InvalidError(StatemgrError):
    """The request is wrong. Correct it and call again."""

    exit_status = 2


class ConfigError(InvalidError):
    """A configuration key is unknown, has a bad value, or contradicts another."""


class LayoutMismatch(InvalidError):
    """The job was checkpointed with another number of tasks or another partitioner."""


class TopicMisconfigured(InvalidError):
    """A topic's settings would lose state."""

    exit_status = 1


class PermissionNeeded(InvalidError):
    """Refused because it could lose state. To do it anyway, repeat the call with the named one-shot permission."""


class BatchMismatch(InvalidError):
    """A micro-batch neither repeats nor continues the published checkpoint."""


class ClosedError(InvalidError):
    """The object was closed, or its owner lost the task."""


class OpeningCancelled(ClosedError):
    """The task was taken away, or the process stops, while the task was being opened. Nothing was changed."""


class AccessDenied(StatemgrError):
    """The broker or the blob store refuses these credentials."""

    exit_status = 3


class DiskFull(StatemgrError):
    """The local disk is full. The committed state is unchanged. Free space and call again."""

    exit_status = 3


class PrerequisiteMissing(StatemgrError):
    """A program or a package that has to be installed first."""

    exit_status = 2


def from_json(text: str) -> StatemgrError:
    """Rebuild an error from :meth:`StatemgrError.to_json`. An unknown kind becomes the root class."""
    data = json.loads(text)
    return _kinds().get(data["error"], StatemgrError)(data["message"], hint=data["hint"], **data["where"])


def _kinds() -> dict[str, type[StatemgrError]]:
    kinds: dict[str, type[StatemgrError]] = {}
    pending = [StatemgrError]
    while pending:
        kind = pending.pop()
        kinds[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return kinds
