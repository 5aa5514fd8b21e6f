"""Translates errors of the operating system: the one map of ``errno``, for every adapter. Pure.

RocksDB and librdkafka repeat the system's messages in their own. :func:`fault_in` finds them there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from pathlib import Path

from statemgr.errors import (
    AccessDenied,
    CorruptFile,
    DiskFull,
    InvalidError,
    MissingFile,
    RetryableError,
    StatemgrError,
)


class Fault(Enum):
    """The kinds of errors that need different answers."""

    #: No space, or no quota, is left.
    FULL = "full"
    #: This process may not do it.
    REFUSED = "refused"
    #: The process or the machine has run out of file descriptors or memory. The files themselves are fine.
    LIMIT = "limit"
    #: The file or directory does not exist.
    GONE = "gone"
    #: The path exists already.
    EXISTS = "exists"
    #: A symbolic link, or another kind of file than expected.
    ALTERED = "altered"
    #: Anything else: an I/O error, a time-out of a network file system.
    FAILED = "failed"


_FAULTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Fault.FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Fault.REFUSED),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS), Fault.LIMIT),
    errno.ENOENT: Fault.GONE,
    errno.EEXIST: Fault.EXISTS,
    **dict.fromkeys((errno.ELOOP, errno.ENOTDIR, errno.EISDIR), Fault.ALTERED),
}
#: Errors of a file system without hard links, or without them between two places.
CANNOT_LINK = frozenset(
    (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
)
_KINDS: Mapping[Fault, type[StatemgrError]] = {
    Fault.FULL: DiskFull,
    Fault.REFUSED: AccessDenied,
    Fault.LIMIT: RetryableError,
    Fault.GONE: MissingFile,
    Fault.EXISTS: InvalidError,
    Fault.ALTERED: CorruptFile,
    Fault.FAILED: RetryableError,
}
#: Kinds of errors of a path that a user has given, and may have mistyped.
MISTYPED: Mapping[Fault, type[StatemgrError]] = dict.fromkeys((Fault.GONE, Fault.ALTERED, Fault.EXISTS), InvalidError)
LIMIT_HINT = "raise the limit of the process (ulimit -n), or lower stores.<name>.rocksdb.max.open.files"
_HINTS = {
    Fault.FULL: "free space there, or use another disk; nothing that is committed is lost",
    Fault.REFUSED: "give the user of this process read and write rights there",
    Fault.LIMIT: LIMIT_HINT,
    Fault.GONE: "another process deleted it",
    Fault.EXISTS: "remove or rename it: statemgr never writes to what exists",
    Fault.ALTERED: "another file or a link has replaced it; links are never followed",
    Fault.FAILED: "check the disk",
}
#: Kinds and hints of errors of local files, which are a cache.
_LOCAL_KINDS = {Fault.GONE: CorruptFile, Fault.ALTERED: InvalidError}
_LOCAL_HINTS = {Fault.GONE: "what is local is a cache: open the task again, and it is restored"}
#: System message → its fault. The most specific faults come first, because a text may have several messages.
_WORDS = {
    os.strerror(number): fault
    for fault in (Fault.LIMIT, Fault.FULL, Fault.REFUSED, Fault.GONE)
    for number, of_number in _FAULTS.items()
    if of_number is fault and number != errno.EPERM
}


def fault_of(error: OSError) -> Fault:
    """The kind of an error."""
    return _FAULTS.get(error.errno or 0, Fault.FAILED)


def fault_in(text: str) -> Fault | None:
    """The fault whose system message is in a text of another library."""
    return next((fault for words, fault in _WORDS.items() if words in text), None)


def limit_behind(error: BaseException) -> OSError | None:
    """The error about a limit of this process that caused another library's ``error``. None if there is none."""
    seen: set[int] = set()
    pending: list[object] = [error]
    while pending:
        current = pending.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and fault_of(current) is Fault.LIMIT:
            return current
        pending += [current.__cause__, current.__context__, *current.args, getattr(current, "reason", None)]
        pending.append(getattr(current, "kwargs", {}).get("error"))
    return None


def translate(
    error: OSError,
    what: str,
    path: Path | None = None,
    *,
    kinds: Mapping[Fault, type[StatemgrError]] | None = None,
    hints: Mapping[Fault, str] | None = None,
    **where: object,
) -> StatemgrError:
    """The typed error for ``error`` at ``path``. ``what`` begins its message (``"cannot …"``).

    Args:
        kinds: classes that replace the common ones, if the caller knows more (a missing blob).
        hints: hints that replace the common ones.
        where: further fields of the error.
    """
    return of_fault(fault_of(error), f"{what}: {error.strerror or error}", path, kinds=kinds, hints=hints, **where)


def of_fault(
    fault: Fault,
    reason: str,
    path: Path | None = None,
    *,
    kinds: Mapping[Fault, type[StatemgrError]] | None = None,
    hints: Mapping[Fault, str] | None = None,
    **where: object,
) -> StatemgrError:
    """The typed error for a fault. The arguments are those of :func:`translate`."""
    kind = (kinds or {}).get(fault, _KINDS[fault])
    hint = (hints or {}).get(fault, _HINTS[fault])
    return kind(reason, hint=hint, path=path, **where)


@contextmanager
def translated(
    what: str,
    path: Path | None = None,
    *,
    kinds: Mapping[Fault, type[StatemgrError]] | None = None,
    hints: Mapping[Fault, str] | None = None,
    **where: object,
) -> Iterator[None]:
    """A context manager that raises every OSError as a typed error. The arguments are those of :func:`translate`.

    Raises: DiskFull, AccessDenied, MissingFile (it vanished), InvalidError (it exists already), CorruptFile (another
    kind of file), RetryableError (a limit of this process, or anything else).
    """
    try:
        yield
    except OSError as error:
        raise translate(error, what, path, kinds=kinds, hints=hints, **where) from error


def disk_errors(path: Path) -> AbstractContextManager[None]:
    """A context manager that raises errors of local files as statemgr's.

    Raises: DiskFull, InvalidError (the path is something else), CorruptFile (the file is gone),
    AccessDenied, RetryableError (a limit of this process, or an I/O error).
    """
    return translated("a local file cannot be used", path, kinds=_LOCAL_KINDS, hints=_LOCAL_HINTS)
