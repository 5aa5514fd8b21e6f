"""Memory at hand, so that a measurement of whole states says what the code costs and not what new pages cost.

The host of a virtual machine takes back what has been free for a second or two, and the first touch of such a page
costs more than copying it, now more, now less. So as many bytes as a measurement will write are taken into the page
cache before it, as a file with nothing in it, and let go of in the moment in which its clock starts.
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
    """A new directory that is removed at the end, and a file that holds memory for ``size`` bytes to be written there.

    What others have left to be written is on the disk when the block begins.
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
    """Give the held memory to whoever writes next: to be called when a measurement starts its clock."""
    if held is not None:
        Path(held).unlink(missing_ok=True)


@contextmanager
def let_go_at_first_file(held: Path, directory: Path) -> Iterator[None]:
    """Do that for a program of others: as soon as it has made something in ``directory``."""
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
