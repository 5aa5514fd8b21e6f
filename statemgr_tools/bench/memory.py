"""Makes memory available, so that a measurement of complete states shows the cost of the code, not of new pages.

The host of a virtual machine takes back memory that has been free for a second or two. The first use of such a page
costs more than copying it, and a different amount each time. So before a measurement, an empty file with as many bytes
as it will write is read into the page cache, and deleted when the measurement's clock starts.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from statemgr.model.hashing import read_buffer
from statemgr_tools.bench.session import Session

_PIECE = 1024 * 1024
_LOOK_S = 0.005


@contextmanager
def fresh_place(session: Session, name: str, size: int) -> Iterator[tuple[Path, Path]]:
    """Yield a new directory, and a file that reserves memory for ``size`` bytes in that directory.

    The directory is removed at the end. The system's unwritten data is on the disk when the block begins.
    """
    directory = session.fresh(name)
    held = directory.with_name(f"{directory.name}.held")
    try:
        with open(held, "wb") as file:
            file.truncate(min(size, psutil.virtual_memory().free))
        with open(held, "rb", buffering=0) as file:
            buffer = read_buffer(_PIECE)
            while file.readinto(buffer):
                pass
        os.sync()
        yield directory, held
    finally:
        let_go(held)
        shutil.rmtree(directory)


def let_go(held: str | Path | None) -> None:
    """Release the reserved memory. Call this when a measurement starts its clock."""
    if held is not None:
        Path(held).unlink(missing_ok=True)


@contextmanager
def let_go_at_first_file(held: Path, directory: Path) -> Iterator[None]:
    """Release the memory for another program as soon as that program creates something in ``directory``."""
    over = threading.Event()

    def look() -> None:
        while not any(directory.glob("*")) and not over.wait(_LOOK_S):
            pass
        let_go(held)

    thread = threading.Thread(target=look, name="bench-memory")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
