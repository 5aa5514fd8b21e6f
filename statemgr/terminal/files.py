"""Files that commands write for people."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from statemgr.errors import InvalidError
from statemgr.os_errors import MISTYPED, Fault, translated

_HINTS = {
    Fault.EXISTS: "use --force to overwrite it",
    Fault.GONE: "create its directory first",
    Fault.ALTERED: "name a file in a directory",
}


def write_file(path: Path, text: str, *, force: bool, mode: int = 0o600) -> None:
    """Write a configuration file, or one that belongs to it, as a whole or not at all where its directory permits that.

    Only its owner may read it, unless ``mode`` says otherwise: people do put passwords here.
    Raises: InvalidError if it exists and ``force`` is not given, or if no file can be there; DiskFull, AccessDenied,
        RetryableError.
    """
    with translated("the file cannot be written", path, kinds=MISTYPED, hints=_HINTS):
        if force:
            path = path.resolve()  # also of a link whose target is missing
        if is_new := not (force and path.exists()):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        elif path.is_file() and _replaced(path, text):
            return
        else:
            flags = os.O_WRONLY | os.O_TRUNC
        descriptor = os.open(path, flags, mode)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            if is_new:
                path.unlink()
            raise


def _replaced(path: Path, text: str) -> bool:
    """Replace a file as a whole. False where only the file itself may be changed, and not its directory."""
    from statemgr.local import durable  # loads RocksDB

    try:
        durable.write_file(path, text.encode(), like=path.stat())
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY):
            raise
        return False
    return True


def check_replaceable(path: Path, what: str, *beginnings: bytes) -> None:
    """Check that a command may replace what is at a path: nothing, an empty file, or one that begins as its own do.

    Raises: InvalidError for anything else; AccessDenied, RetryableError.
    """
    other = "name another file, or remove it"
    with translated("the file cannot be read", path), suppress(FileNotFoundError, NotADirectoryError):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InvalidError(f"{path} is not a regular file", hint=other)
        with path.open("rb") as file:
            found = file.read(max(map(len, beginnings)))
        if found and not found.startswith(beginnings):
            raise InvalidError(f"{path} has something else than {what}, and is not replaced", hint=other)
