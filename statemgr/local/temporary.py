"""Directories for what nobody needs after a block. What dead processes left is removed by the next one.

Each is a directory of its own with a lock, which the kernel releases when the process dies in any way. Its name has the
machine's, because the locks of some network file systems count on one machine only.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from statemgr.local.shared_directories import exclusive_if_free
from statemgr.os_errors import disk_errors

_LOCK, _CONTENT = "lock", "content"
#: Seconds from the creation of a directory until its lock is certainly held.
_NEW_S = 60.0


@contextmanager
def temporary_directory(prefix: str = "statemgr-", parent: Path | None = None) -> Iterator[Path]:
    """A new directory, which is removed after the block.

    Args:
        parent: where it is (default: the system's place for temporary files). This user's directories with the same
            prefix that dead processes left there are removed.

    Raises: as :func:`disk_errors`.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    prefix = f"{prefix}{socket.gethostname()}-"
    with ExitStack() as stack:
        with disk_errors(parent):
            for entry in parent.glob(f"{prefix}*"):
                _remove_if_dead(entry)
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=parent)))
            with suppress(OSError):  # without locks on this file system, nobody takes this one for dead
                stack.enter_context(exclusive_if_free(root / _LOCK))
            (content := root / _CONTENT).mkdir()
        yield content


def _remove_if_dead(root: Path) -> None:
    with suppress(OSError):
        status = root.lstat()  # of a link: not a directory's
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _NEW_S:
            return
        (root / _LOCK).lstat()  # without a lock, it is somebody else's
        with exclusive_if_free(root / _LOCK) as is_free:
            if is_free:
                shutil.rmtree(root, ignore_errors=True)  # of a link: does nothing
