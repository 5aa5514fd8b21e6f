"""The body of a GET over HTTP. Reads the connection of urllib3's answer.

The time-out of a socket starts again with each byte, so a large read of a body that trickles could last for hours.
Small reads return the bytes that have arrived, and the caller sees the pace, but they cost too much processor time on a
fast network. So a body that arrives fast is read in large pieces, and a thread breaks off each one that lasts too long.
The caller then continues in another connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from statemgr.errors import UnavailableError
from statemgr.ports import Clock

#: Seconds after which a read returns with what has arrived.
_PATIENCE_S = 1
#: Bytes that are asked of a slow connection at once. A fast one is asked for all that the caller wants, because each
#: read of many threads costs a turn at Python's interpreter.
_PIECE = 256 * 1024
#: From this many bytes a second, a body is fast.
_FAST = 1024 * 1024
#: Seconds that a large read may last.
_MOST_S = 20.0
#: Seconds between two checks of the large reads in progress.
_LOOK_S = 1.0


class LargeReads:
    """The large reads in progress on all connections of a client."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._until: dict[object, tuple[float, Any]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def read(self, raw: Any, buffer: memoryview) -> int:
        """Fill the buffer, except at the end of the body. Breaks off the connection if that lasts too long."""
        if self._thread is None:
            self._watch()
        read = object()
        self._until[read] = self.clock.monotonic() + _MOST_S, raw
        try:
            size: int = raw.readinto(buffer)
            return size
        finally:
            del self._until[read]

    def close(self) -> None:
        """End the thread that watches."""
        self._closed.set()

    def _watch(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._break_off_overdue, name="statemgr-blob-reads", daemon=True)
                thread.start()
                self._thread = thread

    def _break_off_overdue(self) -> None:
        while not self._closed.wait(_LOOK_S):
            now = self.clock.monotonic()
            for until, raw in list(self._until.values()):
                if now >= until:
                    # the read may have ended meanwhile, and another one may have its connection
                    with suppress(ValueError, RuntimeError, OSError):
                        raw.shutdown()


class BodyReader:
    """A blob's body, read from urllib3's response. boto3's ``StreamingBody`` can neither return the bytes that have
    arrived nor break off a read, and its ``read`` is several times slower.

    Args:
        raw: the response.
        size: bytes of the body; None if the server does not report them.
        translated: a context that raises the errors of the network as statemgr's.
        where: the place of the blob, for errors.
    """

    def __init__(
        self,
        raw: Any,
        size: int | None,
        large: LargeReads,
        translated: Callable[[], AbstractContextManager[None]],
        **where: str,
    ) -> None:
        self._raw = raw
        self._left = size
        self._large = large
        self._translated = translated
        self._where = where
        self._is_fast = False

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        return None

    def readinto(self, buffer: memoryview) -> int:
        """Read up to the buffer's size. If the body is slow, this returns within seconds with the bytes that have
        arrived.

        Raises: UnavailableError if the body ends early or arrives too slowly.
        """
        wanted = len(buffer) if self._left is None else min(len(buffer), self._left)
        got, begun = 0, self._large.clock.monotonic()
        patience = begun + _PATIENCE_S
        while got < wanted:
            with self._translated():
                size = self._read(buffer[got:wanted])
            if not size:
                break
            got += size
            now = self._large.clock.monotonic()
            self._is_fast = size >= _FAST * (now - begun)
            begun = now
            if now >= patience:
                break
        if self._left is not None:
            if wanted and not got:
                raise UnavailableError(f"the body of the blob ended {self._left} bytes early", **self._where)
            self._left -= got
        return got

    def _read(self, piece: memoryview) -> int:
        if self._is_fast:
            return self._large.read(self._raw, piece)
        arrived: bytes = self._raw.read1(min(len(piece), _PIECE))
        piece[: len(arrived)] = arrived
        return len(arrived)
