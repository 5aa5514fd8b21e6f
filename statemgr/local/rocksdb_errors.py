"""What RocksDB's errors mean. Pure.

rocksdict raises plain ``Exception`` with RocksDB's status as its text (``Corruption: …``, ``IO error: …``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import DbClosedError

from statemgr.errors import (
    AccessDenied,
    ClosedError,
    CorruptError,
    DiskFull,
    InvalidError,
    RetryableError,
    StatemgrError,
)

_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_NOT_BYTES = "raw mode only support bytes"


def translate(error: Exception, what: str, path: Path) -> StatemgrError:
    """The typed error for one that rocksdict raised while doing ``what`` (``"cannot …"``) at ``path``."""
    if isinstance(error, DbClosedError):
        return ClosedError("the store is closed", path=path)
    if _NOT_BYTES in str(error):
        return InvalidError(f"{what}: {error}", hint="keys and values are bytes", path=path)
    text = str(error).strip()
    reason = f"{what}: {text}"
    if any(full in text for full in _FULL):
        return DiskFull(reason, hint="free space below state.dir; nothing committed is lost", path=path)
    if "LOCK" in text and ("lock hold by current process" in text or "While lock file" in text):
        return InvalidError(
            reason, hint="another store object or process has this directory open; clone it instead", path=path
        )
    if "Permission denied" in text or "Read-only file system" in text:
        return AccessDenied(reason, hint="the user of this process needs read and write rights there", path=path)
    if "Too many open files" in text:
        return RetryableError(reason, hint="lower stores.<name>.rocksdb.max.open.files or raise ulimit -n", path=path)
    if text.startswith(("Corruption", "Invalid argument")) or "No such file or directory" in text:
        return CorruptError(reason, hint="the local copy is damaged: remove it, and it is restored", path=path)
    return RetryableError(reason, hint="the local disk needs a look", path=path)


def is_vendors(error: Exception) -> bool:
    """Whether rocksdict raised it; an iterator of changes raises its own errors, which pass."""
    return type(error) is Exception or isinstance(error, DbClosedError) or _NOT_BYTES in str(error)


@contextmanager
def translated(what: str, path: Path) -> Iterator[None]:
    """Turn every error of rocksdict in the block into a typed one.

    Raises: DiskFull, CorruptError, InvalidError (locked, or not bytes), ClosedError, AccessDenied, RetryableError.
    """
    try:
        yield
    except Exception as error:
        if not is_vendors(error):
            raise
        raise translate(error, what, path) from error
