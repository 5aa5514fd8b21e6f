"""Creates and checks directories below ``state.dir``, level by level. They are private, and no level may be a link.

The operator chooses ``base``, so it may be a link. Every level below must be a directory of this user (or of root).
Levels are created with mode 0700, so that nobody else can replace them.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from statemgr.errors import InvalidError

_PRIVATE = 0o700


def make(base: Path, *names: str) -> Path:
    """Create ``base`` and the levels below it where they are missing. Returns: the last one.

    Raises: InvalidError if a level is not a directory of this user; OSError.
    """
    if not names:
        _make_parents(base)
    path = base
    for name in names:
        path = path / name
        try:
            _check(path)  # almost all are there
        except FileNotFoundError:
            _make_parents(path)
            _check(path)
    return path


def check(base: Path, *names: str) -> Path:
    """The path of the last level. A missing level is no error.

    Raises: InvalidError if a level is not a directory of this user; OSError.
    """
    path = base
    for name in names:
        path = path / name
        with suppress(FileNotFoundError):
            _check(path)
    return path


def _make_parents(path: Path) -> None:
    if path.is_dir():
        return
    if path.parent != path:
        _make_parents(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path, _PRIVATE)


def _check(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidError(
            "a local directory is something else",
            hint="remove it; symbolic links below state.dir are never followed",
            path=path,
        )
    user = os.geteuid()
    if status.st_uid not in (user, 0) and user != 0:
        raise InvalidError(
            f"a local directory belongs to another user (ID {status.st_uid})",
            hint="set state.dir to a directory of this user, or remove the other one",
            path=path,
        )
