"""What the operating system's errors mean for local files. Pure."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from statemgr.errors import AccessDenied, CorruptError, DiskFull, MissingState, RetryableError, StatemgrError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
#: A symbolic link or something else than was recorded stands where a file or directory is expected.
_ALTERED = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR}


def translate(error: OSError, what: str, path: Path) -> StatemgrError:
    """The typed error for ``error``, met while doing ``what`` (``"cannot …"``) at ``path``."""
    reason = f"{what}: {error.strerror or error}"
    if error.errno in _FULL:
        return DiskFull(reason, hint="free space below state.dir, or move it; nothing committed is lost", path=path)
    if error.errno in _REFUSED:
        return AccessDenied(reason, hint="the user of this process needs read and write rights there", path=path)
    if error.errno == errno.ENOENT:
        return MissingState(reason, hint="the local copy is gone; restore it", path=path)
    if error.errno in _ALTERED:
        return CorruptError(reason, hint="something else was put in its place; restore it", path=path)
    return RetryableError(reason, hint="the local disk or its limits (open files) need a look", path=path)


@contextmanager
def translated(what: str, path: Path) -> Iterator[None]:
    """Turn every OSError of the block into a typed error.

    Raises: DiskFull, AccessDenied, MissingState (it vanished), CorruptError (not the kind of file it was),
    RetryableError (anything else).
    """
    try:
        yield
    except OSError as error:
        raise translate(error, what, path) from error
