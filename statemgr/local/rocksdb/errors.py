"""Translates RocksDB's errors. Pure.

rocksdict raises plain ``Exception`` with RocksDB's status as its text (``Corruption: …``, ``IO error: …``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import DbClosedError

from statemgr.errors import ClosedError, CorruptFile, InvalidError, StatemgrError
from statemgr.os_errors import Fault, fault_in, of_fault

_NOT_BYTES = "raw mode only support bytes"
_DAMAGED = "remove the directory: the store is then restored"


def translate(error: Exception, what: str, path: Path) -> StatemgrError:
    """The typed error for an error of rocksdict. ``what``: begins the message (``"cannot …"``)."""
    if isinstance(error, DbClosedError):
        return ClosedError("the store is closed", path=path)
    if _NOT_BYTES in str(error):
        return InvalidError(f"{what}: {error}", hint="pass bytes as keys and values", path=path)
    text = str(error).strip()
    reason = f"{what}: {text}"
    if "LOCK" in text and ("lock hold by current process" in text or "While lock file" in text):
        return InvalidError(reason, hint="clone the directory: another store object or process has it open", path=path)
    is_corrupt = text.startswith(("Corruption", "Invalid argument"))
    fault = fault_in(text) or (Fault.ALTERED if is_corrupt else Fault.FAILED)
    hints = {Fault.GONE: _DAMAGED, Fault.ALTERED: _DAMAGED}
    return of_fault(fault, reason, path, kinds={Fault.GONE: CorruptFile}, hints=hints)


def is_vendors(error: Exception) -> bool:
    """Whether rocksdict raised the error. Errors of an iterator of changes are not translated."""
    return type(error) is Exception or isinstance(error, DbClosedError) or _NOT_BYTES in str(error)


@contextmanager
def translated(what: str, path: Path) -> Iterator[None]:
    """A context manager that raises rocksdict's errors as typed ones.

    Raises: DiskFull, CorruptError, InvalidError (locked, or not bytes), ClosedError, AccessDenied, RetryableError.
    """
    try:
        yield
    except Exception as error:
        if not is_vendors(error):
            raise
        raise translate(error, what, path) from error
