"""Files that commands write for people."""

from __future__ import annotations

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
    """Write a configuration file, or one that belongs to it, as a whole or not at all.

    Only its owner may read it, unless ``mode`` says otherwise: people do put passwords here.
    Raises: InvalidError if it exists and ``force`` is not given, or if no file can be there; DiskFull, AccessDenied,
        RetryableError.
    """
    with translated("the file cannot be written", path, kinds=MISTYPED, hints=_HINTS):
        if force and path.is_file():
            from statemgr.local import durable  # loads RocksDB

            durable.write_file(path.resolve(), text.encode(), like=path.stat())
            return
        is_new = not (force and path.exists())  # such as /dev/stdout
        descriptor = os.open(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else 0), mode)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            if is_new:
                path.unlink()
            raise


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
